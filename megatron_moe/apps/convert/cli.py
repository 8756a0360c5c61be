"""The command line of tools/convert_checkpoint.py."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import folder
from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.families import FAMILIES
from megatron_moe.io.files import free_bytes, require_writable
from megatron_moe.io.program import note, run_program
from megatron_moe.io.texts import size_text

DONE, NOT_VERIFIED = 0, 1
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(
        prog="convert_checkpoint.py",
        description="Convert a model between a Hugging Face folder and a checkpoint of this framework, or write a "
        "checkpoint anew as one file per layer. Needs no GPU, no process group, and memory for a few tensors. Every "
        "tensor is checked and hashed, read again from the disk, made back and compared; a certificate says so.",
        epilog="native to native changes the files alone: any layout loads any step as it is, so no step has to be "
        "converted to be loaded with another tensor, pipeline or expert parallel size. What was killed goes on where "
        "it was when it is started again with the same source and options. Exit status: 0 done; 1 verification failed, "
        "nothing published; 2 a mistake in the arguments or in the source, nothing left.",
        allow_abbrev=False,
    )
    p.add_argument("--from", dest="origin", choices=("hf", "native"), required=True, help="what --load is")
    p.add_argument("--to", dest="target", choices=("hf", "native"), required=True, help="what --save becomes")
    p.add_argument("--load", required=True, metavar="DIR", help="the source: a folder of Hugging Face's with "
                   "config.json and .safetensors files; a folder of checkpoints, or one iter_* of it")  # fmt: skip
    p.add_argument(
        "--ckpt-step", type=int, metavar="N", help="which step of a folder of checkpoints; default: the newest"
    )
    p.add_argument("--save", required=True, metavar="DIR", help="the output: a folder that is empty or not there yet")
    p.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="cast weights; expert_bias stays fp32. "
                   "Default: the source's")  # fmt: skip
    p.add_argument("--dry-run", action="store_true", help="say what would be written and stop")
    p.add_argument("--verify", action="store_true", help="compute the logits of both sides in fp32, ours and "
                   "transformers', and publish only if they agree; takes memory for the model")  # fmt: skip
    p.add_argument("--verify-only", action="store_true", help="compare --load and an earlier --save; write nothing")
    p.add_argument("--verify-layers", type=int, metavar="N", help="of the first N layers only")
    p.add_argument("--family", choices=sorted(FAMILIES), help="export as this family, with a new config.json; default: "
                   "the one it was imported from, or the one whose architecture it has")  # fmt: skip
    p.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a .safetensors file; default 5GB")
    p.add_argument("--drop-mtp", action="store_true", help="leave the layers of multi-token prediction out")
    p.add_argument("--no-optim", action="store_true", help="native to native: leave the optimizer's state out")
    p.add_argument("--certificate", metavar="FILE", help="write the certificate here too; it always lies in --save")
    return p


def main(argv: list[str]) -> int:
    """Convert. Returns the exit status."""
    return run_program(
        "convert_checkpoint.py",
        _main,
        argv,
        interrupted="interrupted; the same command goes on from here",
        errors=(ConfigError, OSError),
    )


def _main(argv: list[str]) -> int:
    words = parser().parse_args(argv)
    _check_flags(words)
    from megatron_moe.apps.convert.convert import convert, interruptible, plan_lines
    from megatron_moe.apps.convert.workspace import Workspace, hidden_folder, published_before, require_free

    if words.verify_only:
        return _verify_only(words)
    load, save = Path(words.load), Path(os.path.abspath(words.save))
    conversion = _planned(words)
    identity = conversion.identity()
    if published_before(save, identity):
        shutil.rmtree(hidden_folder(save))
        print(f"{save} was complete already")
        return DONE
    require_free(save, load)
    if words.verify:
        _require_verifiable(words)
    for line in (*conversion.notes, *conversion.warnings):
        note(line)
    if words.dry_run:
        print("\n".join(plan_lines(conversion, save)))
        return DONE
    workspace = Workspace(save, identity)
    with interruptible(), workspace.open():
        try:
            verify = (lambda output: dict(_parity(words, output).as_dict())) if words.verify else None
            content = convert(conversion, workspace, verify)
            passed = verify is None or bool(content["verification"]["passed"])
            return _publish(words, workspace, content) if passed else _refuse(words, workspace, content)
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            free = free_bytes(workspace.hidden)
            workspace.discard()
            if not full or free is None:
                raise
            needed, left = size_text(conversion.num_bytes, exact=True), size_text(free, exact=True)
            raise ConfigError(
                f"--save {save}: the disk is full: {needed} are needed in all, {left} were left"
            ) from error


def _check_flags(words: argparse.Namespace) -> None:
    if (words.origin, words.target) == ("hf", "hf"):
        raise ConfigError("--from hf --to hf: there is nothing to convert; one of them is native")
    resharding = words.origin == words.target
    if words.no_optim and not resharding:
        raise ConfigError("--no-optim: is for --from native --to native; a folder of Hugging Face's has no optimizer")
    if (words.verify or words.verify_only or words.verify_layers is not None) and resharding:
        raise ConfigError("--verify: compares with a Hugging Face folder; native to native, hashes are compared anyway")
    if words.verify_layers is not None and not (words.verify or words.verify_only):
        raise ConfigError(f"--verify-layers {words.verify_layers}: says how much is verified; add --verify")
    if words.verify_layers is not None and words.verify_layers < 1:
        raise ConfigError(f"--verify-layers {words.verify_layers}: must be at least 1")
    if words.family is not None and words.target != "hf":
        raise ConfigError(f"--family {words.family}: is for --to hf; a folder's config.json says what it is")
    if words.ckpt_step is not None and words.origin != "native":
        raise ConfigError(f"--ckpt-step {words.ckpt_step}: is for --from native; a Hugging Face folder has no steps")
    if words.verify and importlib.util.find_spec("transformers") is None:
        raise ConfigError("--verify: compares with transformers, which is not installed; install it, or leave it out")
    require_writable("--certificate", words.certificate)
    words.max_shard_bytes = _size(words.max_shard_size)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)\s*(KB|MB|GB|TB|)", text.strip().upper())
    number = int(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0
    if number < 1:
        raise ConfigError(f"--max-shard-size {text}: is no size; 5GB, 500MB and 1000000 are")
    return number


def _planned(words: argparse.Namespace) -> Any:
    """The conversion that is asked for. Reads the source's small files and headers."""
    from megatron_moe.apps.convert import certificate
    from megatron_moe.apps.convert.convert import ConversionOptions
    from megatron_moe.apps.convert.reshard import Reshard
    from megatron_moe.apps.convert.to_hf import ToHF
    from megatron_moe.apps.convert.to_native import ToNative
    from megatron_moe.hf.folder import HFFolder
    from megatron_moe.hf.source import locate

    dtype = None if words.dtype is None else certificate.DTYPES[words.dtype]
    options = ConversionOptions(dtype, words.family, words.drop_mtp, words.no_optim, words.max_shard_bytes)
    load = Path(words.load)
    if words.origin == "hf":
        if (load / folder.OWNER).exists() or (load / folder.STATE).exists():
            raise ConfigError(f"--from hf: --load {load} is a checkpoint of this framework; --from native converts it")
        return ToNative(HFFolder.open(load), options)
    if (load / folder.CONFIG).exists() and not (load / folder.STATE).exists():
        raise ConfigError(f"--from native: --load {load} is a Hugging Face folder; --from hf converts it")
    source = locate(load, words.ckpt_step, words.family)
    return ToHF(source, options) if words.target == "hf" else Reshard(source.path, options, source.notes)


