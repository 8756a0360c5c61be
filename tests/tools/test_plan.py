"""A layout on paper: the model's own counts, on as many ranks as one likes, and what it says of them."""

import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_moe.config.command_line import groups, parts
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.latent_exchange import exchange_cost
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build, replace
from megatron_moe_tools import compat
from megatron_moe_tools.plan import tracing
from megatron_moe_tools.plan.latent_exchange import compared_exchanges
from megatron_moe_tools.plan.layouts import Machine, legal, nearby_layouts, require_legal
from megatron_moe_tools.plan.plan import ROUNDS, make_plan, rank_traffic, schedule
from megatron_moe_tools.plan.tracing import share_of_tokens, trace_ranks
from tests.helpers.rows import rows

TINY = {**PRESETS["tiny"], "vocab_size": 1000, "bf16": True, "use_distributed_optimizer": True}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FURTHER_ALONE = {
    "num_layers": 4, "pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Ett|tt|mm|L",
    "mtp_num_layers": 2,
}  # fmt: skip
LOSS_ALONE = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|ttt|t|L"}
TIED = {"untie_embeddings_and_output_weights": False}


def traced(world_size, **changes):
    run = build({**TINY, **changes})
    vocabulary = run.derived.padded_vocab_size(1000)
    return run, vocabulary, trace_ranks(run, world_size, vocabulary, device="cuda", imbalance=1.0)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("world_size", "changes", "tables"),
    [
        (8, {**TP2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "mtp_num_layers": 1}, None),
        (8, {**TP2, **TIED, "pipeline_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, None),
        (4, {**TIED, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, 1),
        (4, {**FURTHER_ALONE, **TIED}, 2),
    ],
)
def test_parameters_of_all_ranks_without_copies_are_the_models(world_size, changes, tables):
    run, vocabulary, traces = traced(world_size, **changes)
    model = {name: value for name, value in changes.items() if "parallel" not in name and "pipeline" not in name}
    _, _, (whole,) = traced(1, **model)
    assert whole.dense + whole.expert == run.derived.parameter_count(vocabulary)
    copies = run.parallel.expert_model_parallel_size * run.derived.expert_tensor_parallel_size
    assert sum(trace.expert for trace in traces) * copies == whole.expert
    dense = sum(trace.dense for trace in traces)
    assert tables is None or dense == whole.dense + tables * vocabulary * run.model.hidden_size
    assert [rank for trace in traces for rank in trace.ranks] == list(range(world_size))


def test_frozen_parameters_have_weights_and_neither_gradients_nor_moments():
    pp2 = {"pipeline_model_parallel_size": 2}
    run, vocabulary, every = traced(2, **pp2)
    _, _, some = traced(2, **pp2, freeze=("decoder.layers.3.mlp.experts", "embedding"))
    assert [(trace.weights, trace.dense) for trace in some] == [(trace.weights, trace.dense) for trace in every]
    used = [[sum(buffer.used for buffer in trace.buffers) for trace in traces] for traces in (every, some)]
    assert used[0][0] - used[1][0] == vocabulary * run.model.hidden_size
    assert used[0][1] - used[1][1] == every[1].expert // 2  # its two layers both have experts


VIRTUAL_STAGES = {
    "num_layers": 8, "moe_layer_freq": "[0]+[1]*7", "expert_model_parallel_size": 2,
    "num_layers_per_virtual_pipeline_stage": 1,
}  # fmt: skip
UNEVEN = {**TP2, "num_layers": 5, "context_parallel_size": 2, "decoder_first_pipeline_num_layers": 2}
KEPT_WIDE = {"num_layers": 4, "moe_layer_freq": 1, "keep_fp32": ("decoder.layers.2",)}
LETTERS = {"num_layers": 5, "moe_layer_freq": 1, "pipeline_model_parallel_layout": "Et|t|t|t||t||L"}


@pytest.mark.parametrize(
    ("world_size", "changes"),
    rows(
        [(16, {**UNEVEN, "moe_layer_freq": 1}), (8, VIRTUAL_STAGES), (4, KEPT_WIDE), (8, LETTERS)],
        test=[(4, KEPT_WIDE), (8, LETTERS)],
    ),
)
def test_a_stage_taken_from_one_like_it_is_the_stage_that_would_be_built(world_size, changes):
    run, vocabulary, together = traced(world_size, pipeline_model_parallel_size=4, **changes)
    for stage, trace in enumerate(together):
        (alone,) = trace_ranks(run, world_size, vocabulary, device="cuda", imbalance=1.0, stages=[stage])
        assert trace == alone


def test_a_traced_stage_is_not_traced_again(monkeypatch):
    run, vocabulary, traces = traced(8, **TP2, num_layers=4, moe_layer_freq=1, pipeline_model_parallel_size=4)
    known = {}
    options = {"device": "cuda", "imbalance": 1.0, "known": known}
    assert trace_ranks(run, 8, vocabulary, **options) == traces
    assert len(known) == 3  # first, last, and the two between
    monkeypatch.setattr(tracing, "build_model", None)
    assert trace_ranks(run, 8, vocabulary, **options) == traces


def test_stages_by_letters_have_the_work_that_they_say_and_hidden_states_of_every_depth_travel():
    run, _, traces = traced(4, **FURTHER_ALONE)
    sent = [rank_traffic(run, trace, 4, 8)["PP"].sent for trace in traces]
    one = traces[0].boundary * run.derived.num_microbatches(4)
    # forward, and gradients back; m sends the states of the model and of two depths
    assert sent == [one, 2 * one, (3 + 1) * one, 3 * one]
    _, _, traces = traced(2, num_layers=4, moe_layer_freq=1, **LOSS_ALONE)
    assert [trace.layers for trace in traces] == [(3,), (0, 1, 2)]
    assert [[chunk.flops > 0 for chunk in trace.chunks] for trace in traces] == [[False, True], [True, True]]
    whole = traced(1, num_layers=4, moe_layer_freq=1)[2][0]
    assert sum(chunk.flops for trace in traces for chunk in trace.chunks) == whole.chunks[0].flops


def test_deepseek_v3_on_2048_ranks():
    stages = {"pipeline_model_parallel_size": 16, "decoder_last_pipeline_num_layers": 1}
    run = build({**PRESETS["deepseek-v3"], **stages, "expert_model_parallel_size": 64, "global_batch_size": 15360})
    plan = make_plan(run, 2048, Machine())
    assert plan["total_params"] == 671_026_404_352
    assert round(plan["active_params"] / 1e9, 2) == 37.55
    assert [rank["ranks"] for rank in plan["ranks"]] == [[128 * i, 128 * i + 127] for i in range(16)]
    middle = plan["ranks"][5]
    # Four layers of 256 experts, over 64 ranks; three matrices of 7168 x 2048 each.
    assert middle["expert_params"] == 4 * 4 * 3 * 7168 * 2048
    assert middle["memory"]["in_flight"] == 16 - 5
    # Moments and master of a dense weight are shared by 128 ranks, of an expert's by 2 (2,048 / (64 x 16)).
    wanted = 12 * (middle["dense_params"] / 128 + middle["expert_params"] / 2)
    assert middle["memory"]["optimizer"] == pytest.approx(wanted, rel=1e-4)
    assert plan["bubble_share"] == 15 / (120 + 15)
    assert set(middle["traffic"]) == {"DP", "EP", "PP", "expert DP"}


def test_more_rows_than_even_need_more_memory():
    run = build({**TINY, "expert_model_parallel_size": 4})
    even, skewed = (make_plan(run, 4, Machine(imbalance=x))["ranks"][0]["memory"] for x in (1.0, 3.0))
    assert skewed["dispatch"] > even["dispatch"]
    assert skewed["activations"] > even["activations"]
    assert skewed["weights"] == even["weights"]


def test_traffic_of_one_all_to_all_and_of_a_ring_is_that_computed_by_hand():
    run = build({**TINY, "expert_model_parallel_size": 2, "global_batch_size": 16})
    plan = make_plan(run, 4, Machine(gpus_per_node=2))
    rank = plan["ranks"][0]
    received = 2 * 64 * run.moe.moe_router_topk  # B x S x K
    sent_of_rows = received * 64 * 2 / 2  # H in bf16; one of two ranks is oneself
    weights, counts = received * 16 * 2 / 2, 2 * 4 * 8 / 2
    # Three MoE layers, two micro-batches, rows there and back, forward and backward; counts; and once each way 16 more
    # elements a row, for its weight.
    assert rank["traffic"]["EP"]["sent"] == 3 * 2 * (4 * sent_of_rows + 2 * weights + counts)
    assert rank["traffic"]["EP"]["between_nodes"] == 0
    dense = sum(b.numel for b in trace_ranks(run, 4, 1024, device="cpu", imbalance=1.0)[0].buffers if not b.expert)
    assert rank["traffic"]["DP"]["sent"] == dense * (4 + 2) * 3 / 4
    assert rank["traffic"]["DP"]["between_nodes"] == rank["traffic"]["DP"]["sent"] / 2
    assert rank["traffic"]["expert DP"]["between_nodes"] == rank["traffic"]["expert DP"]["sent"]


def test_tokens_that_go_once_to_a_node_are_counted_by_the_runs_own_choice():
    free = {"moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_topk": 3}
    run = build({**TINY, **free, "expert_model_parallel_size": 4, "global_batch_size": 16})
    share = share_of_tokens(run, 2)
    assert share == pytest.approx(1 - math.comb(4, 3) / math.comb(8, 3), rel=0.01)
    plain, by_node = (
        make_plan(replace(run, moe_alltoall_by_node=by_node), 4, Machine(gpus_per_node=2))["ranks"][0]["traffic"]["EP"]
        for by_node in (False, True)
    )
    tokens, row, packed = 2 * 64, 64 * 2, 64 * 2 + 32  # B x S; H in bf16, and with a weight behind it
    choices, once = tokens * 3 / 2, round(tokens * share)  # of the experts of one other node, and sent there
    # Three MoE layers, two micro-batches: tokens forward and backward, once with experts and weights; results; counts.
    assert by_node["between_nodes"] == 6 * (once * (2 * row + 3 * 8) + choices * (row + packed) + (4 + 1) * 8)
    assert plain["between_nodes"] == 6 * (2 * choices * (row + packed) + 4 * 8)
    preset = build({**PRESETS["deepseek-v3"], "moe_router_group_topk": 2})
    assert share_of_tokens(preset, 8) == 2 / 8
    with pytest.raises(ConfigError, match="--moe-alltoall-by-node"):
        make_plan(replace(run, moe_alltoall_by_node=True), 4, Machine())


@pytest.mark.parametrize("tp", [1, 2])
def test_latents_and_what_they_expand_to_are_priced_and_expanding_is_no_work_of_the_model(tp):
    sizes = {"context_parallel_size": 4, "tensor_model_parallel_size": tp, "sequence_parallel": tp > 1}
    run, machine = build({**TINY, **sizes, "global_batch_size": 16}), Machine(gpus_per_node=2 * tp)
    cost, found = exchange_cost(run, "bfloat16"), compared_exchanges(run, 4 * tp, machine)
    m, micro_batches = run.model, run.derived.num_microbatches(4 * tp)
    others = micro_batches * m.num_layers * run.training.micro_batch_size * m.seq_length * 3 / 4  # tokens x layers
    latent, expanded = found["ways"]["latent"], found["ways"]["expanded"]
    assert (found["chosen"], latent["numbers"], expanded["numbers"]) == ("latent", cost.latent, cost.expanded)
    # Each TP rank gets its part of the latents over CP, and those parts of the others' tokens that they have.
    assert latent["sent"] == pytest.approx(others * cost.latent * cost.bytes_per_number, rel=0.01)
    assert expanded["sent"] == pytest.approx(others * cost.expanded * cost.bytes_per_number, rel=0.01)
    assert latent["between_nodes"] == pytest.approx(latent["sent"] / 2 / tp, rel=0.01)
    assert (latent["flops"], expanded["flops"]) == (others * cost.flops, 0)
    far, near = latent["between_nodes"], latent["sent"] - latent["between_nodes"]
    sending = near / machine.node_bandwidth / 1e9 + far / machine.network_bandwidth / 1e9
    assert latent["seconds"] == sending + latent["flops"] / (machine.mfu * machine.peak_tflops * 1e12)
    latents, plain = (make_plan(replace(run, mla_cp_exchange=way), 4 * tp, machine) for way in ("latent", "expanded"))
    assert latents["model_flops_per_token"] == plain["model_flops_per_token"] == plain["computed_flops_per_token"]
    assert latents["computed_flops_per_token"] > plain["computed_flops_per_token"]
    assert compared_exchanges(build(TINY), 1, machine) is None


def test_the_schedule_is_the_engines():
    words = ["".join("BF"[forward] + str(chunk) for forward, chunk in schedule(1, 4, stage, 4)) for stage in (0, 3)]
    assert words == ["F0F0F0F0B0B0B0B0", "F0B0F0B0F0B0F0B0"]
    interleaved = "".join("BF"[forward] + str(chunk) for forward, chunk in schedule(2, 2, 1, 2))
    assert interleaved == "F0F0F1B1F1B1B0B0"
    assert "".join("BF"[forward] for forward, _ in schedule(1, 1, 0, 3, True)) == "FFBFBB"


@pytest.mark.engine
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [0, 2])
def test_passes_before_the_first_backward_pass_are_the_engines(stage, overlap):
    group = SimpleNamespace(size=lambda: 3, rank=lambda: stage)
    peers = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=2)
    _, _, warm_up, _ = schedules.get_pp_rank_microbatches(
        6, 2, 3, overlap_moe_expert_parallel_comm=overlap, p2p_communicator=peers
    )
    assert [forward for forward, _ in schedule(2, 3, stage, 6, overlap)].index(False) == warm_up + 1


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_after_a_plans_rounds_nothing_new_waits(chunks, ahead):
    def waiting(stage: int, rounds: int) -> set[tuple[int, ...]]:
        counts, found = [0] * chunks, set()
        for is_forward, chunk in schedule(chunks, 4, stage, 4 * rounds, ahead):
            counts[chunk] += 1 if is_forward else -1
            found.add(tuple(counts))
        return found

    for stage in range(4):
        assert waiting(stage, ROUNDS) == waiting(stage, 9)
    assert waiting(0, 1) != waiting(0, 9) or (chunks, ahead) == (1, False)


