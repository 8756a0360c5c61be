"""A small step as several ranks would have saved it, made in milliseconds without ranks, model or engine."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.io.hashing import FileEntry, sha256_of_file

RANKS = 2


def saved(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def tensors_of(seed: int, rows: int = 8) -> dict[str, torch.Tensor]:
    """A matrix of two parts, one in bf16, a bias, a scalar: what a tiny model would have."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding.word_embeddings.weight": torch.randn(2 * rows, 16, generator=generator),
        "decoder.layers.0.mlp.experts.linear_fc1.weight": torch.randn(4, 12, generator=generator).bfloat16(),
        "decoder.layers.0.mlp.router.expert_bias": torch.randn(4, generator=generator),
        "optimizer.step": torch.tensor(7.0),
    }


def contents(iteration: int, seed: int = 0, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, bytes]:
    """Every file of a step but the manifest, by its name. Tensors with an even number of rows are split over ranks."""
    data = {rank: bytearray() for rank in range(RANKS)}
    kinds: dict[str, Any] = {}
    storage: dict[metadata.MetadataIndex, _StorageInfo] = {}

    def put(rank: int, index: metadata.MetadataIndex, content: bytes) -> None:
        storage[index] = _StorageInfo(f"__{rank}_0.distcp", len(data[rank]), len(content))
        data[rank] += content

    for key, tensor in (tensors_of(seed) if tensors is None else tensors).items():
        split = tensor.dim() > 1 and len(tensor) % RANKS == 0
        chunks, first = [], 0
        for rank, part in enumerate(tensor.chunk(RANKS) if split else [tensor]):
            start = torch.Size([first] + [0] * (tensor.dim() - 1)) if tensor.dim() else torch.Size([])
            chunks.append(metadata.ChunkStorageMetadata(start, part.shape))
            put(rank, metadata.MetadataIndex(key, start, len(chunks) - 1), saved(part.clone()))
            first += len(part) if tensor.dim() else 0
        kinds[key] = metadata.TensorStorageMetadata(metadata.TensorProperties(tensor.dtype), tensor.shape, chunks)
    kinds["rerun_state"] = metadata.BytesStorageMetadata()
    put(1, metadata.MetadataIndex("rerun_state"), saved({"calls": 3}))
    state = {
        "iteration": iteration, "consumed_samples": 4 * iteration, "has_optimizer": True, "layout": {"world_size": 2},
        "versions": {"torch": torch.__version__},
    }  # fmt: skip
    return {
        ".metadata": pickle.dumps(
            metadata.Metadata(kinds, None, storage, metadata.StorageMeta("somewhere", "save", "load"))
        ),
        "metadata.json": json.dumps({"sharded_backend": "torch_dist"}).encode(),
        "common.pt": saved({"optimizer": {"param_groups": [{"lr": 0.1, "params": [0]}]}}),
        "config.json": json.dumps({"lr": 0.001, "seed": 1234}, indent=1).encode(),
        "state.json": json.dumps(state).encode(),
        **{f"__{rank}_0.distcp": bytes(content) for rank, content in data.items()},
        **{f"rng/rank_{rank:05d}.pt": saved({"torch": torch.arange(64) + seed + rank}) for rank in range(RANKS)},
    }


def put_step(root: Path, iteration: int, files: dict[str, bytes]) -> Path:
    """Write these files as a step, with the manifest that fits them."""
    step = folder.step_folder(root, iteration)
    for name, content in files.items():
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_bytes(content)
    seal(step, iteration)
    (root / folder.LATEST).write_text(f"{iteration}\n")
    return step


def make_step(root: Path, iteration: int, seed: int = 0, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A sound step."""
    return put_step(root, iteration, contents(iteration, seed, tensors))


def flip(file: Path, at: int | None = None) -> None:
    """Flip a bit of a file, in its middle if nothing else is said."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 4
    file.write_bytes(data)


def seal(step: Path, iteration: int) -> None:
    """Write the manifest of what lies in a folder: damage done before is not seen by it."""
    (step / manifest.NAME).unlink(missing_ok=True)
    files: dict[str, FileEntry] = {
        path.relative_to(step).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
        for path in sorted(step.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
    manifest.write(step, iteration, files)
