"""Which step is loaded, which folder is refused, and that nothing visible is ever half written. No torch."""

import pytest

from megatron_moe.checkpoint import folder
from megatron_moe.config.errors import ConfigError
from tests.helpers.plain_steps import write_step


def test_the_newest_complete_step_is_found(tmp_path):
    for iteration in (50, 100, 9):
        write_step(tmp_path, iteration)
    step, notes = folder.find_step(tmp_path, None)
    assert step == tmp_path / "iter_0000100"
    assert notes == [f"{tmp_path / folder.LATEST} names step 9; the newest complete step is 100"]
    with pytest.raises(ConfigError, match=r"--ckpt-step 55: there is no such step .*complete steps: 9, 50, 100"):
        folder.find_step(tmp_path, 55)


def test_a_step_is_invisible_until_it_is_complete_and_nothing_of_a_dead_writer_is_mixed_into_the_next(tmp_path):
    write_step(tmp_path, 50)
    (folder.open_hidden(tmp_path, 100) / "__1_0.distcp").write_text("half")
    assert folder.steps(tmp_path) == [50]
    assert (tmp_path / folder.LATEST).read_text() == "50\n"
    step = write_step(tmp_path, 100)
    assert not (step / "__1_0.distcp").exists()
    assert not folder.staging_dir(tmp_path, 100).exists()


def test_a_step_with_another_configuration_is_passed_over_and_named(tmp_path):
    write_step(tmp_path, 50)
    (write_step(tmp_path, 100) / folder.CONFIG).write_text('{"seed":2}')
    found, notes = folder.find_step(tmp_path, None)
    assert found == tmp_path / "iter_0000050"
    assert notes[0].startswith(folder.WARNING) and "iter_0000100" in notes[0]
    with pytest.raises(ConfigError, match=r"--ckpt-step 100: .*complete steps: 50"):
        folder.find_step(tmp_path, 100)


def test_a_run_does_not_start_afresh_where_every_step_is_damaged(tmp_path):
    for iteration in (50, 100):
        (write_step(tmp_path, iteration) / "__0_0.distcp").unlink()
    with pytest.raises(ConfigError, match=r"none of its 2 steps can be loaded") as error:
        folder.find_step(tmp_path, None)
    assert all(f"step {iteration} is damaged" in str(error.value) for iteration in (50, 100))


def test_a_step_of_the_first_format_is_refused_by_name_and_never_passed_over(tmp_path):
    write_step(tmp_path, 50)
    step = write_step(tmp_path, 100)
    (step / folder.MANIFEST).write_text('{"files": {"__0_0.distcp": 7}}')
    for wanted in (None, 100):
        with pytest.raises(ConfigError, match=r"100.*saved by an earlier version \(format 1, without checksums\)"):
            folder.find_step(tmp_path, wanted)


@pytest.mark.parametrize(("content", "named"), [(b"", "nothing"), (b"900\n", "900"), (b"\xff\x00", "")])
def test_the_pointer_decides_nothing(tmp_path, content, named):
    step = write_step(tmp_path, 50)
    pointer = tmp_path / folder.LATEST
    pointer.write_bytes(content)
    found, (note,) = folder.find_step(tmp_path, None)
    assert found == step and f"names step {named}" in note and "the newest complete step is 50" in note
    pointer.unlink()
    assert folder.find_step(tmp_path, None) == (step, [])
    write_step(tmp_path, 100)
    assert pointer.read_text() == "100\n"


def test_a_folder_that_only_looks_like_a_step_is_none(tmp_path):
    write_step(tmp_path, 50)
    for name in ("iter_00000060", "iter_70", "iter_0000080.incomplete", "iter_٠٠٠٠٠٩٠"):
        (tmp_path / name).mkdir()
    assert folder.steps(tmp_path) == [50]


def test_a_missing_or_empty_folder_holds_nothing_yet(tmp_path):
    assert folder.find_step(tmp_path / "missing", None) == (None, [])
    assert folder.find_step(tmp_path, None) == (None, [])
    folder.claim_root(tmp_path)  # a folder of ours
    (tmp_path / "tensorboard").mkdir()
    assert folder.find_step(tmp_path, None) == (None, [])


def test_a_complete_step_is_never_overwritten(tmp_path):
    step = write_step(tmp_path, 50, "first")
    with pytest.raises(FileExistsError, match="never overwritten"):
        folder.open_hidden(tmp_path, 50)
    assert (step / "__0_0.distcp").read_text() == "first"


def test_a_run_saves_into_a_folder_of_its_own_steps_none_later_than_where_it_starts(tmp_path):
    write_step(tmp_path, 50)
    with pytest.raises(ConfigError, match=f"continue it with --load {tmp_path}"):
        folder.check_save_root(tmp_path, loaded_from=None, start_iteration=0)
    with pytest.raises(ConfigError, match="of an earlier run"):
        folder.check_save_root(tmp_path, loaded_from=tmp_path / "elsewhere", start_iteration=0)
    folder.check_save_root(tmp_path, loaded_from=tmp_path, start_iteration=50)
    write_step(tmp_path, 60)
    with pytest.raises(ConfigError, match="holds step 60, later than step 50"):
        folder.check_save_root(tmp_path, loaded_from=tmp_path, start_iteration=50)
