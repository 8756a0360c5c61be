"""Files of safetensors, held against the library of that name in both directions, and what is refused."""

import hashlib
import os
import random
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from megatron_moe.hf import safetensors_file
from megatron_moe.hf import tensors as hf_tensors
from megatron_moe.hf.folder import HFFolder
from megatron_moe.hf.safetensors_file import FormatError, StreamedFile, read_header
from megatron_moe.hf.tensors import TensorReader, layout_of, write_tensor
from megatron_moe.io import hashing

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OTHERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of many dtypes and shapes, scalars and empty ones among them, odd sizes first."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "odd.bf16": torch.randn(7, generator=generator).bfloat16(),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "fp8": torch.randn(5, 3, generator=generator).to(torch.float8_e5m2),
        'a "quoted" näme': torch.ones(2),
    }
    whole = torch.arange(24.0).reshape(4, 6)  # views are written as what they show
    tensors |= {"column": whole[:, 1], "transposed": whole.T, "part": whole[1:3, 2:4], "every second": whole[0, ::2]}
    for number, dtype in enumerate(FLOATS + OTHERS):
        shape = (3 + number, 2 * number + 1)
        tensors[f"t{number}"] = (torch.randn(shape, generator=generator) * 50).to(dtype)
    return tensors


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(hf_tensors.to_bytes(tensor))


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(two) and all(
        (a.dtype, a.shape, bits(a)) == (two[name].dtype, two[name].shape, bits(two[name])) for name, a in one.items()
    )


