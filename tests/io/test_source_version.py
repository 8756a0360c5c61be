"""The commit of the package: of the work tree that it lies in, of a build, or none."""

from __future__ import annotations

from megatron_moe.io import source_version

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_the_commit_is_that_of_the_work_tree_or_of_the_build_or_none(tmp_path, monkeypatch):
    def found() -> str | None:
        return source_version.source_version.__wrapped__().get(source_version.COMMIT)

    package, git = tmp_path / "clone" / "megatron_moe", tmp_path / "clone" / ".git"
    package.mkdir(parents=True)
    monkeypatch.setattr(source_version, "_PACKAGE", package)
    assert found() is None
    (package / "commit.txt").write_text(f"{COMMIT}\n")
    assert found() == COMMIT
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{'1' * 40} refs/heads/main\n{'2' * 40} refs/tags/a\n")
    assert found() == "1" * 40
    (git / "refs" / "heads" / "main").write_text("3" * 40)
    assert found() == "3" * 40
    git.rename(tmp_path / "main")
    (tmp_path / "main" / "tree").mkdir()
    (tmp_path / "main" / "tree" / "commondir").write_text("..\n")
    (tmp_path / "main" / "tree" / "HEAD").write_text("ref: refs/heads/main\n")
    git.write_text(f"gitdir: {tmp_path / 'main' / 'tree'}\n")
    assert found() == "3" * 40
    (tmp_path / "main" / "tree" / "HEAD").write_text("4" * 40)
    assert found() == "4" * 40
