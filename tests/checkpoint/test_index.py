"""The index of a step is read without running anything in it, and agrees with the files that are there."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_moe.checkpoint import index, manifest, step_reader
from tests.checkpoint.checkpoint_steps import contents, make_step, put_step, tensors_of

KEY = "embedding.word_embeddings.weight"


def read(step: Path) -> index.StepIndex:
    return index.read(step, manifest.read(step).files)


def changed(tmp_path: Path, change: Any) -> Path:
    """A step whose index was changed and whose manifest fits."""
    files = contents(50)
    metadata = pickle.loads(files[".metadata"])
    files[".metadata"] = pickle.dumps(change(metadata) or metadata)
    return put_step(tmp_path, 50, files)


def test_every_tensor_is_found_where_torch_wrote_it(tmp_path):
    step = make_step(tmp_path, 50)
    content = read(step)
    assert set(content.values) == {"rerun_state"}
    expected = tensors_of(0)
    assert content.tensors.keys() == expected.keys()
    for key, tensor in content.tensors.items():
        assert (f"torch.{tensor.dtype}", tensor.shape) == (str(expected[key].dtype), tuple(expected[key].shape))
        for part in tensor.parts:
            box = tuple(slice(first, first + count) for first, count in zip(part.start, part.shape))
            assert torch.equal(step_reader.read_value(step, key, part.place), expected[key][box])


class Bomb:
    def __init__(self, callable: Any, *arguments: Any) -> None:
        self.reduced = callable, arguments

    def __reduce__(self) -> Any:
        return self.reduced


BOMBS = [Bomb(os.system, "touch sentinel"), Bomb(eval, "open('sentinel', 'w')"), Bomb(getattr, "x", "upper")]
BOMBS += [Bomb(torch.load, "x"), Bomb(Path.touch, Path("sentinel"))]


@pytest.mark.parametrize(
    "data",
    [
        *(pickle.dumps(bomb) for bomb in BOMBS),
        b"ctorch\nSize\n}V__call__\nNsb.",
        b"cposix\nsystem\nVtouch sentinel\n\x85R.",
        b"\x80\x04N.",
        b"\x80\x04",
        b"garbage",
        b"(" * 100_000 + b".",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x" * 100,  # a text that claims 2**62 bytes
    ],
)
def test_a_hostile_or_broken_pickle_is_refused(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    step = put_step(tmp_path, 50, {**contents(50), ".metadata": data})
    with pytest.raises(index.UntrustedError):
        read(step)
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.parametrize(
    "prefix",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\nN}V__hash__\nctorch\nSize\ns\x86b0",
        b"ctorch\nSize\nN}V_function\nctorch\nSize\ns\x86b0",
    ],
)
def test_an_otherwise_sound_index_that_changes_a_class_first_is_refused(tmp_path, prefix):
    files = contents(50)
    step = put_step(tmp_path, 50, {**files, ".metadata": prefix + files[".metadata"]})
    with pytest.raises(index.UntrustedError, match="sets? "):
        read(step)
    assert read(make_step(tmp_path / "other", 60)).tensors


def moved(metadata: Metadata, **changes: Any) -> None:
    first = next(iter(metadata.storage_data))
    info = metadata.storage_data[first]
    metadata.storage_data[first] = _StorageInfo(**{**vars(info), **changes})


def kind(metadata: Metadata) -> TensorStorageMetadata:
    return metadata.state_dict_metadata[KEY]


def overlapping(metadata: Metadata) -> None:
    """The second part is said to begin four rows earlier: as many elements as before, four rows twice, four never."""
    chunk = kind(metadata).chunks[1]
    info = metadata.storage_data.pop(MetadataIndex(KEY, chunk.offsets, 1))
    chunk.offsets = torch.Size([4, 0])
    metadata.storage_data[MetadataIndex(KEY, chunk.offsets, 1)] = info


@pytest.mark.parametrize(
    "change, words",
    [
        (overlapping, f"parts of {KEY} overlap"),
        (lambda m: moved(m, relative_path="../__0_0.distcp"), r"is stored in '\.\./__0_0\.distcp'"),
        (lambda m: moved(m, relative_path="/etc/passwd"), "is stored in '/etc/passwd'"),
        (lambda m: moved(m, relative_path="__9_0.distcp"), r"__9_0\.distcp, which manifest\.json does not list"),
        (lambda m: moved(m, offset=-1), "has no place"),
        (lambda m: moved(m, offset=10**9), r"ends at byte \d+ of __0_0\.distcp, which has"),
        (lambda m: moved(m, length=2**62), "ends at byte"),
        (lambda m: moved(m, transform_descriptors=["evil"]), "stored transformed"),
        (lambda m: setattr(kind(m), "size", torch.Size([99, 16])), "hold 256 elements of 1584"),
        (lambda m: setattr(kind(m), "size", torch.Size([1, 16])), "is outside"),
        (lambda m: setattr(kind(m).chunks[0], "offsets", torch.Size([3, 0])), "has no location"),
        (lambda m: kind(m).chunks.pop() and None, "hold 128 elements of 256"),
        (lambda m: setattr(kind(m).properties, "dtype", torch.complex64), "torch.complex64"),
        (lambda m: m.storage_data.update({MetadataIndex("more"): next(iter(m.storage_data.values()))}), "more"),
        (lambda m: m.state_dict_metadata.clear(), "has a location, but is not listed"),
        (lambda m: setattr(m, "storage_data", None), "lists no tensors"),
        (lambda m: {"a": 1}, "holds no metadata"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, change, words):
    with pytest.raises(index.UntrustedError, match=words):
        read(changed(tmp_path, change))


NO_FILES = ["__0.metadata", "evil.pt", "pytorch_model.bin", "modeling_evil.py", "rng/rank_00000.pkl", "a/.metadata"]
NO_FILES += ["hf/a/b.json", "ahf/b.json"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("__2_0.distcp", "does not know __2_0"), *((name, f"{name} is no file of a checkpoint") for name in NO_FILES)],
)
def test_a_file_that_has_no_place_is_refused_though_the_manifest_lists_it(tmp_path, name, words):
    step = put_step(tmp_path, 50, {**contents(50), name: b"x"})
    assert manifest.structure_defect(step) is None
    with pytest.raises(index.UntrustedError, match=words):
        read(step)


def test_an_oversize_index_is_not_read(tmp_path, monkeypatch):
    step = make_step(tmp_path, 50)
    monkeypatch.setattr(index, "LARGEST", 100)
    with pytest.raises(index.UntrustedError, match="between 1 and 100 are read"):
        read(step)
