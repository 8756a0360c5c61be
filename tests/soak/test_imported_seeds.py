"""Imported models against transformers at every layout of the suite, with many more seeds."""

import pytest

from tests.helpers import tiny_models
from tests.hf import imported_cases as cases
from tests.hf.test_mapping_ranks import LAYOUTS, difference, reference


@pytest.mark.parametrize("case", list(tiny_models.CASES))
def test_every_seed_of_a_family_computes_what_transformers_computes(case, gloo, tmp_path, scaled, figure):
    seeds = range(100, 100 + scaled(20))
    references = [reference(case, seed, tmp_path / str(seed)) for seed in seeds]
    folders = [found.folder for found in references]
    differences = []
    for layout in (layout for layout in LAYOUTS.values() if case in layout.cases):
        by_rank = gloo.run_within(600, layout.ranks, cases.imported, folders=folders, layout=layout.flags)
        steps = list(zip(*by_rank))
        differences += [difference(list(step), about, layout.flags) for step, about in zip(steps, references)]
    wrong = [d for d in differences if d.logits >= 1e-4 or d.loss >= 1e-5 or d.choices or d.gradient >= 1e-4]
    furthest = {name: max(getattr(d, name) for d in differences) for name in ("logits", "loss", "gradient")}
    figure(f"imported {case}", trials=len(differences), failures=len(wrong), **furthest)
    assert wrong == []
