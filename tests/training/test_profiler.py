"""megatron-moe profile: each station has its own operations, forward and backward."""

import json

import pytest

from megatron_moe.moe.router import TopKRouter
from megatron_moe.training.callbacks.profiler import FUNCTIONS, MODULES
from megatron_moe_tools import profile_step
from megatron_moe_tools.profile_step import OPERATIONS, main

pytestmark = pytest.mark.engine

TINY = "--preset tiny --mock-data --vocab-size 64 --num-layers 2 --moe-layer-freq [0,1] --seq-length 16".split()
FEW = ["--global-batch-size", "1", "--micro-batch-size", "1", "--profile-steps", "2", "--profile-warmup", "1"]
# Where a station's time must have gone: an operation that it alone has.
FORWARD = {"route": "aten::topk", "dispatch": "CopyRows", "experts": "_GroupedMM", "combine": "_SumCopies"}
BACKWARD = {station: f"{FORWARD[station]}Backward" for station in ("dispatch", "experts", "combine")}
BACKWARD |= {"route": "_ExpertWeightsBackward", "norms": "_RMSNormFunctionBackward"}
BACKWARD |= {"loss": "_CrossEntropyBackward", "embedding": "_LookupBackward"}


@pytest.mark.usefixtures("one_process")
def test_operations_are_found_at_their_stations_forward_and_backward(tmp_path, capsys, monkeypatch):
    kept = []
    shares = profile_step.shares
    monkeypatch.setattr(profile_step, "shares", lambda events: kept.append(shares(events)) or kept[-1])
    route = TopKRouter.route
    assert main([*TINY, *FEW, "--trace", str(tmp_path / "step.json")]) == 0
    (found,) = kept
    assert set(found) == {*FUNCTIONS.values(), *MODULES.values(), *OPERATIONS.values(), "elsewhere"}
    for station, operation in (*FORWARD.items(), *BACKWARD.items()):
        assert [name for name, share in found.items() if operation in share.operations] == [station], operation
    assert all(found[station].backward > 0 for station in BACKWARD)
    assert found["commit"].forward > 0 and found["commit"].backward == found["check"].backward == 0
    shown = capsys.readouterr().out
    assert all(f"\n{station} " in shown for station in found) and "ms a step on rank 0, in 2 steps" in shown
    trace = json.loads((tmp_path / "step.json").read_text())
    assert "station: route" in {event.get("name") for event in trace["traceEvents"]}
    assert TopKRouter.route is route
