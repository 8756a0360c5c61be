"""The command line of megatron-moe convert."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_moe.checkpoint import folder
from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.config.cli import add_flags
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import require_on_disk, require_writable_folder
from megatron_moe.config.run_flags import TOKENIZER_FIELDS
from megatron_moe.hf.config import settings_of
from megatron_moe.hf.families import FAMILIES
from megatron_moe.hf.folder import ALLOW, CERTIFICATE, HFFolder
from megatron_moe.io.files import free_bytes, require_writable
from megatron_moe.io.program import note, run_program
from megatron_moe.io.texts import size_text
from megatron_moe_tools import compat
from megatron_moe_tools.models.source import locate, tokenizer_of_model

NAME = "megatron-moe convert"

if TYPE_CHECKING:  # flags and folders are checked before torch is loaded
    from megatron_moe_tools.convert.parity import Parity
    from megatron_moe_tools.convert.pipeline import ConversionOptions, ConversionSink, ConversionSource
    from megatron_moe_tools.convert.remade import RemadeSource
    from megatron_moe_tools.convert.workspace import Workspace

DONE, NOT_VERIFIED = 0, 1
FORMATS = ("hf", "native", "megatron")
PACKED = ("fp8", "mxfp4")
"""Formats of fewer bits, in which folders of Hugging Face are written."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UPCYCLING = ("moe_upcycling_granularity", "upcycle_router", "upcycle_noise", "seed")
_CHANGES = ("prune", "merge", "reinit")
"""What is done to experts; the first words of flags."""
_OF_MODEL = ("mtp_num_layers", "init_method_std")
"""Settings of the model besides its experts' that upcycling takes."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = Parser(
        prog=NAME,
        description="Convert a model between a Hugging Face folder, a checkpoint of Megatron-LM and a checkpoint of "
        "this framework, or write a checkpoint anew as one file per layer. Needs no GPU, no process group, and memory "
        "for a few tensors. Every tensor is checked and hashed, read again from the disk, transformed back and "
        "compared; a certificate lists the hashes.",
        epilog="native to native changes the files alone: any layout loads any step as it is, so no step has to be "
        "converted to be loaded with another tensor, pipeline or expert parallel size. A conversion that was killed "
        "continues when it is started again with the same source and options. Of a checkpoint of Megatron-LM, the "
        "arguments that it keeps say what the model is, and flags of the model (--vocab-size 50257) go before them. "
        "Exit status: 0 done; 1 verification failed, nothing published; 2 a mistake in the arguments or in the "
        "source, nothing left.",
        allow_abbrev=False,
    )
    p.add_argument("--from", dest="origin", choices=FORMATS, required=True, help="what --load is")
    p.add_argument("--to", dest="target", choices=FORMATS, required=True, help="what --save becomes")
    p.add_argument("--load", required=True, metavar="DIR", help="the source: a folder of Hugging Face's with "
                   "config.json and .safetensors files; a folder of checkpoints, or one iter_* of it, of this "
                   "framework or Megatron-LM's (--ckpt-format torch_dist or torch)")  # fmt: skip
    p.add_argument("--ckpt-step", type=int, metavar="N", help="which step of a folder of checkpoints (default: newest)")
    p.add_argument("--save", required=True, metavar="DIR", help="the output: a folder that is empty or not there yet")
    p.add_argument("--dtype", choices=("bf16", "fp16", "fp32", *PACKED), help="cast weights; expert_bias stays "
                   "fp32. fp8, to hf: linear layers in e4m3 with a scale per 128 x 128 block, as DeepSeek publishes "
                   "them; mxfp4: gpt-oss' experts as published; the rest in bf16. Default: the source's")  # fmt: skip
    p.add_argument("--dry-run", action="store_true", help="say what would be written and stop")
    p.add_argument("--verify", action="store_true", help="compute the logits of both sides in fp32, ours and "
                   "transformers', and publish only if they agree; takes memory for the model")  # fmt: skip
    p.add_argument("--verify-only", action="store_true", help="compare --load and an earlier --save; write nothing")
    p.add_argument("--verify-layers", type=int, metavar="N", help="compare the first N layers only")
    p.add_argument(ALLOW, action="store_true", help="from hf and megatron: go on where weights look damaged (zeros "
                   "of a broken download, equal experts, files of other ranks); --verify: where logits do not depend "
                   "on the tokens")  # fmt: skip
    p.add_argument("--family", choices=sorted(FAMILIES), help="export as this family, with a new config.json; default: "
                   "the one it was imported from, or the one whose architecture it has")  # fmt: skip
    p.add_argument("--carry-from", metavar="DIR", help="native to hf: the folder that the model was imported from, "
                   "whose tensors of parts that models here do not have (an indexer, a vision model) are added as they "
                   "are")  # fmt: skip
    p.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="size of a .safetensors file; default 5GB")
    p.add_argument("--drop-mtp", action="store_true", help="leave the layers of multi-token prediction out")
    p.add_argument("--no-optim", action="store_true", help="native, megatron: leave the optimizer's state out")
    p.add_argument("--average-steps", nargs="+", type=int, metavar="N", help="native to native: the mean of these "
                   "steps of --load, in fp64, of main weights where they have them; no optimizer")  # fmt: skip
    p.add_argument("--ema", action="store_true", help="from native: write the averages of the weights, which a run "
                   "with --ema-decay saves, in the place of the weights; no optimizer")  # fmt: skip
    p.add_argument("--transformer-impl", choices=("transformer_engine", "local"), help="to megatron: whose layers "
                   "load it there, since they name norms differently; default transformer_engine")  # fmt: skip
    p.add_argument("--expert-model-parallel-size", type=int, metavar="N", help="to megatron, with the optimizer: the "
                   "ranks that experts are spread over there")  # fmt: skip
    p.add_argument("--no-tokenizer", action="store_true", help="native to hf: write no tokenizer")
    up = p.add_argument_group("upcycling", "to native, of a dense model; flags of the model, such as --num-experts 8, "
                              "--moe-router-topk 2 and --mtp-num-layers 1, say what it becomes")  # fmt: skip
    up.add_argument("--upcycle", action="store_true", help="make experts of the MLPs; the logits stay the dense "
                    "model's to 1e-5 in fp32, which is computed and certified; weights alone")  # fmt: skip
    up.add_argument("--moe-upcycling-granularity", type=int, metavar="G", help="cut each MLP into G parts, one for an "
                    "expert; default: by --moe-ffn-hidden-size, else 1")  # fmt: skip
    up.add_argument("--upcycle-router", choices=("random", "zeros"), help="rows of the router: drawn with "
                    "--init-method-std, the same for the parts of a copy (default), or zeros")  # fmt: skip
    up.add_argument("--upcycle-noise", type=float, metavar="X", help="add normal noise to each expert's matrices, X "
                    "times their root mean square; the difference of the logits is measured")  # fmt: skip
    ex = p.add_argument_group("experts", "to native, of a mixture of experts: fewer or new ones by the load measured "
                              "on tokens, and the loss on them before and after; weights alone")  # fmt: skip
    ex.add_argument("--prune-experts", type=int, metavar="N", help="keep each layer's N most loaded experts")
    ex.add_argument("--merge-experts", type=int, metavar="N", help="add each other expert to the one of these N that "
                    "it is most like, weighted by load")  # fmt: skip
    ex.add_argument("--reinit-experts", type=float, metavar="X", help="draw anew the experts whose load is below X "
                    "times an even share")  # fmt: skip
    ex.add_argument("--tokens", metavar="FILE", help="safetensors with input_ids [B, S], which the load is measured on")
    ex.add_argument("--text-file", dest="texts", action="append", type=lambda path: (path, ""), metavar="FILE",
                    help="a UTF-8 text in place of --tokens; repeatable")  # fmt: skip
    p.add_argument("--seed", type=int, metavar="N", help="--upcycle, --reinit-experts: of what is drawn; default 1234")
    p.add_argument("--certificate", metavar="FILE", help="write the certificate here too; it is always in --save")
    add_flags(p.add_argument_group("tokenizer", "native to hf: by default the checkpoint's own"), TOKENIZER_FIELDS)
    return p


def main(argv: list[str]) -> int:
    """Convert as the flags say and return the exit status."""
    again = "interrupted; the same command goes on from here"
    return run_program(NAME, run, argv, interrupted=again, errors=(ConfigError, OSError), rank=0)


def run(argv: list[str]) -> int:
    """Convert as the flags say and return the exit status. Raises ConfigError, OSError: nothing is left."""
    args, words = parser().parse_known_args(argv)
    _check(args)
    args.given = _given(args, words)
    args.exported = None
    if (args.origin, args.target) == ("native", "hf") and not args.verify_only:  # found before torch is loaded
        from megatron_moe_tools.convert.exported_files import exported_tokenizer, with_template

        step, _ = folder.step_of(Path(args.load), args.ckpt_step) or (None, None)
        named = {name: getattr(args, name) for name in TOKENIZER_FIELDS if getattr(args, name) is not None}
        if step is not None:
            args.exported = with_template(exported_tokenizer(step, named, args.no_tokenizer), step)
    from megatron_moe_tools.convert.pipeline import convert
    from megatron_moe_tools.convert.workspace import Workspace, hidden_folder, published_before, require_free

    if args.verify_only:
        return DONE if _parity(args, Path(args.save)).passed else NOT_VERIFIED
    load, save = Path(args.load), Path(os.path.abspath(args.save))
    sink = _planned(args)
    identity = sink.identity()
    if published_before(save, identity):
        shutil.rmtree(hidden_folder(save))
        print(f"{save} was complete already")
        return DONE
    require_free(save, load)
    if args.verify:  # is there a model to compare with, and memory for it, before hours of conversion
        from megatron_moe_tools.convert.parity import reference_class, require_memory_to_verify

        source = locate(load, args.ckpt_step, args.family)
        reference_class(source.family)
        require_memory_to_verify(source, args.verify_layers)
    from megatron_moe_tools.convert.remade import RemadeSource

    if isinstance(sink.source, RemadeSource):
        sink.source.require_memory(args.verify_layers)
    for line in (*sink.source.notes, *sink.source.warnings):
        note(line)
    if args.dry_run:
        inputs, free = sink.source.inputs, free_bytes(save.parent)
        blocks = sum(len(file.content) for file in sink.files)
        read = sum(path.stat().st_size for path in inputs.values())
        left = "an unknown number of bytes" if free is None else size_text(free, exact=True)
        print(f"{sink.direction}: {sink.source.path} -> {save}\n  {sink.summary}")
        print(f"  reads {size_text(read, exact=True)} in {len(inputs)} files")
        print(
            f"  writes {size_text(sink.num_bytes, exact=True)} at most, {blocks} blocks in "
            f"{len(sink.files)} files and small ones; {left} free"
        )
        for file in sink.files:
            print(f"    {file.name}: {len(file.content)} blocks, {size_text(file.num_bytes)}")
        return DONE
    workspace = Workspace(save, identity)
    with workspace.open():
        try:
            content = convert(sink, workspace)
            if isinstance(sink.source, RemadeSource):
                content["verification"] = sink.source.compared(workspace.output, args.verify_layers)
            elif args.verify:
                content["verification"] = _parity(args, workspace.output).as_dict()
            return _publish(args, workspace, content)
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            free = free_bytes(workspace.hidden)
            workspace.discard()
            if not full or free is None:
                raise
            size, left = size_text(sink.num_bytes, exact=True), size_text(free, exact=True)
            raise ConfigError(f"--save {save}: the disk is full: {size} are needed in all, {left} were left") from error


def _check(args: argparse.Namespace) -> None:
    """Check flags, --load by its small files and headers, and --save, before torch is loaded."""
    way, verifies = (args.origin, args.target), args.verify or args.verify_only
    if way == ("hf", "hf"):
        raise ConfigError("--from hf --to hf: there is nothing to convert; one of them is native")
    if "megatron" in way and "native" not in way:
        raise ConfigError(f"--from {args.origin} --to {args.target}: is done in two steps, by way of --to native")
    if args.no_optim and "hf" in way:
        raise ConfigError("--no-optim: is for --from native --to native, and megatron; a Hugging Face folder has none")
    if args.average_steps is not None and (way != ("native", "native") or args.ckpt_step is not None):
        shown = f"--average-steps {' '.join(map(str, args.average_steps))}"
        raise ConfigError(f"{shown}: is for --from native --to native, and takes the place of --ckpt-step")
    if args.ema and (args.origin != "native" or args.target == "megatron" or args.average_steps is not None):
        raise ConfigError("--ema: is for --from native --to native and --to hf, and a step's own average")
    if args.ema and verifies:
        raise ConfigError("--ema: --verify compares with the step's weights, which are others; drop one of the two")
    _check_remaking(args, way)
    if (verifies or args.verify_layers is not None) and "hf" not in way and args.remade is None:
        raise ConfigError("--verify: compares with a Hugging Face folder; hashes of checkpoints are compared anyway")
    if args.transformer_impl is not None and args.target != "megatron":
        raise ConfigError(f"--transformer-impl {args.transformer_impl}: is for --to megatron")
    if args.expert_model_parallel_size is not None and (args.target != "megatron" or args.no_optim):
        raise ConfigError(
            f"--expert-model-parallel-size {args.expert_model_parallel_size}: is for --to megatron with the optimizer; "
            "weights alone fit any number of ranks"
        )
    if args.drop_mtp and "megatron" in way:
        raise ConfigError("--drop-mtp: is for folders of Hugging Face; from and to megatron nothing is left out")
    if args.verify_layers is not None and not (verifies or args.upcycle):
        raise ConfigError(f"--verify-layers {args.verify_layers}: says how much is verified; add --verify")
    if args.verify_layers is not None and args.verify_layers < 1:
        raise ConfigError(f"--verify-layers {args.verify_layers}: must be at least 1")
    if args.allow_suspicious_weights and args.origin == "native" and not verifies:
        raise ConfigError(f"{ALLOW}: is for --from hf and megatron, and for --verify; drop it")
    if args.family is not None and args.target != "hf":
        raise ConfigError(f"--family {args.family}: is for --to hf; a folder's config.json says what it is")
    packed = f"--dtype {args.dtype}"
    if args.dtype in PACKED and args.target != "hf":
        raise ConfigError(f"{packed}: is for --to hf; a checkpoint here has its weights in bf16, fp16 or fp32")
    if args.dtype in PACKED and args.verify:
        raise ConfigError(f"{packed}, --verify: it rounds the weights, and --verify asks for equal logits; drop one")
    if args.carry_from is not None and way != ("native", "hf"):
        raise ConfigError(f"--carry-from {args.carry_from}: is for --from native --to hf")
    tokenizers = [name for name in ("no_tokenizer", *TOKENIZER_FIELDS) if getattr(args, name)]
    if tokenizers and way != ("native", "hf"):
        raise ConfigError(f"--{tokenizers[0].replace('_', '-')}: is for --from native --to hf")
    if args.ckpt_step is not None and args.origin == "hf":
        raise ConfigError(f"--ckpt-step {args.ckpt_step}: is for --from native; a Hugging Face folder has no steps")
    if verifies and importlib.util.find_spec("transformers") is None:
        raise ConfigError("--verify: compares with transformers, which is not installed; install it, or leave it out")
    require_writable("--certificate", args.certificate)
    require_on_disk("--load", args.load)
    require_on_disk("--save", args.save)
    args.max_shard_bytes = _size(args.max_shard_size)
    load, save = Path(args.load), Path(os.path.abspath(args.save))
    steps = [load, *(folder.step_folder(load, number) for number in folder.steps(load))]
    is_ours = (load / folder.OWNER).exists() or any((step / folder.STATE).exists() for step in steps)
    if args.origin != "native" and load.is_dir() and (is_ours or (args.origin == "hf" and len(steps) > 1)):
        raise ConfigError(f"--from {args.origin}: --load {load} is a checkpoint of ours; --from native converts it")
    if args.origin == "hf" and load.is_dir():
        settings_of(HFFolder.open(load), f"--load {load}")
    elif (load / folder.CONFIG).exists() and not any((load / file).exists() for file in (folder.STATE, folder.LATEST)):
        raise ConfigError(f"--from {args.origin}: --load {load} is a Hugging Face folder; --from hf converts it")
    elif args.origin == "native" or not load.is_dir():
        locate(load, args.ckpt_step, args.family)
    from megatron_moe_tools.convert.workspace import hidden_folder, require_free

    if args.verify_only:
        if not save.is_dir():
            raise ConfigError(f"--verify-only: --save {args.save} is no folder; name one that was converted to")
    elif save in (Path.cwd(), Path(save.anchor)):
        # The output is renamed to its target, which would take the current folder away from the shell.
        raise ConfigError(f"--save {args.save}: is a folder that is in use; name a new folder")
    elif not hidden_folder(save).is_dir():  # otherwise an earlier start has left work there
        require_writable_folder("--save", args.save)
        require_free(save, load)


def _check_remaking(args: argparse.Namespace, way: tuple[str, str]) -> None:
    """Check the flags that make another model of one; sets `args.remade` to the flag that does, or None."""
    given = {"--upcycle": args.upcycle or None}
    for kind in _CHANGES:
        given[f"--{kind}-experts"] = getattr(args, f"{kind}_experts")
    flags = [flag for flag, value in given.items() if value is not None]
    args.remade = flag = next(iter(flags), None)
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)}: each makes another model; do one after the other")
    others = {"--upcycle": _UPCYCLING[:-1], "--prune-experts, --merge-experts or --reinit-experts": ("tokens", "texts")}
    for needed, names in (*others.items(), ("--upcycle or --reinit-experts", ("seed",))):
        for name in names:
            if getattr(args, name) is not None and (flag is None or flag not in needed):
                shown = {"texts": "text-file"}.get(name, name.replace("_", "-"))
                raise ConfigError(f"--{shown}: is for {needed}, which is not there; drop it")
    if flag is None:
        return
    if way[0] == "megatron" or way[1] != "native":
        raise ConfigError(
            f"{flag}: is for --from native or hf, --to native; from {way[0]} to {way[1]} is done in two steps, the "
            "other one without it"
        )
    if args.average_steps is not None or args.ema:
        raise ConfigError(
            f"{flag}: the new model is compared with one step; convert with --average-steps or --ema first"
        )
    if args.verify or args.verify_only:
        raise ConfigError(f"{flag}, --verify: both models are compared anyway; leave --verify out")
    for name, least in (("moe_upcycling_granularity", 1), ("upcycle_noise", 0), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and not (least <= value < float("inf")):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: has to be at least {least}, and finite")
    model = locate(Path(args.load), args.ckpt_step)
    there = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[model.dtype]
    if args.dtype not in (None, "fp32", there):
        raise ConfigError(
            f"{flag}, --dtype {args.dtype}: rounds the weights, which are {there}, and the two models could not be "
            f"compared; convert the result with --dtype {args.dtype}"
        )
    args.sequences = None
    if flag == "--upcycle":
        return
    if args.verify_layers is not None:
        raise ConfigError(f"{flag}, --verify-layers {args.verify_layers}: the loss is that of all layers; drop it")
    if (args.tokens is None) == (args.texts is None):
        raise ConfigError(f"{flag}: needs the tokens that the load is measured on: either --tokens or --text-file")
    from megatron_moe_tools.models.sequences import sequences_of_file, sequences_of_texts

    if args.tokens is not None:
        args.sequences = sequences_of_file(args.tokens, model)
    else:
        args.sequences = sequences_of_texts(args.texts, model, tokenizer_of_model(model))


def _given(args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Return the settings of the model on the command line, by field: they go before those of a checkpoint."""
    from megatron_moe.config.fields import all_fields

    if words and (args.origin, args.target) != ("megatron", "native") and not args.upcycle:
        raise ConfigError(f"unexpected argument {words[0]!r}: flags of the model are for --from megatron and --upcycle")
    given: dict[str, Any] = {}
    if words:
        compat.parse(words, filled_in=lambda settings: given.update(settings) or settings)
    fields = all_fields()
    others = []
    for name, value in given.items():
        if fields[name].section not in ("model", "moe"):
            others.append(fields[name].typed(value))
    if others:
        raise ConfigError(f"{', '.join(others)}: is no setting of the model, which a conversion is about; drop it")
    for name, value in given.items():
        of_experts = fields[name].section == "moe" and name in architecture_keys()
        if args.upcycle and not (of_experts or name in _OF_MODEL):
            raise ConfigError(
                f"--upcycle, {fields[name].typed(value)}: the settings of the experts, "
                f"{' and '.join(fields[other].flag for other in _OF_MODEL)} can be given, and the rest is the dense "
                "model's; balancing and precision are flags of the training"
            )
    return given


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)\s*(KB|MB|GB|TB|)", text.strip().upper())
    number = 0
    if found:
        number = int(float(found.group(1)) * _UNITS[found.group(2)])
    if found and not found.group(2) and 0 < number < 1000:
        raise ConfigError(f"--max-shard-size {text}: is {number} bytes without a unit; write {text.strip()}GB")
    if number < 1:
        raise ConfigError(f"--max-shard-size {text}: is no size; 5GB, 500MB and 1000000 are")
    return number


