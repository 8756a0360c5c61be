"""Finds a step in a folder of Megatron-LM's, and its format."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_moe.checkpoint import folder
from megatron_moe.config.errors import ConfigError
from megatron_moe_tools.megatron_lm.contents import MegatronCheckpoint
from megatron_moe_tools.megatron_lm.legacy import LegacyTorch
from megatron_moe_tools.megatron_lm.torch_dist import TorchDist

_STEP = re.compile(r"iter_\d{7,}|release", re.ASCII)


def open_checkpoint(path: Path, ckpt_step: int | None) -> MegatronCheckpoint:
    """Open a step of Megatron-LM's: the one that the folder's tracker names, `ckpt_step`, or `path` itself.

    Raises:
        ConfigError: there is no such step, or it is damaged, harmful, or of a format that is not read.
    """
    if not path.is_dir():
        raise ConfigError(f"--load {path}: there is no such folder")
    if (path / folder.OWNER).exists() or (path / folder.STATE).exists():
        raise ConfigError(
            f"--from megatron: --load {path} is a checkpoint of this framework; --from native converts it"
        )
    step = _step(path, ckpt_step)
    if any(step.glob("mp_rank_*")):
        return LegacyTorch(step)
    if (step / ".metadata").is_file():
        backend = _backend(step)
        if backend == "torch_dist":
            return TorchDist(step)
        raise ConfigError(
            f"--load {step}: --ckpt-format {backend} is not read; torch_dist and torch are: load it with Megatron-LM "
            "and save it with --ckpt-format torch_dist"
        )
    raise ConfigError(
        f"--load {step}: is no step of Megatron-LM's: it has neither .metadata (--ckpt-format torch_dist) nor "
        "mp_rank_* (--ckpt-format torch)"
    )


def _backend(step: Path) -> str:
    if not (step / "metadata.json").is_file():
        return "torch_dcp"
    return str(folder.read_json(step / "metadata.json").get("sharded_backend"))


def _step(path: Path, wanted: int | None) -> Path:
    if any(path.glob("mp_rank_*")) or (path / ".metadata").is_file():
        if wanted is not None and path.name != folder.step_folder(path, wanted).name:
            raise ConfigError(f"--ckpt-step {wanted}: --load {path} is one step; leave one of them out")
        return path
    there = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and _STEP.fullmatch(entry.name))
    if wanted is not None:
        step = folder.step_folder(path, wanted)
    elif (path / folder.LATEST).is_file():
        named = (path / folder.LATEST).read_text(errors="replace").strip()[:40]
        if named != "release" and not re.fullmatch(r"\d{1,12}", named):
            raise ConfigError(f"--load {path}: {folder.LATEST} names {named!r}, which is no step; give --ckpt-step")
        step = path / "release" if named == "release" else folder.step_folder(path, int(named))
    else:
        raise ConfigError(f"--load {path}: has no {folder.LATEST}; give --ckpt-step, or one iter_* folder")
    if not step.is_dir():
        raise ConfigError(f"--load {path}: has no {step.name}; there are: {', '.join(there) or 'none'}")
    return step
