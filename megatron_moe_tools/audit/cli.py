"""The command line of megatron-moe audit: trace one pass, write the reports."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.presets import with_made_up_data
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.hf.config import filled_in
from megatron_moe.io.files import replace_text, require_writable
from megatron_moe.io.program import run_program, say
from megatron_moe.io.texts import hub_hint
from megatron_moe.report.run_info import versions
from megatron_moe_tools import compat

NAME = "megatron-moe audit"

if TYPE_CHECKING:  # flags and files are checked before torch is loaded
    from megatron_moe_tools.audit.findings import Audit

CLEAN, FOUND = 0, 1
_HF_TOKENS = (2, 32)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags; all other flags are those of megatron-moe train."""
    p = Parser(
        prog=NAME,
        usage="%(prog)s --json FILE [the run's flags | --module FILE.py:FACTORY | --hf FOLDER]",
        description="Trace one forward and backward pass and report every cast, promotion and mixed matrix product.",
        epilog="Exit status: 0 clean; 1 an unintended promotion, a product of mixed dtypes, a violation of fp32 state "
        "or an error of the model; 2 a mistake in the flags. Other flags, such as --preset tiny --bf16, are those of "
        "megatron-moe train: the model that they describe is built in one process and makes one training step.",
        allow_abbrev=False,
    )
    p.add_argument("--json", metavar="FILE", help="write the report as JSON")
    p.add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    p.add_argument("--text", metavar="FILE", help="write the report as text; without it, print it")
    p.add_argument(
        "--max-gib", type=float, default=8.0, help="largest model with its training state [GiB] (default: 8)"
    )
    other = p.add_argument_group("a model that is not ours")
    other.add_argument(
        "--module", metavar="FILE.py:FACTORY", help="FACTORY() returns (module, inputs), inputs a tuple or a dict"
    )
    other.add_argument("--hf", metavar="FOLDER", help="a Hugging Face causal LM's folder; weights are optional")
    return p


def main(argv: list[str]) -> int:
    """Audit what the flags name, write the reports, and return the exit status."""
    return run_program(NAME, _main, argv, interrupted="interrupted; nothing was written", rank=0)


def _main(argv: list[str]) -> int:
    flags, rest = parser().parse_known_args(argv)
    taken: dict[str, str] = {}
    for name in ("json", "html", "text"):
        path = getattr(flags, name)
        require_writable(f"--{name}", path)
        if path is not None and taken.setdefault(os.path.realpath(path), name) != name:
            raise ConfigError(
                f"--{taken[os.path.realpath(path)]}, --{name} {path}: one would overwrite the other; give each its own"
            )
    if not flags.max_gib > 0:
        raise ConfigError(f"--max-gib {flags.max_gib:g}: has to be above 0; the default is 8")
    if flags.module is not None or flags.hf is not None:
        audit = _foreign(flags, rest)
    else:
        run = with_made_up_data(compat.parse(rest, filled_in, 1))
        rules.check(run, 1)
        tokenizer = build_tokenizer(run.data, run.model.vocab_size)
        vocabulary = run.derived.padded_vocab_size(run.model.vocab_size or tokenizer.vocab_size)
        need = run.derived.training_bytes(vocabulary) / 2**30
        if need > flags.max_gib:
            raise ConfigError(
                f"{run.derived.parameter_count(vocabulary):,} parameters need {need:,.1f} GiB with gradients and "
                f"optimizer state, more than --max-gib {flags.max_gib:g}. The audit needs every kind of layer once, "
                "not the size: shrink the model, e.g. --num-layers 2 --hidden-size 256 --ffn-hidden-size 512 "
                "--moe-ffn-hidden-size 128 --num-experts 16 --seq-length 64 (and --moe-layer-freq '[0,1]' where the "
                "preset has a pattern), or raise --max-gib"
            )
        from megatron_moe_tools.audit.step import audit_run

        audit = audit_run(run, tokenizer, say)
    from megatron_moe_tools.audit.findings import html_report, json_report, text_report

    report, shown = audit.as_dict(), []
    for name, make in (("json", json_report), ("html", html_report), ("text", text_report)):
        path = getattr(flags, name)
        if path is not None:
            replace_text(Path(path), make(report))
            shown.append(f"wrote {path}")
    print(text_report(report) if flags.text is None else report["verdict"])
    for line in shown:
        print(line)
    return FOUND if audit.failed else CLEAN


def _foreign(flags: argparse.Namespace, rest: list[str]) -> Audit:
    """Audit the model of `--module` or `--hf`."""
    if flags.module is not None and flags.hf is not None:
        raise ConfigError("--module and --hf: audit one model at a time")
    half, hint = {"--bf16": "bfloat16", "--fp16": "float16"}, " (--hf takes --bf16 or --fp16)"
    if flags.module is not None:
        half, hint = {}, ""
    for word in rest:
        if word not in half:
            raise ConfigError(f"{word} does not go with --module or --hf{hint}")
    if len(rest) > 1:
        raise ConfigError(f"{' '.join(rest)}: choose one dtype")
    subject, device = flags.module or flags.hf, "the factory's"
    name, _, factory = subject.rpartition(":")
    if flags.module is not None and not (Path(name).is_file() and name.endswith(".py") and factory):
        raise ConfigError(f"--module {subject}: write FILE.py:FACTORY with a Python file that exists")
    folder = Path(subject)
    if flags.hf is not None and not (folder / "config.json").is_file():
        raise ConfigError(
            f"--hf {subject}: has no config.json; name a folder with a Hugging Face model{hub_hint(subject)}"
        )
    import torch

    from megatron_moe import platform
    from megatron_moe_tools.audit.operations import dtype_name, dtypes_of
    from megatron_moe_tools.audit.step import audit_module
    from megatron_moe_tools.models.load_model import transformers_model

    if flags.module is not None:
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None and spec.loader is not None  # as of every file that ends with .py
        code = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        say(f"building {subject}")
        try:
            spec.loader.exec_module(code)
            made = getattr(code, factory)()
        except Exception as error:
            raise ConfigError(f"--module {subject}: building it failed with {type(error).__name__}: {error}") from error
        if not isinstance(made, tuple) or len(made) != 2:
            made = made, ()
        module, inputs = made
        if not isinstance(module, torch.nn.Module) or not isinstance(inputs, (tuple, list, dict)):
            raise ConfigError(
                f"--module {subject}: {factory}() must return a torch module, or (module, tuple or dict of inputs)"
            )
    else:
        module = transformers_model(folder, getattr(torch, half.get("".join(rest), "float32")))
        device = str(platform.device())
        tokens = torch.randint(0, module.config.vocab_size, _HF_TOKENS, device=device)
        module, inputs = module.to(device).train(), {"input_ids": tokens, "labels": tokens}
    about = {
        "subject": f"forward and backward of {subject}",
        "dtype": ", ".join(sorted(map(dtype_name, dtypes_of(module.parameters())))),
        "device": device,
        "flags": {"module": flags.module, "hf": flags.hf},
        "versions": versions(),
    }
    say(f"tracing one forward and backward pass of {type(module).__name__}")
    if isinstance(inputs, dict):
        return audit_module(module, kwargs=inputs, about=about)
    return audit_module(module, inputs, about=about)