def _planned(args: argparse.Namespace) -> ConversionSink:
    """Return the output that the flags ask for; the source's small files and headers are read."""
    from megatron_moe_tools.convert import certificate
    from megatron_moe_tools.convert.hugging_face import HuggingFaceSink, HuggingFaceSource
    from megatron_moe_tools.convert.megatron import MegatronSink, MegatronSource, open_checkpoint
    from megatron_moe_tools.convert.native import AveragedSource, NativeSink, NativeSource
    from megatron_moe_tools.convert.pipeline import ConversionOptions

    args.fp8, args.mxfp4 = args.dtype == "fp8", args.dtype == "mxfp4"
    args.dtype = certificate.DTYPES.get("bf16" if args.dtype in PACKED else args.dtype)
    options = ConversionOptions(**{field.name: getattr(args, field.name) for field in fields(ConversionOptions)})
    load = Path(args.load)
    if args.origin == "megatron":
        return NativeSink(MegatronSource(open_checkpoint(load, args.ckpt_step), options, args.given))
    if args.remade is not None:
        return NativeSink(_remade(args, replace(options, no_optim=True)))
    if args.origin == "hf":
        return NativeSink(HuggingFaceSource(HFFolder.open(load), options))
    if args.average_steps is not None:
        return NativeSink(AveragedSource(load, args.average_steps, options))
    model = locate(load, args.ckpt_step, args.family)
    native = NativeSource(model.path, options, model.notes)
    if args.target == "hf":
        return HuggingFaceSink(native, model, args.exported)
    if args.target == "megatron":
        impl = args.transformer_impl or "transformer_engine"
        return MegatronSink(native, model, impl, args.expert_model_parallel_size)
    return NativeSink(native)


