"""Every layout trains the same model: two steps under each, in fp32 or bf16, held against one process.

The comparison is the doctor's (megatron_moe_tools/doctor): loss and gradient norm to 1e-5 of themselves, each gradient
to 1e-4 of its norm, initial weights, token counts and expert_bias bit for bit, copies on several ranks bit for bit.

A choice of experts that two layouts may make differently, because rounding decides it, would say nothing about either.
So each model's samples are chosen such that in the oracle's steps no choice is decided by less than CLEAR; the
test asserts that they still are. Scores of two layouts differ by some 1e-6 after ten steps.

The first step shows the weights that a layout starts with, the second what its optimizer and expert_bias made of them,
and the weights after it what the optimizer kept from the first. Further steps repeat the second.
"""

import os
import traceback
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_moe.config import rules
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe_tools.doctor.compare import FP32, compare, describe, tolerances_of
from megatron_moe_tools.doctor.measure import AssembledModel, Request, assemble, measure
from megatron_moe_tools.launch.local_ranks import join_group

STEPS, CLEAR = 2, 2e-5
PADDED_VOCABULARY = 256

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 250,
    "init_method_std": 0.1,
    "num_experts": 8,
    "moe_ffn_hidden_size": 16,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 100,
    "eval_iters": 0,
    "mock_data": True,
    "lr": 1e-3,
    # see the doctor's small_copy.py: with 1e-8 weights whose gradient is rounding alone move by a whole learning rate
    "adam_eps": 1e-6,
    "lr_decay_style": "constant",
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
MLA = {**PRESETS["tiny"], **SMALL, **LATENT, "moe_shared_expert_intermediate_size": 16}
GQA = {
    **SMALL,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
    "moe_layer_freq": 2,
}
AUXILIARY = ("aux_loss", "seq_aux_loss", "global_aux_loss")
Z_LOSS = {"moe_z_loss_coeff": 0.01}


def balanced(*losses: str) -> dict[str, Any]:
    return {"moe_router_load_balancing_type": losses, "moe_aux_loss_coeff": (0.05,) * len(losses)}


TIED = {"untie_embeddings_and_output_weights": False, "qk_layernorm": False, "moe_layer_freq": "[1,0,1,1]"}
# Norms over all heads together, and behind attention and MLP, as in OLMo 2
OLMO = {"qk_layernorm": True, "qk_layernorm_across_heads": True, "reordered_norm": True}
DENSE = {"num_experts": None, "moe_ffn_hidden_size": None, "moe_layer_freq": 1, "add_bias_linear": True}
# Factors of Granite, the norms of Hunyuan, the router and the pairs of ERNIE
FACTORS = {
    "qk_layernorm": True,
    "qk_layernorm_after_rotation": True,
    "rotary_interleaved": True,
    "softmax_scale": 0.4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "moe_router_enable_expert_bias": True,
}
# A window shorter than a rank's chunks, layers with and without it, halves that the clamp cuts off.
GPT_OSS = {
    **GQA,
    **{"moe_layer_freq": 1, "add_bias_linear": True, "softmax_type": "learnable", "window_size": "3,0"},
    **{"window_attn_skip_freq": "[1,0,1,1]", "quick_geglu": True, "glu_linear_offset": 1.0},
    "activation_func_clamp_value": 0.4,
}
# Name -> (flags of the model, number of the samples).
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "deepseek": (MLA, 3),
    "aux_loss": ({**GQA, **balanced("aux_loss")}, 0),
    "every loss": ({**MLA, **balanced(*AUXILIARY), **Z_LOSS}, 0),
    "per token": ({**MLA, **balanced(*AUXILIARY[1:]), **Z_LOSS, "calculate_per_token_loss": True}, 0),
    "further tokens": ({**MLA, **Z_LOSS, "mtp_num_layers": 1}, 1),
    "capacity": ({**MLA, "moe_expert_capacity_factor": 1.0, "moe_router_bias_update_rate": 1e-2}, 1),
    "tied": ({**MLA, **TIED, "moe_shared_expert_gate": True}, 0),
    "dense": ({**GQA, **DENSE}, 0),
    "factors": ({**GQA, **FACTORS, "mtp_num_layers": 1}, 0),
    "olmo": ({**GQA, **OLMO, "norm_epsilon": 1e-3}, 1),
    "gpt-oss": (GPT_OSS, 0),
}

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ETP1, ETP2 = {"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}
PP2, PP4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
VPP = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}
FIRST1, LAST1 = {"decoder_first_pipeline_num_layers": 1}, {"decoder_last_pipeline_num_layers": 1}
LOSS_ALONE = {**PP2, "pipeline_model_parallel_layout": "E|ttt|t|L"}
UNEVEN = {**PP4, "pipeline_model_parallel_layout": "Ett|t|t|L"}
FURTHER_ALONE = {**PP4, "pipeline_model_parallel_layout": "Ett|tt|m|L"}
FURTHER_AT_END = {**PP2, "pipeline_model_parallel_layout": "Et|tt|t|mL"}
TIED_ALONE = {**PP2, "pipeline_model_parallel_layout": "Etttt|L"}
CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
EP2, EP4 = {"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 4}
SHARDED = {"use_distributed_optimizer": True}
ZERO2 = {"data_parallel_sharding_strategy": "optim_grads"}
ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
OVERLAP = {"overlap_grad_reduce": True}
# A bucket for each weight: every module has to wait for its own, and one that does not is found (the engine asserts).
GATHER = {**SHARDED, **OVERLAP, "overlap_param_gather": True, "ddp_bucket_size": 1}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
ALL_AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("moe_act", "core_attn", "layernorm")}
PARTS_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("moe_act", "layernorm", "mla_up_proj")}
SINGLES = {"micro_batch_size": 1}
FUSED = {"cross_entropy_loss_fusion": True}
LOOP = {"moe_expert_backend": "loop"}
EXPANDED = {"mla_cp_exchange": "expanded"}  # in place of the latents that CP ranks exchange

