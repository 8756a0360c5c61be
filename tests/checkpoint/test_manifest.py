"""A manifest sees every flipped bit, every file that is missing, extra, swapped or changed, and names it. No torch."""

import hashlib
import json
from pathlib import Path

import pytest

from megatron_moe.checkpoint import manifest
from megatron_moe.io import hashing
from megatron_moe.io.files import canonical_json
from megatron_moe.io.hashing import FileEntry, sha256_of_file

FILES = {"__0_0.distcp": b"weights" * 9, ".metadata": b"index", "rng/rank_00000.safetensors": b"states", "empty": b""}


def entry(content: bytes) -> FileEntry:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "iter_0000050"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest.write(folder, 50, {name: entry(content) for name, content in FILES.items()})
    return folder


def rewrite(step: Path, **changes: object) -> None:
    """A manifest with other content, its digest made to fit: a mistake of a writer, not damage."""
    content = json.loads((step / manifest.NAME).read_bytes()) | changes
    content["digest"] = manifest._digest(content)
    (step / manifest.NAME).write_bytes(canonical_json(content))


def test_a_flipped_bit_or_a_cut_of_the_manifest_is_seen(step):
    path = step / manifest.NAME
    good = path.read_bytes()
    damaged = [good[:length] for length in (0, 1, 100, -1)]
    for position in range(0, 8 * len(good), 31):
        damaged.append(bytearray(good))
        damaged[-1][position // 8] ^= 1 << position % 8
    for content in damaged:
        path.write_bytes(content)
        assert "manifest.json is damaged" in (manifest.structure_defect(step) or "")


@pytest.mark.parametrize("name", [name for name in FILES if FILES[name]])
def test_another_size_is_told_by_the_structure_and_another_content_by_its_hash(step, name):
    path = step / name
    path.write_bytes(FILES[name] + b"x")
    assert f"{name} has {len(FILES[name]) + 1} bytes instead of {len(FILES[name])}" == manifest.structure_defect(step)
    path.write_bytes(bytes([FILES[name][0] ^ 1]) + FILES[name][1:])
    assert manifest.structure_defect(step) is None
    assert manifest.content_defect(step, FILES) == f"{name} does not hold what was saved: its SHA-256 is another"


def test_a_missing_and_an_unreadable_file_are_named(step):
    (step / ".metadata").unlink()
    assert manifest.structure_defect(step) == ".metadata is missing"
    (step / ".metadata").mkdir()
    assert (manifest.content_defect(step, [".metadata"]) or "").startswith(".metadata cannot be read")


@pytest.mark.parametrize("name", ["rng", "__0_0.distcp", manifest.NAME])
def test_a_link_in_a_step_is_refused_even_where_it_leads_to_the_right_content(step, tmp_path, name):
    (step / name).rename(tmp_path / "elsewhere")
    (step / name).symlink_to(tmp_path / "elsewhere")
    assert name in (manifest.structure_defect(step) or "")
    assert ("link" if name != manifest.NAME else "plain file") in (manifest.structure_defect(step) or "")


def test_the_manifest_of_another_step_is_told_apart_and_a_hidden_step_is_checked(step):
    step = step.rename(step.with_name(".iter_0000050.saving"))
    assert manifest.structure_defect(step) is None
    rewrite(step, iteration=49)
    assert manifest.structure_defect(step) == "its manifest.json is that of step 49"
    renamed = step.rename(step.with_name("copy_of_iter_0000050"))
    assert "not named iter_" in (manifest.structure_defect(renamed) or "")


@pytest.mark.parametrize("name", ["../x", "/x", "a/../x", "./x", "a//x", "", ".", "manifest.json", "a\x00b", "a\nb"])
def test_a_name_that_leads_out_of_the_folder_is_neither_written_nor_read(step, name):
    with pytest.raises(ValueError, match="not the name of a file"):
        manifest.write(step, 50, {name: entry(b"")})
    rewrite(step, files={name: entry(b"")})
    with pytest.raises(manifest.ManifestError, match="not the name of a file"):
        manifest.read(step)


@pytest.mark.parametrize(
    ("size", "digest"), [(-1, "0" * 64), (True, "0" * 64), (1, "0" * 63), (1, "A" * 64), (1, None), (None, None)]
)
def test_an_entry_without_size_and_hash_is_refused(step, size, digest):
    given = {"bytes": size, "sha256": digest}
    wrong = {key: value for key, value in given.items() if value is not None}
    rewrite(step, files={"x": wrong or 7})
    with pytest.raises(manifest.ManifestError, match="x has "):
        manifest.read(step)


def test_other_formats_are_named(step):
    (step / manifest.NAME).write_text(json.dumps({"files": {"__0_0.distcp": 7}}))
    with pytest.raises(manifest.OtherFormatError, match="earlier version"):
        manifest.read(step)
    manifest.write(step, 50, {})
    rewrite(step, format=3, novelty=1)
    with pytest.raises(manifest.ManifestError, match=r"later version \(format 3"):
        manifest.read(step)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"7", b'{"format": 2, "iteration": ' + b"9" * 5000 + b"}", b"\xff"])
def test_a_hostile_manifest_is_an_error_and_no_crash(step, data, monkeypatch):
    (step / manifest.NAME).write_bytes(data)
    with pytest.raises(manifest.ManifestError, match="damaged"):
        manifest.read(step)
    monkeypatch.setattr(manifest, "LARGEST", len(data) - 1)
    with pytest.raises(manifest.ManifestError, match=f"more than {len(data) - 1} bytes"):
        manifest.read(step)


def test_progress_counts_every_byte_and_the_hash_is_the_usual_one(step, tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "_BLOCK", 10)
    seen: list[int] = []
    assert manifest.content_defect(step, ["__0_0.distcp"], seen.append) is None
    assert seen == [10] * 6 + [3]
    assert sha256_of_file(step / "__0_0.distcp", seen.append) == entry(FILES["__0_0.distcp"])["sha256"]
    assert sum(seen) == 126
