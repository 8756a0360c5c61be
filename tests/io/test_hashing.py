"""A file is hashed while it is written, and again when it is read."""

import errno
import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_moe.io.files import new_file, write_bytes
from megatron_moe.io.hashing import sha256_of_file


def test_a_file_is_hashed_while_it_is_written_in_pieces_small_and_large(tmp_path):
    pieces = [os.urandom(number) for number in (0, 1, 4096, 3 << 20, 17, 1 << 20)]
    with new_file(tmp_path / "x") as file:
        for piece in pieces:
            assert file.write(memoryview(piece)) == len(piece)
        assert file.tell() == sum(map(len, pieces))
    content = (tmp_path / "x").read_bytes()
    assert content == b"".join(pieces)
    assert file.entry() == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_piece_may_change_as_soon_as_it_is_written(tmp_path):
    piece = bytearray(os.urandom(8 << 20))
    before, digest = hashlib.sha256(piece).hexdigest(), hashlib.sha256()

    def update_slowly(data: memoryview) -> None:
        time.sleep(0.2)
        digest.update(data)

    with new_file(tmp_path / "x") as file:
        file._digest = SimpleNamespace(update=update_slowly, hexdigest=digest.hexdigest)
        file.write(piece)
        piece[:] = bytes(len(piece))
    assert file.entry()["sha256"] == before


@pytest.mark.parametrize("size", [10, 4 << 20])
def test_a_full_disk_is_told_with_the_file(size):
    with pytest.raises(OSError) as caught, new_file(Path("/dev/full")) as file:
        file.write(bytes(size))
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == "/dev/full"


def test_the_hash_of_a_file_is_that_of_its_content_and_every_byte_is_counted(tmp_path):
    content = os.urandom((9 << 20) + 5)
    entry = write_bytes(tmp_path / "x", content)
    read: list[int] = []
    assert sha256_of_file(tmp_path / "x", read.append) == entry["sha256"] == hashlib.sha256(content).hexdigest()
    assert sum(read) == entry["bytes"] == len(content) and len(read) > 1