# (model, ranks, flags of the layout, one by one)
Row = tuple[str, int, dict[str, dict[str, Any]]]
# Every pair of two axes is in a row, and nearly every one of an axis and a model, or a stage of ZeRO.
PAIRS: list[Row] = [
    ("per token", 1, {"singles": SINGLES, "loop": LOOP, "all recomputed": ALL_AGAIN}),
    ("deepseek", 2, {"ep2": EP2, "allgather": ALLGATHER, "zero2": ZERO2}),
    ("deepseek", 4, {"cp2": CP2, "vpp": VPP, "ep2": EP2, "gather": GATHER, "recomputed": PARTS_AGAIN}),
    ("deepseek", 4, {"tp2": TP2, "pp2": PP2, "ep2": EP2, "etp1": ETP1, "fused": FUSED}),
    ("aux_loss", 4, {"cp2": CP2, "dp2": {}, "ep2": EP2, "sharded": SHARDED}),
    ("aux_loss", 4, {"tp2": TP2, "vpp": VPP, "allgather": ALLGATHER}),
    ("every loss", 4, {"tp2": TP2, "cp2": CP2, "ep2": EP2, "etp1": ETP1, "recomputed": PARTS_AGAIN}),
    ("every loss", 4, {"pp2": PP2, "dp2": {}, "overlap": OVERLAP, "all recomputed": ALL_AGAIN}),
    ("per token", 4, {"tp2": TP2, "dp2": {}, "ep2": EP2, "etp2": ETP2, "singles": SINGLES, "sharded": SHARDED}),
    ("per token", 4, {"cp2": CP2, "pp2": PP2, "ep2": EP2, "loop": LOOP, "expanded": EXPANDED}),
    ("further tokens", 4, {"cp2": CP2, "dp2": {}, "ep2": EP2, "zero3": ZERO3, "all recomputed": ALL_AGAIN}),
    ("further tokens", 4, {"tp2": TP2, "further at end": FURTHER_AT_END}),
    ("further tokens", 4, {"further alone": FURTHER_ALONE}),
    ("capacity", 2, {"ep2": EP2, "allgather": ALLGATHER}),
    ("capacity", 4, {"tp2": TP2, "cp2": CP2, "etp1": ETP1, "expanded": EXPANDED}),
    ("tied", 4, {"tp2": TP2, "cp2": CP2, "ep2": EP2, "etp1": ETP1, "zero3": ZERO3}),
    ("tied", 4, {"tied alone": TIED_ALONE, "dp2": {}, "sharded": SHARDED}),
    ("dense", 4, {"tp2": {"tensor_model_parallel_size": 2}, "cp2": CP2, "gather": GATHER}),
    ("dense", 4, {"pp2": PP2, "dp2": {}, "sharded": SHARDED}),
    ("factors", 4, {"tp2": TP2, "further at end": FURTHER_AT_END, "gather": GATHER, "fused": FUSED}),
    ("factors", 4, {"cp2": CP2, "ep2": EP2, "zero3": ZERO3, "recomputed": CORE_AGAIN}),
    ("olmo", 4, {"tp2": TP2, "cp2": CP2, "ep2": EP2, "etp1": ETP1, "zero3": ZERO3, "all recomputed": ALL_AGAIN}),
    ("gpt-oss", 4, {"tp2": TP2, "cp2": CP2, "ep2": EP2, "etp2": ETP2, "core recomputed": CORE_AGAIN}),
    ("gpt-oss", 4, {"cp2": CP2, "vpp": VPP, "ep2": EP2, "allgather": ALLGATHER}),
]
# One part alone, which says more of what is wrong, other stages of a pipeline, and more ranks.
FURTHER: list[Row] = [
    *(("deepseek", 2, {name: part}) for name, part in (("tp2", TP2), ("pp2", PP2), ("cp2", CP2), ("ep2", EP2))),
    ("deepseek", 2, {"dp2": {}, "gather": GATHER}),
    ("deepseek", 2, {"loss alone": LOSS_ALONE, "sharded": SHARDED}),
    ("further tokens", 2, {"pp2": PP2, "first1": FIRST1}),
    ("further tokens", 2, {"tp2": TP2}),
    ("capacity", 2, {"tp2": TP2}),
    ("tied", 2, {"pp2": PP2, "last1": LAST1}),
    ("tied", 2, {"vpp": VPP, "sharded": SHARDED}),
    ("olmo", 2, {"tp2": TP2}),
    ("olmo", 4, {"tp2": TP2, "vpp": VPP, "gather": GATHER, "fused": FUSED}),
    ("olmo", 4, {"tp2": TP2, "dp2": {}, "zero2": ZERO2}),
    ("deepseek", 4, {"tp2": TP2, "ep4": EP4, "etp1": ETP1}),
    ("deepseek", 4, {"cp4": CP4, "ep2": EP2}),
    ("deepseek", 4, {"uneven": UNEVEN}),
    ("every loss", 4, {"tp2": TP2, "ep2": EP2, "etp1": ETP1, "zero3": ZERO3}),
    ("per token", 4, {"ep4": EP4, "singles": SINGLES, "sharded": SHARDED}),
    ("gpt-oss", 4, {"cp2": CP2, "dp2": {}, "ep2": EP2, "zero3": ZERO3, "all recomputed": ALL_AGAIN}),
    ("gpt-oss", 2, {"ep2": EP2, "zero2": ZERO2, "loop": LOOP}),
    ("gpt-oss", 2, {"tp2": TP2, "fused": FUSED}),
    ("gpt-oss", 4, {"cp4": CP4, "sharded": SHARDED}),
    ("gpt-oss", 4, {"tp2": TP2, "dp2": {}, "ep4": EP4, "etp1": ETP1, "gather": GATHER}),
    ("deepseek", 8, {"tp2": TP2, "pp2": PP2, "ep2": EP2, "etp1": ETP1, "sharded": SHARDED}),
    ("deepseek", 8, {"cp4": CP4, "vpp": VPP, "ep4": EP4}),
    ("every loss", 8, {"tp2": TP2, "cp2": CP2, "ep2": EP2, "etp2": ETP2}),
    ("further tokens", 8, {"pp4": PP4, "dp2": {}, "ep2": EP2}),
]

