"""Every layout trains the same model: three fp32 steps under each, held against one process, and two bf16 steps.

The comparison is the doctor's (megatron_moe/doctor): loss and gradient norm to 1e-5 of themselves, each gradient to
1e-4 of its norm, initial weights, token counts and expert_bias bit for bit, copies on several ranks bit for bit.

A choice of experts that two layouts may make differently, because rounding decides it, would say nothing about either.
So each model's samples are chosen such that in the oracle's steps no choice is decided by less than CLEAR; the
test asserts that they still are. Scores of two layouts differ by some 1e-6 after ten steps.

The first step shows the weights that a layout starts with, the second what its optimizer and expert_bias made of them,
the third what both keep from step to step. Further steps repeat the third.

The second engine trains the rows that have every model and every part of a layout once; what a set of options does
together is our code's more than the engine's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.apps.doctor.assemble import AssembledModel, assemble
from megatron_moe.apps.doctor.compare import FP32, compare, tolerances_of
from megatron_moe.apps.doctor.measure import Request
from megatron_moe.apps.doctor.report import describe
from megatron_moe.config import rules
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from tests.helpers.rows import rows
from tests.numbers.layout_cases import Job, measure_all

pytestmark = pytest.mark.engine

STEPS, CLEAR = 3, 2e-5
BF16_STEPS = 2
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
    # see apps/doctor/small_copy.py: with 1e-8 weights whose gradient is rounding alone move by a whole learning rate
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

# Name -> (flags of the model, number of the samples).
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "deepseek": (MLA, 3),
    "aux_loss": ({**GQA, "moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.05,)}, 0),
    "every loss": (
        {
            **MLA,
            "moe_router_load_balancing_type": AUXILIARY,
            "moe_aux_loss_coeff": (0.05, 0.05, 0.05),
            "moe_z_loss_coeff": 0.01,
        },
        0,
    ),
    "per token": (
        {
            **MLA,
            "moe_router_load_balancing_type": AUXILIARY[1:],
            "moe_aux_loss_coeff": (0.05, 0.05),
            "moe_z_loss_coeff": 0.01,
            "calculate_per_token_loss": True,
        },
        0,
    ),
    "further tokens": ({**MLA, "mtp_num_layers": 1, "moe_z_loss_coeff": 0.01}, 1),
    "capacity": ({**MLA, "moe_expert_capacity_factor": 1.0, "moe_router_bias_update_rate": 1e-2}, 1),
    "tied": (
        {
            **MLA,
            "untie_embeddings_and_output_weights": False,
            "qk_layernorm": False,
            "moe_layer_freq": "[1,0,1,1]",
            "moe_shared_expert_gate": True,
        },
        0,
    ),
    "dense": (
        {**GQA, "num_experts": None, "moe_ffn_hidden_size": None, "moe_layer_freq": 1, "add_bias_linear": True},
        0,
    ),
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
PARTS_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("moe_act", "layernorm", "mla_up_proj")}
SINGLES = {"micro_batch_size": 1}
FUSED = {"cross_entropy_loss_fusion": True}
LOOP = {"moe_expert_backend": "loop"}

# (model, ranks, flags of the layout, one by one)
MATRIX: list[tuple[str, int, dict[str, dict[str, Any]]]] = [
    # one rank: what is no layout, and must not matter either
    ("deepseek", 1, {"all recomputed": ALL_AGAIN}),
    ("per token", 1, {"singles": SINGLES, "loop": LOOP}),
    # two ranks
    ("deepseek", 2, {"tp2": TP2}),
    ("deepseek", 2, {"tp2": TP2, "ep2": EP2, "etp1": ETP1, "fused": FUSED}),
    ("deepseek", 2, {"pp2": PP2}),
    ("deepseek", 2, {"vpp": VPP, "recomputed": PARTS_AGAIN}),
    ("deepseek", 2, {"loss alone": LOSS_ALONE, "sharded": SHARDED}),
    ("deepseek", 2, {"cp2": CP2}),
    ("deepseek", 2, {"cp2": CP2, "ep2": EP2}),
    ("deepseek", 2, {"dp2": {}}),
    ("deepseek", 2, {"ep2": EP2}),
    ("deepseek", 2, {"ep2": EP2, "allgather": ALLGATHER}),
    ("deepseek", 2, {"gather": GATHER, "ep2": EP2}),
    ("deepseek", 2, {"dp2": {}, "zero3": ZERO3}),
    ("aux_loss", 2, {"tp2": TP2, "allgather": ALLGATHER}),
    ("aux_loss", 2, {"vpp": VPP}),
    ("aux_loss", 2, {"cp2": CP2}),
    ("aux_loss", 2, {"ep2": EP2, "sharded": SHARDED}),
    ("every loss", 2, {"tp2": TP2}),
    ("every loss", 2, {"cp2": CP2, "ep2": EP2}),
    ("every loss", 2, {"pp2": PP2, "all recomputed": ALL_AGAIN}),
    ("every loss", 2, {"ep2": EP2}),
    ("per token", 2, {"tp2": TP2, "etp2": ETP2}),
    ("per token", 2, {"pp2": PP2}),
    ("per token", 2, {"cp2": CP2}),
    ("per token", 2, {"dp2": {}, "singles": SINGLES, "overlap": OVERLAP}),
    ("per token", 2, {"ep2": EP2, "singles": SINGLES, "zero2": ZERO2}),
    ("further tokens", 2, {"tp2": TP2}),
    ("further tokens", 2, {"pp2": PP2, "first1": FIRST1}),
    ("further tokens", 2, {"further at end": FURTHER_AT_END}),
    ("further tokens", 2, {"cp2": CP2}),
    ("further tokens", 2, {"ep2": EP2}),
    ("further tokens", 2, {"dp2": {}, "zero3": ZERO3, "all recomputed": ALL_AGAIN}),
    ("capacity", 2, {"tp2": TP2}),
    ("capacity", 2, {"cp2": CP2, "ep2": EP2}),
    ("capacity", 2, {"ep2": EP2, "allgather": ALLGATHER}),
    ("tied", 2, {"pp2": PP2, "last1": LAST1}),
    ("tied", 2, {"tied alone": TIED_ALONE}),
    ("tied", 2, {"tp2": TP2}),
    ("tied", 2, {"vpp": VPP, "sharded": SHARDED}),
    ("tied", 2, {"cp2": CP2, "zero3": ZERO3}),
    ("dense", 2, {"tp2": {"tensor_model_parallel_size": 2}}),
    ("dense", 2, {"cp2": CP2}),
    # four ranks
    ("deepseek", 4, {"tp2": TP2, "pp2": PP2}),
    ("deepseek", 4, {"tp2": TP2, "ep2": EP2, "etp2": ETP2, "sharded": SHARDED}),
    ("deepseek", 4, {"tp2": TP2, "ep4": EP4, "etp1": ETP1}),
    ("deepseek", 4, {"pp2": PP2, "ep2": EP2, "gather": GATHER}),
    ("deepseek", 4, {"pp4": PP4}),
    ("deepseek", 4, {"uneven": UNEVEN}),
    ("deepseek", 4, {"cp2": CP2, "pp2": PP2}),
    ("deepseek", 4, {"cp4": CP4, "ep2": EP2}),
    ("every loss", 4, {"tp2": TP2, "ep2": EP2, "etp1": ETP1, "zero3": ZERO3}),
    ("per token", 4, {"ep4": EP4, "singles": SINGLES, "sharded": SHARDED}),
    ("aux_loss", 4, {"tp2": TP2, "vpp": VPP}),
    ("every loss", 4, {"tp2": TP2, "cp2": CP2, "ep2": EP2, "etp1": ETP1}),
    ("every loss", 4, {"pp2": PP2, "dp2": {}, "overlap": OVERLAP}),
    ("per token", 4, {"tp2": TP2, "ep2": EP2, "etp1": ETP1}),
    ("further tokens", 4, {"tp2": TP2, "pp2": PP2}),
    ("further tokens", 4, {"further alone": FURTHER_ALONE}),
    ("capacity", 4, {"tp2": TP2, "pp2": PP2, "etp1": ETP1}),
    ("dense", 4, {"tp2": TP2, "dp2": {}, "gather": GATHER}),
    # eight ranks
    ("deepseek", 8, {"tp2": TP2, "pp2": PP2, "ep2": EP2, "etp1": ETP1, "sharded": SHARDED}),
    ("deepseek", 8, {"cp4": CP4, "vpp": VPP, "ep4": EP4}),
    ("every loss", 8, {"tp2": TP2, "cp2": CP2, "ep2": EP2, "etp2": ETP2}),
    ("further tokens", 8, {"pp4": PP4, "dp2": {}, "ep2": EP2}),
]

# A model with few choices, so that samples can be found where bf16 decides none of them.
HALF = {**MLA, "bf16": True, "seq_length": 8, "moe_layer_freq": "[0,1,0,1]", "moe_router_num_groups": None}
HALF = {**HALF, "moe_router_group_topk": None, "moe_router_group_score": "top2"}
HALF_SAMPLES = 20
HALF_MATRIX: list[tuple[int, dict[str, dict[str, Any]]]] = [
    (2, {"tp2": TP2}),
    (2, {"tp2": TP2, "ep2": EP2, "etp1": ETP1}),
    (2, {"pp2": PP2}),
    (2, {"cp2": CP2}),
    (2, {"ep2": EP2, "gather": GATHER}),
    (4, {"tp2": TP2, "pp2": PP2}),
    (4, {"cp2": CP2, "ep2": EP2, "sharded": SHARDED}),
]


def flags_of(layout: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in layout.values() for name, value in part.items()}


def run_of(model: dict[str, Any], layout: dict[str, dict[str, Any]], ranks: int) -> Run:
    run = replace(Run(), **{**model, **flags_of(layout)})
    rules.check(run, ranks)
    return run


def request_of(model: str, layout: dict[str, dict[str, Any]], ranks: int) -> Request:
    flags, samples = MODELS[model]
    return Request(run_of(flags, layout, ranks), PADDED_VOCABULARY, STEPS, (1, STEPS), samples)


def half_request(layout: dict[str, dict[str, Any]], ranks: int) -> Request:
    return Request(run_of(HALF, layout, ranks), PADDED_VOCABULARY, BF16_STEPS, (1, BF16_STEPS), HALF_SAMPLES)


def name_of(model: str, ranks: int, layout: dict[str, Any]) -> str:
    return f"{model.replace(' ', '_')}-{ranks}-{'-'.join(layout).replace(' ', '_')}"


ROWS = {name_of(*row): row for row in MATRIX}
HALF_ROWS = {name_of("bf16", *row): row for row in HALF_MATRIX}


def with_either_engine(rows: dict[str, Any]) -> list[str]:
    """The rows, largest first, that have a model or a part of a layout which no larger one has: all of them once."""
    known: set[str] = set()
    names = []
    for name, (*model, _, layout) in reversed(rows.items()):
        if {*model, *layout} - known:
            names.append(name)
            known |= {*model, *layout}
    return names


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


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, gloo: Any, tmp_path_factory: Any) -> Measured:
    found = Measured(gloo, tmp_path_factory.mktemp("layouts"))
    own = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked = {item.callspec.params.get("row") for item in own if hasattr(item, "callspec")}
    oracles = {name_of(model, 1, {}): (request_of(model, {}, 1), 1) for model in MODELS}
    layouts = {
        name: (request_of(model, layout, ranks), ranks)
        for name, (model, ranks, layout) in ROWS.items()
        if name in asked
    }
    half = {name: (half_request(layout, ranks), ranks) for name, (ranks, layout) in HALF_ROWS.items() if name in asked}
    half[name_of("bf16", 1, {})] = half_request({}, 1), 1
    everything = {**oracles, **layouts, **half}
    found.measure(4, {name: one for name, one in everything.items() if one[1] <= 4})
    found.measure(8, {name: one for name, one in everything.items() if one[1] == 8})
    return found


@pytest.fixture(scope="module")
def oracle(measured: Measured) -> Any:
    known: dict[str, AssembledModel] = {}

    def of(model: str) -> AssembledModel:
        name = name_of(model, 1, {})
        if name not in known:
            known[name] = measured.whole(name)
        return known[name]

    return of


def tell(differences: list[Any]) -> str:
    return "\n".join(describe(one) for one in differences[:10])


def test_the_matrix_is_as_large_as_it_is_said_to_be() -> None:
    assert len(ROWS) == len(MATRIX) >= 50
    assert {ranks for _, ranks, _ in MATRIX} == {1, 2, 4, 8}
    assert {model for model, _, _ in MATRIX} == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_no_choice_of_an_expert_is_left_to_rounding(oracle: Any, model: str) -> None:
    assert oracle(model).smallest_margin > CLEAR


@pytest.mark.parametrize("row", rows(ROWS, test=with_either_engine(ROWS)))
def test_a_layout_trains_the_same_model(oracle: Any, measured: Measured, row: str) -> None:
    wanted = oracle(ROWS[row][0])
    assert all(step["committed"] for step in wanted.steps)
    comparison = compare(measured.whole(row), wanted, FP32)
    assert comparison.agrees, tell(comparison.differences)


@pytest.mark.parametrize("row", rows(HALF_ROWS, test=with_either_engine(HALF_ROWS)))
def test_a_layout_trains_the_same_model_in_bf16(oracle: Any, measured: Measured, row: str) -> None:
    # 0.077 for a gradient (measured: 0.031)
    comparison = compare(measured.whole(row), oracle("bf16"), tolerances_of(run_of(HALF, {}, 1)))
    assert comparison.agrees, tell(comparison.differences)


def listed() -> list[str]:
    """The matrix as docs/parallelism.md shows it."""
    table: dict[tuple[str, int], list[str]] = {}
    for model, ranks, layout in [*MATRIX, *(("bf16", *row) for row in HALF_MATRIX)]:
        table.setdefault((model, ranks), []).append(" + ".join(layout))
    return [f"| {model} | {ranks} | {'; '.join(layouts)} |" for (model, ranks), layouts in sorted(table.items())]


def test_the_page_lists_the_matrix() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    shown = [line for line in page.splitlines() if re.match(r"\| [\w ]+ \| \d \| ", line)]
    assert shown == listed(), "replace the page's table by:\n" + "\n".join(listed())
