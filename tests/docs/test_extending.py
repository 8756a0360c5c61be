"""docs/internals/extending.md: its program runs, and its lines do what it says."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_moe.config.setting import DISPATCHERS, EXPERT_BACKENDS, SCORE_FUNCTIONS, Registry
from megatron_moe.hf.families import FAMILIES
from tests.helpers.sources import ROOT

PAGE = (ROOT / "docs" / "internals" / "extending.md").read_text(encoding="utf-8")

# ---- the page's blocks of lines, applied to a copy of the package


def blocks() -> dict[str, str]:
    """Return the page's blocks of lines by what each adds."""
    return dict(re.findall(r"^```diff (\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


def changed_files(*wanted: str) -> dict[str, str]:
    """Return the files that the page changes, each with its lines at the one place where they fit."""
    texts: dict[str, str] = {}
    for part in (part for one in wanted for part in re.split(r"^@@ ", blocks()[one], flags=re.MULTILINE)[1:]):
        head, *lines = part.splitlines()
        file, is_new = head.removesuffix(" (new)"), head.endswith(" (new)")
        assert all(line[0] in " +-" for line in lines), part
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] != left_out) for left_out in "+-")
        assert is_new != (ROOT / file).exists(), file
        text = "" if is_new else texts.get(file) or (ROOT / file).read_text(encoding="utf-8")
        assert is_new or text.count(before) == 1, f"{file}: not at one place:\n{before}"
        texts[file] = text.replace(before, after, 1)
    return texts


# ---- what is registered from outside


def trained(words: list[str]) -> tuple[set[tuple[str, str]], str]:
    """Run the page's program with a command line: the entries that were looked up, and what it prints."""
    program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    looked_up, look_up = set(), Registry.__getitem__

    def recorded(registry: Registry, name: str) -> Any:
        looked_up.add((registry.flag, name))
        return look_up(registry, name)

    stream = io.StringIO()
    mine = [(SCORE_FUNCTIONS, "softplus"), (EXPERT_BACKENDS, "mine"), (DISPATCHERS, "mine")]
    try:
        with (
            patch.object(Registry, "__getitem__", recorded),
            patch.object(sys, "argv", ["mine.py", *words]),
            contextlib.redirect_stdout(stream),
        ):
            exec(program, {"__name__": "documented"})
    finally:
        for registry, name in mine:
            registry._entries.pop(name, None)
    return looked_up, stream.getvalue()


def test_the_program_trains_with_what_it_registers(gloo: Any) -> None:
    small = "--preset tiny --mock-data --vocab-size 100 --seq-length 16 --train-iters 2 --eval-iters 0 --log-interval 1"
    choices = {"--moe-expert-backend": "mine", "--moe-token-dispatcher-type": "mine"}
    choices["--moe-router-score-function"] = "softplus"
    words = [*small.split(), "--expert-model-parallel-size", "2", *(word for pair in choices.items() for word in pair)]
    results = gloo.run(2, trained, words=words)
    assert all(looked_up == set(choices.items()) for looked_up, _ in results)
    assert sum(text.count(" iteration ") for _, text in results) == 2


# ---- what is added to the package: a flag, a preset, a family