def folder_of(path: Path, tensors: dict[str, torch.Tensor]) -> HFFolder:
    """A folder of tensors of any dtype, also of those that `HFFolder.open` refuses."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors", {"format": "pt"})
    header = read_header(path / "model.safetensors")
    return HFFolder(path, {}, header.tensors, {}, identities={"model.safetensors": header.identity})


@pytest.mark.parametrize("seed", range(2))
def test_what_the_library_wrote_is_read_to_the_bit(tmp_path, seed):
    tensors = drawn(seed)
    with TensorReader(folder_of(tmp_path, tensors)) as reader:
        assert same({name: reader.read(name) for name in reader.names()}, tensors)
        for name, tensor in tensors.items():
            expected = hashlib.sha256(bits(tensor)).hexdigest()
            assert reader.read_hashed(name)[1] == {name: expected} == {name: reader.digest(name)}
            assert (reader.dtype(name), reader.folder.shapes()[name]) == (tensor.dtype, tuple(tensor.shape))


@pytest.mark.parametrize("backwards", [False, True])
def test_what_is_written_tensor_by_tensor_is_read_by_the_library(tmp_path, backwards):
    tensors, path = drawn(3), tmp_path / "out.safetensors"
    with StreamedFile(path, layout_of(tensors.items())) as file:
        for name in reversed(tensors) if backwards else tensors:
            assert write_tensor(file, name, tensors[name]) == hashlib.sha256(bits(tensors[name])).hexdigest()
    assert same(load_file(path), tensors) and read_header(path).metadata == {"format": "pt"}
    assert path.stat().st_size == file.bytes and set(file.digests) == set(tensors)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # where the numbers begin


def test_large_tensors_are_hashed_beside_the_reads_and_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_tensors, "_CHUNK", 1000)
    monkeypatch.setattr(hashing, "_LARGE", 1000)
    monkeypatch.setattr(safetensors_file, "_MOST_AT_ONCE", 777)
    tensors = {"a": torch.randn(100, 33), "b": torch.randn(77).bfloat16()}
    reader = TensorReader(folder_of(tmp_path, tensors))
    with StreamedFile(tmp_path / "out.safetensors", layout_of(tensors.items())) as file:
        for name in tensors:
            tensor, digests = reader.read_hashed(name)
            assert digests == {name: write_tensor(file, name, tensor)}
    reader.close()
    assert same(load_file(tmp_path / "out.safetensors"), tensors)


def test_tensors_keep_their_order_where_that_leaves_them_aligned(tmp_path):
    even = {"a": torch.ones(4).bfloat16(), "b": torch.ones(3), "c": torch.ones(2).bfloat16()}
    odd = {"a": torch.ones(3).bfloat16(), "b": torch.ones(3), "c": torch.ones(1, dtype=torch.int64)}
    for tensors, order in ((even, ["a", "b", "c"]), (odd, ["c", "b", "a"])):
        path = tmp_path / f"{order[0]}.safetensors"
        with StreamedFile(path, layout_of(tensors.items())) as file:
            for name, tensor in tensors.items():
                write_tensor(file, name, tensor)
        header = read_header(path)
        assert list(header.tensors) == order
        assert all(s.begin % tensors[name].element_size() == 0 for name, s in header.tensors.items())


def test_a_tensor_is_written_once_and_a_file_that_was_not_finished_is_not_there_and_nothing_written_over(tmp_path):
    layout = {"a": ("float32", (2,)), "b": ("float32", ())}
    path = tmp_path / "out.safetensors"
    with pytest.raises(ValueError, match="1 tensors were not written: b"):
        with StreamedFile(path, layout) as file:
            write_tensor(file, "a", torch.ones(2))
            for name, tensor, words in (
                ("a", torch.ones(2), "a is written already"),
                ("c", torch.ones(2), "c is not in the file"),
                ("b", torch.ones((), dtype=torch.int32), "not float32"),
            ):
                with pytest.raises(ValueError, match=words):
                    write_tensor(file, name, tensor)
            with pytest.raises(ValueError, match="12 bytes"):
                file.write("b", bytes(12))
    assert not path.exists()
    with pytest.raises(KeyError):
        with StreamedFile(path, layout) as file:
            raise KeyError
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        StreamedFile(path, {})
    assert path.read_text() == "mine"


PIECES = [b"1", b"2", b"3", b"4", b"8", b"0", b"9", b",", b'"', b"{", b"[", b"-", b"null", b" ", b"1e3", b""]


def test_whatever_is_accepted_the_library_accepts_too(tmp_path):
    """Headers that are cut, doubled, spliced, and filled with other numbers."""
    rng = random.Random(5)
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.ones(0)}
    save_file(tensors, tmp_path / "sound.safetensors")
    data = (tmp_path / "sound.safetensors").read_bytes()
    path, accepted = tmp_path / "model.safetensors", 0
    for _ in range(600):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            at, new = rng.randrange(len(broken)), rng.choice([*PIECES, rng.randbytes(1)])
            broken[at : at + rng.choice([0, len(new), rng.randrange(4)])] = new
        path.write_bytes(broken)
        try:
            header = read_header(path)
        except FormatError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            continue
        accepted += 1
        with safetensors.safe_open(path, "pt") as file:
            assert set(file.keys()) == set(header.tensors)
    assert accepted > 20


def test_a_file_that_changes_or_shrinks_after_it_was_opened_is_noticed(tmp_path):
    folder = folder_of(tmp_path, {"a": torch.randn(1000, 1000), "b": torch.ones(2)})
    file = tmp_path / "model.safetensors"
    with TensorReader(folder) as reader:
        reader.read("a")
        os.truncate(file, 1000)
        with pytest.raises(ValueError, match=r"model.safetensors changed since it was opened"):
            reader.read("b")
    file.unlink()
    with TensorReader(folder) as reader, pytest.raises(ValueError, match="cannot be read any more"):
        reader.read("a")
    save_file({"a": torch.randn(1000, 1000), "b": torch.ones(2)}, file)
    with TensorReader(folder) as reader, pytest.raises(ValueError, match="changed since"):
        reader.read("b")


@pytest.mark.parametrize("harm", ["cut", "written to"])
def test_a_file_that_is_harmed_in_the_middle_of_a_read_is_noticed(tmp_path, monkeypatch, harm):
    folder_of(tmp_path, {"a": torch.randn(1000)})
    file, read = tmp_path / "model.safetensors", os.preadv
    os.utime(file, (1, 1))  # a change in the same tick of the clock would go unseen
    header = read_header(file)
    folder = HFFolder(tmp_path, {}, header.tensors, {}, identities={file.name: header.identity})
    monkeypatch.setattr(hf_tensors, "_CHUNK", 1000)

    def harmful(descriptor, buffers, offset):
        if harm == "cut":
            os.truncate(file, 2000)
        else:
            with open(file, "r+b") as other:
                other.seek(-4, os.SEEK_END)
                other.write(b"1234")
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", harmful)
    with TensorReader(folder) as reader, pytest.raises(ValueError, match=r"ends within tensor 'a'|changed since"):
        reader.read("a")


def test_what_is_no_file_is_not_even_opened(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "model.safetensors")
    monkeypatch.setattr(os, "open", None)
    for path in (tmp_path / "model.safetensors", Path("/dev/zero"), tmp_path):
        with pytest.raises(FormatError, match="is not a regular file"):
            read_header(path)