# A model with few choices, so that samples can be found where bf16 decides none of them.
HALF = {**MLA, "bf16": True, "seq_length": 8, "moe_layer_freq": "[0,1,0,1]", "moe_router_num_groups": None}
HALF = {**HALF, "moe_router_group_topk": None, "moe_router_group_score": "top2"}
HALF_SAMPLES = 20
HALF_PAIRS: list[Row] = [
    ("bf16", 4, {"tp2": TP2, "pp2": PP2, "ep2": EP2, "etp1": ETP1}),
    ("bf16", 2, {"ep2": EP2, "gather": GATHER}),
]
HALF_FURTHER: list[Row] = [
    ("bf16", 2, {"tp2": TP2}),
    ("bf16", 2, {"pp2": PP2}),
    ("bf16", 4, {"cp2": CP2, "ep2": EP2, "sharded": SHARDED}),
]


def flags_of(layout: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in layout.values() for name, value in part.items()}


def run_of(model: dict[str, Any], layout: dict[str, dict[str, Any]], ranks: int) -> Run:
    run = replace(Run(), **{**model, **flags_of(layout)})
    rules.check(run, ranks)
    return run


def request_of(model: str, layout: dict[str, dict[str, Any]], ranks: int) -> Request:
    flags, samples = (HALF, HALF_SAMPLES) if model == "bf16" else MODELS[model]
    return Request(run_of(flags, layout, ranks), PADDED_VOCABULARY, STEPS, (1, STEPS), samples)


def name_of(model: str, ranks: int, layout: dict[str, Any]) -> str:
    return f"{model.replace(' ', '_')}-{ranks}-{'-'.join(layout).replace(' ', '_')}"


class Job(NamedTuple):
    """One layout of one model: `request` on `ranks` ranks; rank r's record goes to `folder`/r.pt."""

    request: Request
    ranks: int
    folder: str


