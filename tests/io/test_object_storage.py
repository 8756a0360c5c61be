"""A path in a store does what pathlib's does; what a store lacks never reaches a disk."""

import errno
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.paths import require_store
from megatron_moe.io import object_storage
from megatron_moe.io.files import new_file, remove_tree, replace_text, sync
from megatron_moe.io.hashing import sha256_of_file
from megatron_moe.io.object_storage import StoreError, location


@pytest.fixture
def root(request):
    name = location(f"memory://{request.node.name.partition('[')[0]}/run")
    yield name
    remove_tree(name)


def seen(root: Path) -> list[Any]:
    """What the methods of a path return for a small tree."""
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "x").write_bytes(b"0123456789")
    replace_text(root / "a" / "text", "one\n")
    replace_text(root / "a" / "text", "two\nthree\n")
    with new_file(root / "new") as file:
        file.write(b"ab")
        file.write(memoryview(b"cde"))
    (root / "empty").touch()
    sync(root)
    with (root / "a" / "b" / "x").open("rb") as file:
        file.seek(4)
        found: list[Any] = [file.read(3), file.read(), file.read()]
    with (root / "a" / "b" / "x").open("rb", buffering=0) as file:
        file.seek(2)
        buffer = bytearray(3)
        found += [file.readinto(buffer), bytes(buffer), file.tell()]
    missing = root / "missing"
    paths = (root, root / "a", root / "a" / "b" / "x", root / "empty", missing)
    found += [(path.exists(), path.is_dir(), path.is_file()) for path in paths]
    found += [sorted(entry.name for entry in root.iterdir()), (root / "a" / "text").read_text()]
    found += [(root / "new").read_bytes(), (root / "new").stat().st_size, sha256_of_file(root / "new")]
    found += [(root / "a" / "b" / "x").relative_to(root).as_posix(), (root / "a").parent == root, root.name]
    found += [pickle.loads(pickle.dumps(root / "a")) == root / "a", sorted([root / "b", root / "a"])[0].name]
    for act in (missing.unlink, missing.stat, missing.read_bytes, lambda: list(missing.iterdir())):
        with pytest.raises(FileNotFoundError) as error:
            act()
        found.append((error.value.errno, Path(error.value.filename).name))
    missing.unlink(missing_ok=True)
    (root / "new").unlink()
    remove_tree(root / "a")
    remove_tree(root / "a")
    return [*found, sorted(entry.name for entry in root.iterdir())]


def test_a_path_in_a_store_does_what_one_on_a_disk_does(root, tmp_path):
    there, here = seen(root), seen(tmp_path / "run")
    assert there[-1] == here[-1] == ["empty"] and there == here


def test_a_url_stays_one_and_no_disk_is_touched_in_its_place(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(location("s3://bucket/run/") / "iter_0000001") == "s3://bucket/run/iter_0000001"
    assert location(f"file://{tmp_path}/a") == tmp_path / "a" and type(location("runs/a")) is type(Path())
    for act in (os.fspath, open, os.stat, os.listdir):
        with pytest.raises(TypeError, match="in an object store, and not on a disk"):
            act(root / "a")
    for pattern in ("s3://bucket/*", "s3://bucket/run[1]", "s3://bucket/ru?"):
        with pytest.raises(ConfigError, match="make a pattern of a URL"):
            location(pattern)
    with pytest.raises(TypeError):
        (root / "a").symlink_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_object_is_put_as_a_whole_or_not_at_all(root, monkeypatch):
    monkeypatch.setattr(object_storage, "PART_BYTES", 4)
    put: list[bytes] = []

    class Parts:
        closed = False

        def write(self, part: memoryview) -> None:
            if bytes(part) == b"BAD!":
                raise RuntimeError("the connection was lost")
            put.append(bytes(part))

        def close(self) -> None:
            put.append(b"<the object>")

        def discard(self) -> None:
            put.append(b"<nothing>")

    monkeypatch.setattr(type(root._store), "open", lambda *_, **__: Parts())
    with (root / "whole").open("wb") as file:
        file.write(b"123456")
    assert put == [b"1234", b"56", b"<the object>"]
    put.clear()
    with pytest.raises(StoreError, match=r"RuntimeError: the connection was lost.*memory://.*/run/torn") as error:
        with new_file(root / "torn") as file:
            file.write(b"1234" + b"BAD!" + b"789")
    assert error.value.errno == errno.EIO and isinstance(error.value, ConfigError)
    assert put[-1] == b"<nothing>" and b"<the object>" not in put
    put.clear()
    with pytest.raises(KeyError), (root / "left").open("wb") as file:
        file.write(b"1234")
        raise KeyError
    assert put == [b"1234", b"<nothing>"]


def test_an_object_is_created_once(root):
    (root / "lock").create(b"first")
    with pytest.raises(FileExistsError):
        (root / "lock").create(b"second")
    assert (root / "lock").read_bytes() == b"first"


@pytest.mark.parametrize("method", ["info", "ls", "cat_file", "find"])
def test_a_store_that_does_not_answer_says_nothing_about_its_objects(root, monkeypatch, method):
    def fail(*_: Any, **__: Any) -> None:
        raise TimeoutError

    (root / "a").write_bytes(b"content")
    acts = {
        "info": lambda: root.exists(),
        "ls": lambda: list(root.iterdir()),
        "cat_file": lambda: (root / "a").read_text(),
        "find": lambda: list(root.walk_files()),
    }
    with monkeypatch.context() as patch, pytest.raises(StoreError, match="TimeoutError"):
        patch.setattr(type(root._store), method, fail)
        acts[method]()


def test_a_store_that_is_unknown_or_lacks_its_package_is_refused_with_what_to_do(monkeypatch):
    require_store("--save", "memory://run")
    with pytest.raises(ConfigError, match=r"--save none://a: there is no object store none://"):
        require_store("--save", "none://a")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(ConfigError, match=r"--load s3://a/b: needs a package .* pip install s3fs"):
        require_store("--load", "s3://a/b")