def test_planning_leaves_no_trace_in_the_process(monkeypatch):
    state = torch.get_rng_state()
    scale = torch.ones(1)  # as a training step in this process has left it
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", scale)
    traced(8, expert_model_parallel_size=8, moe_aux_loss_coeff=(0.1,), moe_router_load_balancing_type=("aux_loss",))
    assert MoEAuxLossAutoScaler.main_loss_backward_scale is scale
    assert not torch.distributed.is_initialized()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.empty(1).device.type == "cpu"


def test_layouts_nearby_are_legal_and_one_change_away():
    run = build({**TINY, "expert_model_parallel_size": 2})
    near = [other for other in nearby_layouts(run) if legal(other, 4)]
    assert legal(run, 4) and near and run not in near


@pytest.mark.parametrize(
    ("refused", "among"),
    [
        ("--expert-model-parallel-size 3", "--expert-model-parallel-size 1"),
        ("--tensor-model-parallel-size 2", "--sequence-parallel"),
        ("--tensor-model-parallel-size 3 --sequence-parallel", "--tensor-model-parallel-size 1 --no-sequence-parallel"),
        (
            "--pipeline-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads",
            "--pipeline-model-parallel-size 1",
        ),
        (
            "--use-distributed-optimizer --data-parallel-sharding-strategy no_shard",
            "--data-parallel-sharding-strategy optim",
        ),
    ],
)
def test_each_layout_that_a_refusal_names_is_allowed_when_its_flags_are_typed_instead(refused, among):
    argv = ["--preset", "tiny", "--vocab-size", "1000", *refused.split()]
    with pytest.raises(ConfigError) as error:
        require_legal(compat.parse(argv), 4)
    named = str(error.value).partition("flags that change:\n  ")[2].split("\n  ")
    assert among in named
    fields = compat.parser().fields_by_flag()
    for words in named:
        changed = [parts(group)[0] for group in groups(words.split())]
        again = words.split()
        for group in groups(argv):
            if fields.get(group[0]) not in map(fields.get, changed) or group[0] == "--preset":
                again += group
        assert legal(compat.parse(again), 4), words


def test_what_is_recomputed_is_not_kept():
    kept = {}
    for modules in (None, ("mla_up_proj",), ("moe_act",), ("layernorm",), ("moe",), ("core_attn",)):
        granularity = None if modules is None else "selective"
        _, _, (trace,) = traced(1, recompute_granularity=granularity, recompute_modules=modules)
        kept[modules] = trace.chunks[0].kept
    assert all(size < kept[None] for modules, size in kept.items() if modules is not None), kept
    for modules in ("core_attn",), ("mla_up_proj",), ("core_attn", "mla_up_proj"):  # latents are less than it
        sizes = {"context_parallel_size": 4, "recompute_granularity": "selective", "recompute_modules": modules}
        latent, expanded = (traced(4, **sizes, mla_cp_exchange=way)[2][0] for way in ("latent", "expanded"))
        assert latent.chunks[0].kept <= expanded.chunks[0].kept