def measure_all(jobs: list[Job], limit: float) -> None:
    """Measure every job. Jobs of fewer ranks than there are run in parallel, on disjoint sets of ranks.

    What fails is written in its record's place, and the next job begins: a job that lost a rank ends by itself, since
    its groups' connections close.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    for size in sorted({job.ranks for job in jobs}):
        team, seat = divmod(rank, size)
        for job in [job for job in jobs if job.ranks == size][team :: world // size]:
            try:
                join_group(os.path.join(job.folder, "store"), seat, size, limit)
                record = measure(job.request)
            except Exception:
                record = {"error": traceback.format_exc()}
            torch.save(record, os.path.join(job.folder, f"{seat}.pt"))


class Measured:
    """Results of jobs by name, joined when asked for."""

    def __init__(self, gloo: Any, folder: Any) -> None:
        self._gloo, self._folder, self._ranks = gloo, folder, dict[str, int]()

    def measure(self, processes: int, requests: dict[str, tuple[Request, int]]) -> None:
        jobs = []
        for name, (asked, ranks) in requests.items():
            (self._folder / name).mkdir()
            self._ranks[name] = ranks
            jobs.append(Job(asked, ranks, str(self._folder / name)))
        self._gloo.run_within(900, processes, measure_all, jobs=jobs, limit=300)

    def whole(self, name: str) -> AssembledModel:
        files = [self._folder / name / f"{rank}.pt" for rank in range(self._ranks[name])]
        records = [torch.load(file, weights_only=True) for file in files]
        errors = [f"rank {rank}:\n{record['error']}" for rank, record in enumerate(records) if "error" in record]
        assert not errors, "\n".join([name, *errors])
        return assemble(records)


Rows = dict[str, Row]


def named(rows_of: list[Row]) -> Rows:
    return {name_of(*row): row for row in rows_of}


ROWS, HALF_ROWS = named([*PAIRS, *FURTHER]), named([*HALF_PAIRS, *HALF_FURTHER])
# The second engine trains every second row, in which each model and each axis is, and all in bf16.
BOTH_ENGINES = {**named(PAIRS[::2]), **HALF_ROWS}


def marked(matrix: Rows, test: list[Row]) -> list[Any]:
    """The rows for `parametrize`, with what decides which command runs each."""
    rows = []
    for name in matrix:
        marks = [] if name in named(test) else [pytest.mark.test_all]
        marks += [pytest.mark.engine] if name in BOTH_ENGINES else []
        rows.append(pytest.param(name, marks=marks))
    return rows


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, gloo: Any, tmp_path_factory: Any) -> Measured:
    """All rows that this session asks for, and their oracles."""
    found = Measured(gloo, tmp_path_factory.mktemp("layouts"))
    own = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked = {item.callspec.params.get("row") for item in own if hasattr(item, "callspec")}
    of_rows = [row for name, row in {**ROWS, **HALF_ROWS}.items() if name in asked]
    oracles: list[Row] = [(model, 1, {}) for model in dict.fromkeys(model for model, _, _ in of_rows)]
    everything = {name_of(*row): (request_of(row[0], row[2], row[1]), row[1]) for row in [*oracles, *of_rows]}
    found.measure(4, {name: one for name, one in everything.items() if one[1] <= 4})
    found.measure(8, {name: one for name, one in everything.items() if one[1] == 8})
    return found


@pytest.fixture(scope="module")
def oracle(measured: Measured) -> Any:
    """One process's model, of which no choice of an expert is left to rounding."""
    known: dict[str, AssembledModel] = {}

    def of(model: str) -> AssembledModel:
        if model not in known:
            known[model] = measured.whole(name_of(model, 1, {}))
            if model != "bf16":
                assert known[model].smallest_margin > CLEAR, "choose other samples"
                assert all(step["committed"] for step in known[model].steps)
        return known[model]

    return of


def tell(differences: list[Any]) -> str:
    return "\n".join(describe(one) for one in differences[:10])


@pytest.mark.parametrize("row", marked(ROWS, PAIRS))
def test_a_layout_trains_the_same_model(oracle: Any, measured: Measured, row: str) -> None:
    comparison = compare(measured.whole(row), oracle(ROWS[row][0]), FP32)
    assert comparison.agrees, tell(comparison.differences)


@pytest.mark.parametrize("row", marked(HALF_ROWS, HALF_PAIRS))
def test_a_layout_trains_the_same_model_in_bf16(oracle: Any, measured: Measured, row: str) -> None:
    # 0.077 for a gradient (measured: 0.031)
    comparison = compare(measured.whole(row), oracle("bf16"), tolerances_of(run_of(HALF, {}, 1)))
    assert comparison.agrees, tell(comparison.differences)
