"""`megatron-moe plan --fit`: the fastest layout that fits, found among all, and what is estimated on the way to it."""

import dataclasses
import itertools
import json
import re
import shlex

import pytest

from megatron_moe.config.fields import all_fields
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build, replace
from megatron_moe_tools import compat
from megatron_moe_tools.plan import cli, layouts
from megatron_moe_tools.plan.fit import Search, format_layout
from megatron_moe_tools.plan.layouts import Machine, legal
from megatron_moe_tools.plan.plan import make_plan, peak_gib
from tests.helpers.rows import rows

SMALL = {"vocab_size": 1000, "bf16": True, "global_batch_size": 16, "micro_batch_size": 1}
TINY = {**PRESETS["tiny"], **SMALL, "num_layers": 6, "moe_layer_freq": "[0]*2+[1]*4"}
MOVED = {**TINY, "min_offloaded_tensor_size": 1}
GQA = {**PRESETS["tiny-gqa"], **SMALL}
WINDOWS = {
    **GQA, "num_layers": 4, "seq_length": 512, "max_position_embeddings": 512, "window_size": "15,0",
    "window_attn_skip_freq": 2,
}  # fmt: skip
DENSE = {**SMALL, "num_layers": 7, "hidden_size": 96, "num_attention_heads": 6, "seq_length": 64}


def to_host(*names):
    return tuple(layouts.TO_HOST + name for name in names)


ALL_TO_HOST = to_host(*all_fields()["offload_modules"].choices)


def search(flat, world_size, typed=(), **machine):
    run = dataclasses.replace(build(flat), explicit=frozenset(typed))
    return Search(run, world_size, Machine(**machine))


def planned_gib(looked, layout, modules):
    return peak_gib(layout.run(looked.run, modules), looked.world_size, looked.machine, looked.known)


def searched_again(looked, **machine):
    """What is found on another machine; the parts of the model that are traced already are not traced again."""
    again = Search(looked.run, looked.world_size, dataclasses.replace(looked.machine, **machine))
    again.costs, again.known = looked.costs, looked.known
    return again.search(0)