ADDED = """
import json, torch
from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.config import cli, rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import build, flatten, replace
from megatron_moe.hf.config import config_of, family_of_run, settings
from megatron_moe.hf.families import FAMILIES, family_of
from megatron_moe.hf.mapping import mapping
from megatron_moe.model.build import build_model
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel import groups
from megatron_moe.engine import schedules
from megatron_moe.engine.schedules import get_model_config
from megatron_moe.training.callback import Callback
from megatron_moe.training.run import pretrain
from megatron_moe_tools import console

def run_of(*words):
    return cli.parse(["--preset", "tiny", "--mock-data", "--vocab-size", "100", *words])

def refusal(act, *args):
    try:
        act(*args)
    except ConfigError as error:
        return str(error)

half, whole = run_of("--moe-shared-expert-scale", "0.5"), run_of()
zero = run_of("--moe-shared-expert-scale", "0")
outputs = []
for run in (half, whole):
    rules.check(run, 1)
    (chunk,) = build_model(run, groups.initialize(run), 128)
    layer = next(module for module in chunk.modules() if isinstance(module, MoELayer))
    outputs.append(layer.shared_experts(torch.ones(4, 1, run.model.hidden_size)))
    groups.destroy()

class Timed(Callback):
    def after_step(self, step, result):
        model = self.trainer.trained.model
        with schedules.without_timers(model):
            timers.append(get_model_config(model[0]).timers is None)
        losses.append(self.trainer.trained.optimizer.chained_optimizers[0].optimizer.__class__.__name__)

timers, losses = [], []
two_steps = "--optimizer lion --train-iters 2 --eval-iters 0 --timing-log-level 1"
pretrain(run_of(*two_steps.split()), callbacks=[Timed()])
from tests.engine.test_schedules import test_the_schedules_read_timers_from_the_configuration as reads_timers
reads_timers()

preset = cli.parse(["--preset", "tiny-64e", "--mock-data"])
rules.check(preset, 1)
as_the_family = {"moe_router_pre_softmax": True, "moe_router_norm_topk_prob": True, "qk_layernorm": True}
config = config_of(replace(preset, **as_the_family), FAMILIES["toy-moe"], "float32")
read = settings(config, has_prediction_layers=False, where="folder")
family = family_of(config, "folder")
names = {name for piece in mapping(build(read.flat), family.names).pieces for name in piece.hf}
print(json.dumps({
    "refused": [
        refusal(run_of, "--moe-shared-expert-scale", "x"),
        refusal(rules.check, zero, 1),
        refusal(config_of, half, family_of_run(half), "float32"),
    ],
    "in help": "--moe-shared-expert-scale X" in cli.parser().format_help(),
    "stored": [flatten(run)["moe_shared_expert_scale"] for run in (half, whole)],
    "built": build(flatten(half)) == half,
    "has to agree": "moe_shared_expert_scale" in architecture_keys(),
    "obeyed": torch.equal(outputs[0], outputs[1] * 0.5) and bool(outputs[1].abs().max() > 0),
    "preset": [preset.moe.num_experts, preset.moe.moe_router_topk, preset.model.vocab_size],
    "family": [config["model_type"], config["architectures"], family.name, read.flat["num_experts"]],
    "lion": losses,
    "sizes": console.main(["sizes", "tiny-64e"]),
    "patched": timers,
    "names": sorted(name for name in names if "layers.0.ffn" in name and ("router" in name or ".63." in name)),
}))
"""


def test_every_block_of_lines_fits_its_file_and_takes_as_many_as_contributing_says() -> None:
    rows = re.findall(r"^\| ([^|]+) \|[^|]*\| (\d) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    said = {new.split()[-1]: int(number) for new, number in rows}
    del said["sink"]  # and the others of a program of one's own
    assert {block: len(changed_files(block)) for block in blocks()} == said


@pytest.mark.test_all(
    instead="tests/docs/test_extending.py::test_every_block_of_lines_fits_its_file_and_takes_as_many_as_contributing_says"
)
def test_what_the_page_adds_is_parsed_checked_stored_and_obeyed(tmp_path: Path) -> None:
    for package in ("megatron_moe", "megatron_moe_tools"):
        shutil.copytree(ROOT / package, tmp_path / package)  # with its byte code: a start is faster
    for file, text in changed_files(*blocks()).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    environment, command = {**os.environ, "PYTHONPATH": str(tmp_path)}, [sys.executable, "-c", ADDED]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    refused = found.pop("refused")
    assert all(message is not None and "--moe-shared-expert-scale" in message for message in refused), refused
    matrices = [f"model.layers.0.ffn.experts.63.{matrix}_proj.weight" for matrix in ("down", "gate", "up")]
    assert found == {
        **{"in help": True, "stored": [0.5, 1.0], "built": True, "has to agree": True, "obeyed": True},
        "preset": [64, 4, 1000],
        **{"lion": ["Lion", "Lion"], "sizes": 0, "patched": [True, True]},
        "family": ["toy_moe", ["ToyMoeForCausalLM"], "toy-moe", 64],
        "names": [*matrices, "model.layers.0.ffn.router.weight"],
    }


# ---- families


def test_every_family_is_a_short_file_and_has_a_case() -> None:
    import transformers

    from tests.helpers import tiny_models

    cases = {tiny_models.model_class(case).__name__ for case in tiny_models.CASES}
    known = [family for family in FAMILIES.values() if hasattr(transformers, family.architecture) or family.classes]
    assert all(cases & {family.architecture, *family.classes} for family in known) and len(known) > 10
    files = sorted((ROOT / "megatron_moe" / "hf" / "families").glob("[a-z]*.py"))
    assert sorted(path.stem.replace("_", "-") for path in files) == sorted(FAMILIES)
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 120 for path in files)
