"""What a run is told of its data before it continues."""

from types import SimpleNamespace
from typing import Any

from megatron_moe.config.schema import Run, flatten, replace
from megatron_moe.io.source_version import source_version
from megatron_moe.training.plan import same_data_notes


def test_made_up_data_of_another_version_may_be_others_and_data_on_disk_are_not():
    def notes(versions: dict[str, str], **flags: Any) -> list[str]:
        run, state = replace(Run(), vocab_size=99, **flags), {"data": {}, "versions": versions}
        source = SimpleNamespace(weights_only=False, state=state, config=flatten(run), step="iter_0000005")
        return same_data_notes(run, {}, SimpleNamespace(source=source))

    assert notes(source_version(), mock_data=True) == notes({}, data_path=("a",)) == []
    (note,) = notes({"megatron-moe": "0.0.9"}, mock_data=True)
    assert note.startswith("WARNING: --mock-data: iter_0000005 is of another version") and "0.0.9 (no commit" in note
