"""NaN and infinity, wherever and on whichever rank: found in the same step by all ranks, named, and without a trace."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, TP2, ZERO_2, ZERO_3
from tests.helpers.trained_steps import refusal
from tests.training.fault_cases import DAMAGE, FLAGS, NAMED, SITES, faulty_steps, poisoned_saves, stopped_run

KINDS = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
STEADY_SCALE: dict[str, Any] = {"initial_loss_scale": 1024.0, "min_loss_scale": 1024.0}

SPREAD: dict[str, dict[str, Any]] = {
    "bf16, ZeRO 1 x EP2": {"bf16": True, **EP2, **DISTRIBUTED},
    "bf16, ZeRO 3 x EP2": {"bf16": True, **EP2, **ZERO_3},
    "fp16, ZeRO 2": {"fp16": True, **STEADY_SCALE, **ZERO_2, "num_layers": 3},
}


def check(fault: tuple[str, str, str], results: list[dict[str, Any]]) -> None:
    """What one fault has to look like on all ranks; `results` by rank."""
    site, value, ranks = fault
    assert [result["committed"] for result in results] == [False] * len(results), fault
    assert [result["changed"] for result in results] == [[]] * len(results), fault
    assert [result["raised"] for result in results] == [site in DAMAGE] * len(results), fault
    told = results[0]["told"]
    assert len(told) == 1 and told[0].startswith("iteration "), (fault, told)
    assert NAMED[site] in told[0], (fault, told)
    assert KINDS[value] in told[0] or site == "router_logits", (fault, told)
    places = [f"rank {rank}/2 (" in told[0] for rank in range(2)]
    assert places == ([True, True] if ranks == "all" else [False, True]), (fault, told)
    assert ("continue from the last checkpoint" if site in DAMAGE else "--on-nan skip") in told[0], fault


def check_run(gloo: Any, faults: list[tuple[str, str, str]], flags: dict[str, Any]) -> None:
    results = gloo.run(2, faulty_steps, faults=faults, flags=flags)
    assert all(result["sound"] == [True] * (len(faults) + 1) for result in results)
    for number, fault in enumerate(faults):
        check(fault, [result["seen"][number] for result in results])


@pytest.mark.parametrize("case", rows(SPREAD, test=list(SPREAD)[:2]))
def test_every_site_is_named_and_nothing_has_changed(gloo, case):
    first = list(SPREAD).index(case)  # other values and ranks at each site
    faults = [
        (site, tuple(KINDS)[(first + number) % 3], ("one", "all")[(first + number) % 2])
        for number, site in enumerate(SITES)
    ]
    check_run(gloo, faults, SPREAD[case])


def test_a_gradient_that_the_norm_does_not_count_is_found(gloo):
    # Of a weight that both tensor-parallel ranks hold, the norm knows the first rank's gradient.
    faults = [("reduced_gradient", "nan", "one"), ("loss", "-inf", "one")]
    check_run(gloo, faults, {**TP2, "global_batch_size": 2})


def test_an_overflow_of_one_replica_leaves_no_rank_behind(gloo):
    # The engine asks the ranks of one model only: a replica that knows nothing of it would go on alone.
    check_run(gloo, [("reduced_gradient", "nan", "one")], {**EP2, "fp16": True, **STEADY_SCALE, "health_interval": 1})


def test_no_state_with_a_nan_is_saved_or_loaded(gloo, tmp_path):
    for result in gloo.run(2, poisoned_saves, root=str(tmp_path)):
        assert result["steps"] == ["iter_0000001", "iter_0000002"]
        assert len(result["refusals"]) == len(DAMAGE)
        for site, text in zip(DAMAGE, result["refusals"]):
            assert text.startswith("saving iteration 2: ") and NAMED[site] in text and "rank 1/2" in text
    for text in gloo.run(2, refusal, flags={**FLAGS, "load": str(tmp_path)}):
        assert f"--load {tmp_path}/iter_0000002: {NAMED['adam_moment']} holds NaN" in text


@pytest.mark.parametrize(("site", "flags"), [("adam_moment", {}), ("loss", {"on_nan": "stop"})])
def test_a_run_stops_on_all_ranks_where_it_has_to(gloo, site, flags):
    told = gloo.run(2, stopped_run, site=site, flags=flags)
    assert told[0] == told[1] and told[0].startswith("iteration 2: ") and NAMED[site] in told[0]
