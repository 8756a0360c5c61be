"""The list of mutations (tests/soak/mutations.yaml) fits the code and the tests; `make soak` plants them."""

from functools import cache

from tests.helpers.sources import ROOT, tree
from tests.soak.mutations import LISTED, UNNOTICED, sites


def test_every_mutation_has_a_place_and_names_a_test():
    every = {**LISTED, **UNNOTICED}
    assert [str(mutation) for mutation in every if str(mutation) not in _places(mutation.file)] == []
    tests = [by for by in LISTED.values() if not by.startswith("doctor ")]
    assert [by for by in tests if by.partition("::")[2] not in _tests(by.partition("::")[0])] == []


@cache
def _places(file: str) -> set[str]:
    return {str(site.mutation) for site in sites(file)}


@cache
def _tests(path: str) -> set[str]:
    """Return the names of a file's tests, and the empty one, which stands for all of them."""
    file = ROOT / "tests" / path
    return {"", *(getattr(node, "name", "") for node in tree(file).body)} if file.is_file() else set()
