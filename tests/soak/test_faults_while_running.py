"""R7 to R11 with their numbers: faults of numbers, replicas and ranks in real runs, and signals at random times."""

import itertools
import random
from typing import Any

import pytest

from tests.helpers import kills
from tests.helpers.ranks import RankParent
from tests.helpers.stepped_trainer import EP2, PP2, TP2
from tests.launch import broken_jobs
from tests.training import fault_cases, replica_cases
from tests.training.test_faults_ranks import KINDS, check

TIMEOUT = 10.0


@pytest.fixture(scope="module", params=["agent", "rank 0"])
def breaking(request: pytest.FixtureRequest, rank_parent: RankParent) -> broken_jobs.Breaking:
    """Ranks whose store lives in a launcher, and ranks whose store lives in rank 0."""
    return broken_jobs.Breaking(rank_parent, agent=request.param == "agent")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("name", "flags"), [("EP2", EP2), ("TP2", TP2), ("PP2", PP2)])
def test_numbers_that_are_not_finite(gloo, figure, name, flags, precision):
    faults = [(site, value, ranks) for site in fault_cases.SITES for value in KINDS for ranks in ("one", "all")]
    more: dict[str, Any] = {} if precision == "fp32" else {precision: True}
    if precision == "fp16":  # at its floor a scale has nowhere to fall, so that nothing is an overflow
        more |= {"initial_loss_scale": 1024.0, "min_loss_scale": 1024.0}
    if name == "PP2":  # rank 1 is the last stage, which has the second layer and the loss; nobody else has them
        faults = [fault for fault in faults if fault[0] != "embedding_output" and fault[2] == "one"]
    results = gloo.run_within(900, 2, fault_cases.faulty_steps, faults=faults, flags={**flags, **more})
    failed = [fault for number, fault in enumerate(faults) if not sound(fault, [r["seen"][number] for r in results])]
    figure("R7", trials=len(faults), failures=len(failed), layout=name, precision=precision, failed=failed)
    assert failed == [] and all(all(result["sound"]) for result in results)


def sound(fault: tuple[str, str, str], results: list[dict[str, Any]]) -> bool:
    try:
        check(fault, results)
    except AssertionError as error:
        print(str(error)[:400])
        return False
    return True


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, {"expert_model_parallel_size": 2, "bf16": True}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"use_distributed_optimizer": True, "bf16": True}),
        (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}),
    ],
    ids=["EP2", "TP2", "DP2", "TP2xEP2"],
)
def test_flipped_bits_in_replicas(gloo, scaled, figure, ranks, flags):
    trials = scaled(50)
    outcomes = gloo.run_within(1800, ranks, replica_cases.flipped_bits, flags=flags, trials=trials)
    missed = [miss for outcome in outcomes for miss in outcome["missed"]]
    alarms = [alarm for outcome in outcomes for alarm in outcome["alarms"]]
    figure("R8 flips", trials=trials, failures=len(missed), ranks=ranks, false_alarms=len(alarms))
    assert missed == [] and alarms == []


def test_sound_replicas_raise_no_alarm(gloo, scaled, figure):
    steps = scaled(10_000)
    flags = {"expert_model_parallel_size": 2, "bf16": True, "num_layers": 2, "seq_length": 8, "hidden_size": 32}
    done = gloo.run_within(4 * 3600, 2, replica_cases.clean_steps, flags=flags, steps=steps)
    figure("R8 clean steps", trials=steps, failures=steps - min(done))
    assert done == [steps, steps]


DEATHS = list(itertools.product(range(4), broken_jobs.PHASES, broken_jobs.DEATHS))
PHASES = random.Random(11).choices(broken_jobs.PHASES, k=4 * len(broken_jobs.HANGS))
HANGS = [(r, phase, kind) for (r, kind), phase in zip(itertools.product(range(4), broken_jobs.HANGS), PHASES)]


@pytest.mark.parametrize(("name", "places", "limit"), [("R9", DEATHS, 60.0), ("R10", HANGS, TIMEOUT + 35)])
def test_ranks_that_die_or_hang(breaking, tmp_path, scaled, figure, request, name, places, limit):
    """One job for each fault, and its continuation."""
    world_size, flags = kills.LAYOUTS["TP2xEP2"]
    argv, saving = kills.flags(8, *flags, eval_interval=4), ["--save-interval", "2"]
    hasty = [*saving, "--distributed-timeout-minutes", str(TIMEOUT / 60)]
    oracle = kills.undisturbed_job(breaking, tmp_path / "oracle", argv, world_size)
    found, seconds = [], []
    for number, (rank, phase, kind) in enumerate(random.Random(9).sample(places, scaled(len(places)))):
        here, fault = tmp_path / str(number), {"rank": rank, "phase": phase, "kind": kind, "iteration": 4}
        result = broken_jobs.break_job(breaking, here, [*argv, *hasty], world_size, fault)
        seconds.append(result.seconds)
        defects = result.defects(kind, rank, limit)
        job = kills.undisturbed_job(breaking, here, [*argv, *saving], world_size)
        defects += kills.differences(job, oracle, 8)
        found += [(fault, defects)] if defects else []
    about = {"store": request.node.name, "timeout": TIMEOUT, "longest_seconds": max(seconds)}
    figure(name, trials=len(seconds), failures=len(found), **about, found=found)
    assert found == []


def test_signals_at_random_times(forked, tmp_path, scaled, figure):
    world_size, flags = kills.LAYOUTS["EP2"]
    trials, argv = scaled(100), kills.flags(30, *flags, "--exit-signal-handler")
    result = broken_jobs.signalled_jobs(forked, tmp_path, argv, world_size, random.Random(12), trials)
    figure("R11", **result)
    assert result["found"] == []


@pytest.mark.parametrize("place", broken_jobs.PLACES)
def test_what_asks_to_stop_is_heeded_wherever_the_run_is(rank_parent, tmp_path, figure, place):
    """Within the 30 s after which launchers kill; one rank keeps the others waiting there."""
    launcher, (world_size, flags) = broken_jobs.Breaking(rank_parent), kills.LAYOUTS["EP2"]
    argv, found = [*kills.flags(30, *flags, eval_interval=3), "--save-interval", "3"], []
    argv[argv.index("--eval-iters") + 1] = "100"
    for way, asked in {
        "SIGTERM": ["--exit-signal-handler"],
        "SIGUSR1": ["--exit-signal-handler"],
        "clock": ["--exit-duration-in-mins", "0.1" if place == "start" else "60"],
    }.items():
        found += broken_jobs.stopped_in(launcher, tmp_path / way, [*argv, *asked], world_size, place, way)
    figure("R11", place=place, trials=3, failures=len(found), found=found)
    assert found == []