def _remade(args: argparse.Namespace, options: ConversionOptions) -> RemadeSource:
    """Return the source that makes another model of the one in --load."""
    from megatron_moe_tools.convert.expert_changes import ChangedExperts, ExpertChange
    from megatron_moe_tools.convert.hugging_face import HuggingFaceSource
    from megatron_moe_tools.convert.native import NativeSource
    from megatron_moe_tools.convert.upcycle_plan import UpcycleFlags
    from megatron_moe_tools.convert.upcycling import UpcycledSource

    model = locate(Path(args.load), args.ckpt_step)
    of: ConversionSource
    if args.origin == "hf":
        of = HuggingFaceSource(HFFolder.open(model.path), options)
    else:
        of = NativeSource(model.path, options, model.notes)
    if args.upcycle:
        return UpcycledSource(of, model.run, args.given, UpcycleFlags(*(getattr(args, name) for name in _UPCYCLING)))
    kind = next(kind for kind in _CHANGES if getattr(args, f"{kind}_experts") is not None)
    change = ExpertChange(kind, getattr(args, f"{kind}_experts"))
    if args.seed is not None:
        change = replace(change, seed=args.seed)
    return ChangedExperts(of, model, change, args.sequences)


def _publish(args: argparse.Namespace, workspace: Workspace, content: dict[str, Any]) -> int:
    """Publish the output; remove one that is not what the source is, and say why in a certificate next to it."""
    from megatron_moe_tools.convert import certificate

    target, verification = workspace.target, content["verification"]
    if verification is not None and not verification["passed"]:
        path = Path(args.certificate or target.with_name(f"{target.name}.{CERTIFICATE}"))
        certificate.write(path, content)
        workspace.discard()
        note(f"{NAME}: verification failed, {target} is not written; see {path}")
        return NOT_VERIFIED
    certificate.write(workspace.output / CERTIFICATE, content)
    if args.certificate is not None:
        certificate.write(Path(args.certificate), content)
    workspace.publish()
    print(f"{target}: {content['blocks']} blocks, each read again and made back; {CERTIFICATE} says so")
    return DONE


def _parity(args: argparse.Namespace, output: Path) -> Parity:
    """Compare --load with the output as models."""
    from megatron_moe_tools.convert.parity import compare

    note("verifying against transformers, both sides in fp32")
    hf, native, step = output, Path(args.load), args.ckpt_step
    if args.origin == "hf":
        hf, native, step = Path(args.load), output, None
    allow = args.allow_suspicious_weights
    result = compare(hf, native, layers=args.verify_layers, ckpt_step=step, allow_constant=allow)
    for line in result.lines():
        note(line)
    return result
