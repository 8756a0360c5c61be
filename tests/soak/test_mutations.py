"""Each mutation of mutations.yaml is noticed by the test, or the doctor's layouts, that the list names."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.mutations import LISTED, copied, doctor_finds, notices, planted

FILES = sorted({mutation.file for mutation in LISTED})


@pytest.mark.parametrize("file", FILES)
def test_each_mutation_of_a_file_is_noticed(file: str, tmp_path: Path, figure: Callable[..., None]) -> None:
    folder, missed = copied(tmp_path), []
    mutations = {mutation: by for mutation, by in LISTED.items() if mutation.file == file}
    for mutation, by in mutations.items():
        with planted(folder, mutation):
            found = doctor_finds(folder, by) if by.startswith("doctor ") else notices(folder, [f"tests/{by}"])
        if found is None:
            missed.append(str(mutation))
    figure(f"mutations: {file}", trials=len(mutations), failures=len(missed), missed=missed)
    assert missed == []


def test_without_a_mutation_nothing_is_noticed(tmp_path: Path) -> None:
    folder, named = copied(tmp_path), set(LISTED.values())
    flags = sorted(by for by in named if by.startswith("doctor "))
    assert notices(folder, sorted(f"tests/{by}" for by in named if by not in flags)) is None
    assert {by: doctor_finds(folder, by) for by in flags} == dict.fromkeys(flags)