def pick(found, **wanted):
    """The first layout with these sizes, e.g. pp=2, vpp=2, zero=1, tp=1, etp=1, ep=2."""
    for one in found:
        sizes = {**vars(one.sharding), **vars(one), "vpp": len(one.stages) // one.pp}
        if all(sizes[name] == size for name, size in wanted.items()):
            return one
    raise AssertionError(f"no layout with {wanted}")


ESTIMATED = {
    "tiny": (TINY, 8, "cuda", [
        ({"tp": 1, "pp": 1, "ep": 2, "zero": 3}, ("moe_act", "layernorm")),
        ({"tp": 1, "pp": 1, "ep": 8, "zero": 2}, ("full",)),
        ({"tp": 2, "pp": 2, "vpp": 1, "etp": 2, "ep": 1}, ("mlp", "mla_up_proj")),
        ({"tp": 2, "pp": 1, "etp": 1, "ep": 4, "zero": 1}, ("mla_up_proj", "layernorm", "moe_act", "shared_experts")),
        ({"tp": 1, "pp": 2, "vpp": 3, "ep": 2}, ("moe", "layernorm")),
    ]),
    "predictions": ({**TINY, "mtp_num_layers": 1}, 4, "cuda", [
        ({"tp": 1, "pp": 1, "ep": 2, "zero": 1}, ("moe_act",)),
        ({"tp": 1, "pp": 2, "vpp": 1, "ep": 2}, ()),
    ]),
    "on a CPU": (GQA, 4, "cpu", [
        ({"tp": 1, "pp": 2, "vpp": 1, "ep": 2}, ("layernorm",)),
        ({"tp": 2, "pp": 1, "etp": 1, "ep": 2, "zero": 1}, ()),
    ]),
    "offloaded": (MOVED, 8, "cuda", [
        ({"tp": 1, "pp": 1, "ep": 2, "zero": 3}, ("moe_act", *to_host("core_attn", "attn_proj", "moe_act"))),
        ({"tp": 2, "pp": 2, "vpp": 1, "etp": 2, "ep": 1}, ("mlp", *to_host("qkv_linear", "attn_norm", "mlp_norm"))),
        ({"tp": 1, "pp": 4, "vpp": 1, "ep": 2}, ALL_TO_HOST),
    ]),
    "dense": (DENSE, 6, "cuda", [
        ({"tp": 2, "pp": 3, "vpp": 1}, ("mlp", "layernorm")),
        ({"tp": 1, "pp": 2, "vpp": 2}, ("full",)),
        ({"tp": 1, "pp": 1, "zero": 3}, ("mlp",)),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("model", rows(ESTIMATED, test=["offloaded", "on a CPU", "dense"]))
def test_what_is_put_together_from_parts_takes_what_the_whole_plan_takes(model):
    flat, world_size, device, cases = ESTIMATED[model]
    if device == "cpu" or model == "dense":
        flat = {**flat, "global_batch_size": 24}
    looked = search(flat, world_size, device=device)
    every = looked.layouts()
    for sizes, modules in cases:
        layout = pick(every, **sizes)
        assert looked.allowed(layout, modules), format_layout(layout, modules)
        planned = planned_gib(looked, layout, modules)
        assert looked.estimated_gib(layout, modules) == pytest.approx(planned, rel=0.1), format_layout(layout, modules)


def test_without_expert_parallelism_no_exchange_takes_time_in_predictions_either():
    looked = search({**TINY, "num_layers": 3, "moe_layer_freq": 1, "mtp_num_layers": 1}, 4)
    every = looked.layouts()
    alone, spread = (looked.costs.step_time(pick(every, tp=1, pp=1, ep=ep, zero=1), ()) for ep in (1, 2))
    assert alone.expert == 0 < spread.expert


def test_the_answer_is_that_of_planning_every_layout():
    # Fixed are TP, ZeRO and the offload: every layout of what is left is planned as a whole.
    typed = ("tensor_model_parallel_size", "use_distributed_optimizer", "optimizer_cpu_offload")
    looked = search({**GQA, "use_distributed_optimizer": True}, 2, typed)
    planned = []
    for layout in looked.layouts():
        for modules in looked.sets(layout):
            if looked.allowed(layout, modules):
                planned.append((looked.costs.step_time(layout, modules).seconds, planned_gib(looked, layout, modules)))
    assert len(planned) > 20
    peaks = sorted(gib for _, gib in planned)
    answers = set()
    for place in (0, len(peaks) // 4, len(peaks) // 2, -1):
        room = peaks[place] * 1.000001
        best = searched_again(looked, memory_gib=room / 0.9).best
        assert best.gib <= room
        assert best.time.seconds == min(seconds for seconds, gib in planned if gib <= room)
        answers.add(format_layout(best.layout, best.modules))
    assert len(answers) > 2
    none = searched_again(looked, memory_gib=peaks[0] / 0.9 * 0.98)
    assert none.best is None and none.least.gib == pytest.approx(peaks[0], rel=0.02)


TIMED = [
    (TINY, 8, {"tp": 2, "pp": 2, "vpp": 2, "etp": 1, "ep": 2, "offload": True}, ()),
    (TINY, 8, {"tp": 1, "pp": 1, "ep": 4, "zero": 3, "offload": False}, ()),
    (TINY, 8, {"tp": 2, "pp": 1, "etp": 1, "ep": 4, "zero": 1, "offload": False}, ("moe",)),
    (WINDOWS, 2, {"tp": 1, "pp": 1, "ep": 2, "zero": 1, "offload": False}, ("moe",)),
]


@pytest.mark.parametrize(("flat", "world_size", "sizes", "modules"), rows(TIMED, test=TIMED[:1]))
def test_the_time_of_a_step_is_that_of_the_plans_flops_and_traffic(flat, world_size, sizes, modules):
    looked = search(flat, world_size, gpus_per_node=2, mfu=1e-6)
    layout, on = pick(looked.layouts(), **sizes), looked.machine
    found = looked.costs.step_time(layout, modules)
    run = layout.run(looked.run, modules)
    plan = make_plan(run, world_size, on)
    micro_batches, chunks = plan["micro_batches"], plan["layout"]["VPP"]
    rate = on.mfu * on.peak_tflops * 1e12

    def sending(rank, *names):
        sent = [rank["traffic"][name] for name in names if name in rank["traffic"]]
        near = sum(one["sent"] - one["between_nodes"] for one in sent)
        return (near / on.node_bandwidth + sum(one["between_nodes"] for one in sent) / on.network_bandwidth) / 1e9

    products = [rank["flops_per_micro_batch"] * micro_batches / rate for rank in plan["ranks"]]
    slowest = plan["ranks"][products.index(max(products))]
    assert found.compute + found.recomputed == pytest.approx(max(products), rel=1e-3)
    assert (found.recomputed > 0) is bool(modules)
    assert found.expert == pytest.approx(sending(slowest, "EP"), rel=0.02)
    assert found.tensor == pytest.approx(sending(slowest, "TP", "TP x CP", "CP"), rel=0.05, abs=1e-9)
    assert found.pipeline == pytest.approx(sending(slowest, "PP"), rel=1e-6)
    passes = found.compute + found.recomputed + found.expert + found.tensor + found.pipeline
    assert found.bubble == pytest.approx((layout.pp - 1) / chunks / micro_batches * passes)
    sharing = max(sending(rank, "DP", "expert DP") for rank in plan["ranks"])
    hidden = found.compute if layout.zero >= 2 else 0
    assert found.data == pytest.approx(max(sharing - hidden, 0), rel=0.02)
    host = max(rank["memory"]["host"] for rank in plan["ranks"])
    assert found.host == pytest.approx(2 * host / on.host_bandwidth / 1e9, rel=0.01)


def test_the_faster_ones_that_it_names_are_too_large_and_the_others_slower(tmp_path, capsys):
    path = tmp_path / "fit.json"
    typed = "--preset tiny-gqa --vocab-size 1000 --bf16 --micro-batch-size 1 --tensor-model-parallel-size 1"
    assert cli.main([*typed.split(), *f"--world-size 4 --fit 0.0025 --mfu 1e-6 --json {path}".split()]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(path.read_text())
    found = plan["fit"]
    assert plan["max_memory_gib"] <= found["limit_gib"] == pytest.approx(0.0025 * 0.9)
    assert found["seconds"]["step"] == pytest.approx(sum(found["seconds"].values()) - found["seconds"]["step"])
    too_large = [other["max_memory_gib"] > found["limit_gib"] for other in found["others"]]
    assert set(too_large) == {True, False}  # both reasons are among them, or the loop would hold one of them alone
    for other in found["others"]:
        assert other["max_memory_gib"] > found["limit_gib"] or other["seconds"] >= found["seconds"]["step"]
        assert other["loses"] in out
    # What is printed is a command: the parser reads it, the rules allow it, and it is the run that was planned.
    printed = re.search(r"planned as a whole:\n\n(.*?)\n\n", out, re.DOTALL)[1]
    flags = shlex.split(printed.replace("\\\n", ""))
    assert flags == found["flags"] and flags[: len(typed.split())] == typed.split()
    assert cli.main([*flags, *f"--world-size 4 --alternatives 0 --json {path}".split()]) == 0
    assert json.loads(path.read_text())["max_memory_gib"] == plan["max_memory_gib"]
    assert "layouts; estimating the time of each" in err


def test_where_nothing_fits_the_least_is_planned_and_the_exit_status_says_so(tmp_path, capsys):
    path = tmp_path / "fit.json"
    kept = "--expert-model-parallel-size 2, --tensor-model-parallel-size 1"
    flags = f"--preset tiny-gqa --vocab-size 1000 --world-size 2 --fit 0.0001 {kept.replace(',', '')} --json {path}"
    assert cli.main(flags.split()) == 1
    out, plan = capsys.readouterr().out, json.loads(path.read_text())
    for said in ("NOTHING FITS", "DOES NOT FIT", f"kept as given, and not searched: {kept}"):
        assert said in out
    assert not plan["fit"]["fits"] and plan["layout"]["EP"] == 2
    assert all(one["max_memory_gib"] >= plan["max_memory_gib"] for one in plan["fit"]["others"])


def test_no_more_is_offloaded_than_a_machine_holds(capsys):
    flat = {**GQA, "num_layers": 2, "optimizer_cpu_offload": True}
    typed = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "recompute_granularity")
    looked = search(flat, 2, typed)
    best = looked.search(0).best
    run = best.layout.run(looked.run, best.modules)
    host = max(rank["memory"]["host"] for rank in make_plan(run, 2, looked.machine)["ranks"])
    for share, fits in ((1.01, True), (0.99, False)):
        found = searched_again(looked, host_memory_gib=2 * host / 2**30 / 0.9 * share)
        assert (found.best is not None and found.best.layout.changes == best.layout.changes) is fits
    flags = "--preset tiny-gqa --vocab-size 1000 --world-size 2 --fit 1 --optimizer-cpu-offload --host-memory-gib 1e-6"
    assert cli.main(flags.split()) == 2
    assert "--host-memory-gib 1e-06" in capsys.readouterr().err


def test_what_the_user_sets_is_kept_and_what_changes_numbers_is_not_searched():
    typed = ("pipeline_model_parallel_size", "recompute_granularity", "recompute_modules")
    flat = {**TINY, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    flat |= layouts.recomputing(("layernorm",))
    looked = search(flat, 8, typed)
    base = looked.run
    every = looked.layouts()
    assert {(layout.pp, looked.sets(layout)[0], len(looked.sets(layout))) for layout in every} == {(2, None, 1)}
    kept = set("micro_batch_size global_batch_size context_parallel_size recompute_modules grad_reduce_in_bf16".split())
    for layout in every:
        assert not kept & {word[2:].replace("-", "_") for word in layouts.spelled(base, layout.run(base, None))}
    changed = {name for layout in every for name in layout.changes}
    quantized = {"zero_quantized_weights", "zero_quantized_gradients", "use_precision_aware_optimizer", "fp8_format"}
    assert not changed & (kept | quantized)


def test_a_presets_zero_stage_is_searched_and_a_typed_one_is_not():
    run = compat.parse("--preset qwen3-30b-a3b --global-batch-size 64".split())
    assert layouts.fixed_fields(run) == set()
    every = list(layouts.layouts(run, 8, Machine(), layouts.layer_shardings(run, 8, Machine()), 1.0))
    assert {layout.zero for layout in every if layout.pp == 1} == {1, 2, 3}
    typed = compat.parse("--preset qwen3-30b-a3b --global-batch-size 64 --use-distributed-optimizer".split())
    every = list(layouts.layouts(typed, 8, Machine(), layouts.layer_shardings(typed, 8, Machine()), 1.0))
    assert {layout.zero for layout in every} == {1}
    on_cpu = layouts.layouts(run, 8, Machine(device="cpu"), layouts.layer_shardings(run, 8, Machine()), 1.0)
    assert {layout.offload for layout in on_cpu} == {False}


def test_layers_are_spread_so_that_no_stage_is_slower_than_it_has_to_be():
    assert layouts.balanced(61, 16, 1.4) == [3, *[4] * 14, 2]
    assert layouts.balanced(61, 32, 1.4) == [1, *[2] * 30, 0]
    assert layouts.balanced(48, 4, 0.1) == [12, 12, 12, 12]
    assert layouts.balanced(7, 3, 2.0) == [3, 3, 1]
    assert layouts.balanced(5, 1, 3.0) == [5]


@pytest.mark.parametrize(("stages", "predictions"), [(1, None), (3, 1), (6, None), (4, 1)])
def test_every_split_is_typed_as_a_layout_that_the_rules_read_as_it_is_meant(stages, predictions):
    flat = {**TINY, "num_layers": 11, "moe_layer_freq": 1, "mtp_num_layers": predictions, "global_batch_size": 48}
    run = replace(build(flat), pipeline_model_parallel_size=1)
    machine = Machine()
    for layout in layouts.layouts(run, stages, machine, layouts.layer_shardings(run, stages, machine), 1.3):
        if layout.pp != stages or layout.sharding.tp > 1:
            continue
        chosen = layout.run(run, ())
        assert legal(chosen, stages)
        assert sum(len(stage.layers) for stage in layout.stages) == 11
        base = f"--preset tiny --num-layers 11 --moe-layer-freq 1 --mtp-num-layers {predictions or 'none'}"
        typed = compat.parse([*base.split(), *layouts.spelled(run, chosen)])
        assert typed.derived.pipeline_stages == layout.stages


def test_sets_of_modules_hold_nothing_twice():
    found = list(layouts.module_sets(build(TINY), ["layernorm", "moe", "moe_act", "shared_experts"]))
    assert found[0] == () and ("moe", "moe_act") not in found and ("layernorm", "moe_act", "shared_experts") in found
    assert len(found) == len(set(found)) == 2 * (4 + 1) + 1


def test_more_and_more_is_offloaded_of_what_recomputation_keeps():
    run = build(TINY)
    rungs = layouts.offloadable(run, Machine())
    assert set(itertools.chain(*rungs)) == set(ALL_TO_HOST)
    found = list(layouts.module_sets(run, ["layernorm", "moe", "mla_up_proj"], rungs))
    assert set(found[len(rungs)]) == set(ALL_TO_HOST)
    assert len(found) == len(set(found))
    for recomputed, lost in {"layernorm": "qkv_linear", "moe": "expert_fc1", "mla_up_proj": "core_attn"}.items():
        of_these = [modules for modules in found if recomputed in modules]
        assert any(layouts.TO_HOST + "attn_norm" in modules for modules in of_these)
        assert not any(layouts.TO_HOST + lost in modules for modules in of_these)
    assert layouts.offloadable(run, Machine(device="cpu")) == []
    typed = compat.parse("--preset tiny --fine-grained-activation-offloading --offload-modules core_attn".split())
    assert layouts.offloadable(typed, Machine()) == []
    dense = layouts.offloadable(build(DENSE), Machine())
    assert set(itertools.chain(*dense)) == set(ALL_TO_HOST) - set(to_host("expert_fc1", "moe_act"))


def test_activations_are_offloaded_where_the_link_to_the_host_is_fast(capsys):
    flags = "--preset tiny-gqa --vocab-size 1000 --seq-length 512 --max-position-embeddings 512 --bf16 --world-size 1"
    flags += " --micro-batch-size 8 --global-batch-size 8 --min-offloaded-tensor-size 1 --mfu 1e-6"
    flags += " --fit 0.05 --alternatives 0"
    for bandwidth, offloads in (("1e6", True), ("1e-6", False)):
        assert cli.main([*flags.split(), "--host-bandwidth", bandwidth]) == 0
        typed = capsys.readouterr().out.partition("\n\n")[2].partition("\n\n")[0]
        assert ("--fine-grained-activation-offloading" in typed) == offloads
        assert offloads or "--recompute-granularity" in typed
