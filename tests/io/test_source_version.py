"""The commit of the package: of the work tree that it lies in, of a build, or none."""

from megatron_moe.io import source_version


def test_the_commit_is_that_of_the_work_tree_or_of_the_build_or_none(tmp_path, monkeypatch):
    package, git, tree = (tmp_path / name for name in ("clone/megatron_moe", "clone/.git", "main/tree"))
    monkeypatch.setattr(source_version, "_PACKAGE", package)
    found = lambda: source_version.source_version.__wrapped__().get(source_version.COMMIT)  # noqa: E731
    (git / "refs" / "heads").mkdir(parents=True)
    package.mkdir()
    assert found() is None
    (package / "commit.txt").write_text("0123\n")
    assert found() == "0123"
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs with: peeled\n4567 refs/heads/main\n89 refs/tags/a\n")
    assert found() == "4567"
    (git / "refs" / "heads" / "main").write_text("abc\n")
    assert found() == "abc"
    git.rename(tmp_path / "main")
    tree.mkdir()
    for path, text in ((git, f"gitdir: {tree}"), (tree / "commondir", ".."), (tree / "HEAD", "ref: refs/heads/main")):
        path.write_text(f"{text}\n")
    assert found() == "abc"
    (tree / "HEAD").write_text("def\n")
    assert found() == "def"