def _publish(words: argparse.Namespace, workspace: Any, content: dict[str, Any]) -> int:
    from megatron_moe.apps.convert import certificate

    certificate.write(workspace.output / certificate.NAME, content)
    if words.certificate is not None:
        certificate.write(Path(words.certificate), content)
    workspace.publish()
    print(f"{workspace.target}: {content['blocks']} blocks, each read again and made back; {certificate.NAME} says so")
    return DONE


def _refuse(words: argparse.Namespace, workspace: Any, content: dict[str, Any]) -> int:
    """The output is not what the source is: it goes, and the certificate says why."""
    from megatron_moe.apps.convert import certificate

    target = workspace.target
    beside = Path(words.certificate or target.with_name(f"{target.name}.{certificate.NAME}"))
    certificate.write(beside, content)
    workspace.discard()
    note(f"convert_checkpoint.py: verification failed, {target} is not written; see {beside}")
    return NOT_VERIFIED


def _require_verifiable(words: argparse.Namespace) -> None:
    """Is there memory for the model? Not to be told at the end of hours."""
    from megatron_moe.apps.convert.parity import require_memory
    from megatron_moe.hf.source import locate

    require_memory(locate(Path(words.load), words.ckpt_step, words.family), words.verify_layers)


def _parity(words: argparse.Namespace, output: Path) -> Any:
    from megatron_moe.apps.convert.parity import compare

    note("verifying: logits, loss and choices of experts, both sides in fp32")
    if words.origin == "hf":
        result = compare(Path(words.load), output, layers=words.verify_layers)
    else:
        result = compare(output, Path(words.load), layers=words.verify_layers, ckpt_step=words.ckpt_step)
    for line in result.lines():
        note(line)
    return result


def _verify_only(words: argparse.Namespace) -> int:
    save = Path(words.save)
    if not save.is_dir():
        raise ConfigError(
            f"--verify-only: --save {save} is not there; it is compared with --load, and nothing is written"
        )
    return DONE if _parity(words, save).passed else NOT_VERIFIED
