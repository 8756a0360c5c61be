"""An fp32 island keeps its bits under every cast, computes in fp32, and speaks the dtype of the model around it."""

import contextlib
import copy
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_moe import MoELayer, TopKRouter
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.model.cross_entropy import linear_cross_entropy
from megatron_moe.moe.experts import GatedActivation, weighted_glu, weighted_swiglu, with_weighted_bias
from megatron_moe.moe.grouped_gemm import gate_product
from megatron_moe.platform.numerics import without_autocast
from megatron_moe.precision.contract import Emits, PrecisionError, declared_fp32_state, make_island
from tests.helpers.routers import config
from tests.helpers.stepped_trainer import SMALL, TINY
from tests.precision import test_fp32_state

CASTS = {**test_fp32_state.CASTS, "deepcopy": lambda m: copy.deepcopy(m).half()}


class Pair(torch.nn.Module):
    """Two linear layers with a norm between; the norm has a buffer."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.second = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def pair_with_island(dtype=torch.bfloat16):
    model = Pair().to(dtype)
    make_island(model.first, Emits())
    torch.nn.init.normal_(model.first.weight)
    return model


@pytest.mark.parametrize("cast", CASTS)
def test_every_cast_leaves_an_islands_bits_and_parameter_alone(cast):
    model = pair_with_island()
    weight = model.first.weight
    weight.sequence_parallel = True
    before = weight.detach().clone()
    assert not torch.equal(before, before.bfloat16().float())  # a cast would show
    after = CASTS[cast](model)
    assert after.first.weight.dtype == torch.float32
    assert torch.equal(after.first.weight, before)
    assert after.second.weight.dtype != torch.float32
    assert after is not model or (after.first.weight is weight and weight.sequence_parallel)


def test_an_island_moves_with_its_model():
    model = pair_with_island().to("meta")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert model.first.weight.dtype == torch.float32


def test_an_islands_gradients_and_buffers_are_not_cast_either():
    model = Pair()
    make_island(model.norm, Emits())
    model(torch.randn(3, 8)).sum().backward()
    wanted = model.norm.weight.grad.clone()
    model.bfloat16()
    assert model.norm.weight.grad.dtype == torch.float32 and torch.equal(model.norm.weight.grad, wanted)
    assert model.norm.running_var.dtype == torch.float32
    assert model.first.weight.grad.dtype == torch.bfloat16


def test_an_island_is_declared_fp32_state_with_all_that_it_contains():
    model = torch.nn.Sequential(Pair(), torch.nn.Linear(4, 4))
    make_island(model[0], Emits())
    names = {"0.first.weight", "0.first.bias", "0.norm.weight", "0.norm.bias", "0.second.weight", "0.second.bias"}
    assert {name for name, _ in declared_fp32_state(model)} == names


@dataclass(frozen=True)
class Record:
    rows: torch.Tensor
    counts: torch.Tensor


Named = namedtuple("Named", "x y")


class Nested(torch.nn.Module):
    """Takes its tensors in every kind of nest, and notes the dtypes that it sees."""

    def forward(self, record, pair, *, more, none=None):
        self.seen = [record.rows.dtype, record.counts.dtype, pair.x.dtype, pair.y[0].dtype, more["a"].dtype]
        return Named(record.rows, [pair.x, record.counts]), None, {"b": more["a"]}


def test_nested_inputs_are_widened_and_nested_outputs_come_back_in_the_first_inputs_dtype():
    module = Nested()
    make_island(module, Emits())
    half = torch.ones(2, dtype=torch.bfloat16)
    wide = torch.ones(2, dtype=torch.float64)
    output, none, more = module(Record(half, torch.ones(2, dtype=torch.int32)), Named(half, [wide]), more={"a": half})
    assert module.seen == [torch.float32, torch.int32, torch.float32, torch.float64, torch.float32]
    assert none is None and isinstance(output, Named)
    assert output.x.dtype == output.y[0].dtype == more["b"].dtype == torch.bfloat16
    assert output.y[1].dtype == torch.int32


def test_an_island_computes_as_an_fp32_model_and_rounds_once():
    model = pair_with_island()
    x = torch.randn(5, 8).bfloat16().requires_grad_()
    got = model.first(x)
    wanted = torch.nn.functional.linear(x.float(), model.first.weight, model.first.bias)
    assert got.dtype == torch.bfloat16 and torch.equal(got, wanted.bfloat16())
    got.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert model.first.weight.grad.dtype == torch.float32
    assert torch.equal(model.first.weight.grad, x.detach().float().sum(0).expand(8, 8))


def test_what_an_island_emits_can_be_said():
    for emits, wanted in ((Emits(lambda: torch.float16), torch.float16), (Emits(as_computed=True), torch.float32)):
        table = torch.nn.Embedding(4, 2)
        make_island(table, emits)
        assert table(torch.tensor([1])).dtype == wanted


def test_a_module_that_casts_for_itself_is_protected_only():
    model = Pair()
    make_island(model.first, None)
    model.bfloat16()
    assert model.first.weight.dtype == torch.float32
    assert model.first(torch.ones(1, 8)).dtype == torch.float32


def test_a_copy_of_an_island_computes_with_its_own_weights():
    model = pair_with_island()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.first.weight.zero_()
        other.first.bias.zero_()
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    assert not other.first(x).any() and model.first(x).any()
    other.half()
    assert other.first.weight.dtype == torch.float32 and model.second.weight.dtype == torch.bfloat16


# ---- a model keeps its fp32 state when it is wrapped for half precision, and a wrapper notices one that does not


def _run(**flags: Any) -> Any:
    return build({**TINY, **SMALL, **flags})


def _subject(name: str, pg_collection: Any) -> torch.nn.Module:
    """A MoE layer or a model whose fp32 state has values that bf16 and fp16 cannot hold."""
    from megatron_moe.model.build import build_model
    from megatron_moe.model.engine_config import transformer_config
    from megatron_moe.moe.layer import MoELayer
    from megatron_moe.moe.options import MoEOptions
    from megatron_moe.moe.router import routers

    run = _run()
    if name == "MoELayer":
        options = MoEOptions.from_run(run)
        module: Any = MoELayer(transformer_config(run), pg_collection=pg_collection, layer_number=1, options=options)
    else:
        (module,) = build_model(run, pg_collection, 128, wrap=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in routers([module]):
            router.expert_bias.copy_(torch.randn(8, generator=generator) * 1e-3 + 1.0)
            router.local_tokens_per_expert.copy_(torch.randint(65505, 2**24, (8,), generator=generator))
    return module


def wrapped(by_engine: bool, shielded: bool) -> list[bool] | str:
    """Whether each tensor of the fp32 state has kept its bits in a wrapped model, or the error of the wrapper."""
    from megatron.core.transformer.module import Float16Module as EngineFloat16Module

    from megatron_moe.model.engine_config import transformer_config
    from megatron_moe.model.float16_module import Float16Module
    from megatron_moe.parallel import groups
    from megatron_moe.precision.contract import PrecisionError, declared_fp32_state
    from megatron_moe.precision.fp32_state import Fp32State

    module = _subject("model", groups.initialize(_run()))
    before = [tensor.clone() for _, tensor in declared_fp32_state(module)]
    shield = Fp32State._apply
    if not shielded:
        del Fp32State._apply
    try:
        (EngineFloat16Module if by_engine else Float16Module)(transformer_config(_run(bf16=True)), module)
    except PrecisionError as error:
        return str(error)
    finally:
        Fp32State._apply = shield
    after = [tensor for _, tensor in declared_fp32_state(module)]
    return [one.dtype == torch.float32 and torch.equal(one, other) for one, other in zip(after, before, strict=True)]


@pytest.mark.engine
def test_a_wrapper_keeps_the_bits_of_the_fp32_state_and_notices_a_model_whose_shield_is_gone(gloo):
    for by_engine in (False, True):
        (kept,) = gloo.run(1, wrapped, by_engine=by_engine, shielded=True)
        assert len(kept) >= 2 and all(kept)
    (said,) = gloo.run(1, wrapped, by_engine=False, shielded=False)
    assert "expert_bias is torch.bfloat16" in said


# ---- a surrounding torch.autocast changes nothing in the gate, the routing, the activation, the MoE layer or a run


HALVES = [torch.bfloat16, torch.float16]
SOFTMAX = {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
ROUTING = {
    "sigmoid, bias": {},
    "softmax, capacity": {**SOFTMAX, "moe_expert_capacity_factor": 0.7},
    "groups, jitter": {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
    | {"moe_input_jitter_eps": 0.1},
    "Sinkhorn": {**SOFTMAX, "moe_router_load_balancing_type": "sinkhorn"},
    "fp64, losses": {
        "moe_router_dtype": "fp64",
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
        "moe_z_loss_coeff": 0.1,
    },
}


Under = tuple[torch.dtype | None, torch.dtype | None]
"""The dtypes that the forward and the backward pass are autocast to."""
NONE: Under = (None, None)


IN_BF16, IN_FP16 = ([(dtype, None), (None, dtype), (dtype, dtype)] for dtype in HALVES)


def autocast(dtype: torch.dtype | None) -> Any:
    """Autocast to `dtype`, of which None is none."""
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def require_same(plain: list[torch.Tensor], cast: list[torch.Tensor]) -> None:
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@contextlib.contextmanager
def the_same_numbers() -> Iterator[None]:
    """Random numbers are those of every other such block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        yield


def routed(options: dict[str, Any], params: torch.dtype, under: Under) -> list[torch.Tensor]:
    """Everything that comes out of a router's pass, forward and backward."""
    with the_same_numbers():
        router = TopKRouter(config(perform_initialization=True, **options)).to(params)
        torch.nn.init.normal_(router.weight)
        if router.expert_bias is not None:
            router.expert_bias.normal_(std=0.1)
        hidden = torch.randn(512, 16).to(params).requires_grad_()
        with autocast(under[0]):
            decision = router.route(hidden, num_sequences=2)
        with autocast(under[1]):
            decision.probs.sin().sum().backward()
    losses = [] if router.aux_losses is None else list(router.aux_losses.totals.values())
    return [*decision[:2], hidden.grad, router.weight.grad, router.local_tokens_per_expert, *losses]


@pytest.mark.parametrize("name", ROUTING)
def test_a_router_decides_weighs_and_learns_as_without_autocast(name: str) -> None:
    for params in (torch.float32, torch.bfloat16):
        plain = routed(ROUTING[name], params, NONE)
        for under in (*IN_BF16, *IN_FP16):
            require_same(plain, routed(ROUTING[name], params, under))


def passed(function: Any, inputs: list[torch.Tensor], under: Under) -> list[torch.Tensor]:
    own = [one.clone().requires_grad_(one.is_floating_point()) for one in inputs]
    with autocast(under[0]):
        out = function(*own)
    with autocast(under[1]):
        (out.double() * torch.arange(out.numel()).view_as(out).double().cos()).sum().backward()
    return [out.detach(), *(one.grad for one in own if one.is_floating_point())]


CLAMPED = GatedActivation(1.702, 0.5, 1.0)
FUNCTIONS = {
    "activation": (weighted_swiglu, lambda r, dtype: [r(64, 32).to(dtype), r(64).abs()]),
    "clamped activation": (
        lambda rows, probs, bias: weighted_glu(rows, probs, bias, torch.arange(64) // 16, CLAMPED),
        lambda r, dtype: [r(64, 32).to(dtype), r(64).abs(), r(4, 2, 16).to(dtype)],
    ),
    "second bias": (
        lambda rows, probs, bias: with_weighted_bias(rows, probs, bias, torch.arange(64) // 16, slice(8, 24)),
        lambda r, dtype: [r(64, 32).to(dtype), r(64).abs(), r(4, 16).to(dtype)],
    ),
    "gate": (lambda x, w: gate_product(x, w, torch.float32), lambda r, dtype: [r(64, 32).to(dtype), r(8, 32)]),
    "loss": (linear_cross_entropy, lambda r, dtype: [r(64, 32).to(dtype), r(48, 32).to(dtype), torch.arange(64) % 48]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_ours_has_the_same_bits_under_autocast(name: str, dtype: torch.dtype) -> None:
    function, make = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(3)
    inputs = make(lambda *shape: torch.randn(*shape, generator=generator), dtype)
    for under in (*IN_BF16, *IN_FP16):
        require_same(passed(function, inputs, NONE), passed(function, inputs, under))


def layer(**changes: Any) -> MoELayer:
    from megatron_moe.model.engine_config import transformer_config
    from megatron_moe.moe.options import MoEOptions
    from megatron_moe.parallel import groups

    run = build({**PRESETS["tiny"], "moe_shared_expert_gate": True, "moe_aux_loss_coeff": (0.1,), **changes})
    pg_collection, options = groups.initialize(run), MoEOptions.from_run(run)
    with the_same_numbers():
        built = MoELayer(transformer_config(run), pg_collection=pg_collection, layer_number=1, options=options)
        for parameter in built.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return built


def hidden_states() -> torch.Tensor:
    return torch.randn(12, 2, PRESETS["tiny"]["hidden_size"], generator=torch.Generator().manual_seed(7))


def layer_pass(built: MoELayer, hidden: torch.Tensor, under: Under = NONE) -> list[torch.Tensor]:
    built.zero_grad()
    found = passed(lambda own: built(own)[0], [hidden], under)
    assert found[0].dtype == hidden.dtype
    return [*found, *(parameter.grad for parameter in built.parameters())]


RECOMPUTED = [
    {"recompute_granularity": "selective", "recompute_modules": (m,)} for m in ("moe", "shared_experts", "moe_act")
]


@pytest.mark.parametrize("changes", [{}, *RECOMPUTED, {"moe_expert_backend": "loop"}], ids=str)
def test_a_layer_has_the_same_bits_under_autocast(changes: dict[str, Any], one_process: None) -> None:
    built, hidden = layer(**changes), hidden_states()
    # bf16 gradients under fp16 are refused
    for params, places in ((torch.float32, [*IN_BF16, *IN_FP16]), (torch.bfloat16, IN_BF16)):
        built, hidden = built.to(params), hidden.to(params)
        plain = layer_pass(built, hidden)
        for under in places:
            require_same(plain, layer_pass(built, hidden, under))


def test_under_autocast_a_layer_of_fp32_takes_the_bf16_that_another_module_made(one_process: None) -> None:
    built, hidden = layer(), hidden_states().bfloat16()
    wide, narrow = layer_pass(built, hidden.float()), layer_pass(built, hidden, (torch.bfloat16, torch.bfloat16))
    assert narrow[0].dtype == narrow[1].dtype == torch.bfloat16
    assert torch.equal(narrow[0], wide[0].bfloat16())
    torch.testing.assert_close(narrow[1].float(), wide[1], rtol=0.02, atol=0.01 * float(wide[1].abs().max()))


def test_autocast_is_put_back_where_it_was() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast("cpu"):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    with without_autocast("meta"):
        pass


def two_steps_and_an_evaluation(flags: dict[str, Any], dtype: torch.dtype | None) -> list[Any]:
    """What two steps and an evaluation come to, all under autocast to `dtype`."""
    from megatron_moe.training.evaluate import evaluate
    from tests.helpers.stepped_trainer import SMALL, Trainer

    sizes = {"seq_length": 32, "micro_batch_size": 4}
    trainer = Trainer({**SMALL, **sizes, **flags})
    with autocast(dtype):
        results = [trainer.step() for _ in range(2)]
        more: dict[str, Any] = {"split": "valid", "iteration": 2, "num_micro_batches": 1, **sizes}
        record = evaluate(trainer.model, trainer.batches, **more, pg_collection=trainer.groups)
    seen = [[r.committed, r.loss, r.grad_norm, r.expert_bias_hash] for r in results]
    return [seen, record.loss, trainer.state()]


HALF = {"bf16": True, "moe_shared_expert_gate": True, "mtp_num_layers": 1}
COUNTED_AHEAD = {"moe_router_num_groups": None, "moe_router_group_topk": None, "moe_aux_loss_coeff": (0.1,)}
COUNTED_AHEAD |= {"moe_router_load_balancing_type": ("global_aux_loss",)}


@pytest.mark.parametrize("flags", [HALF, COUNTED_AHEAD], ids=["bf16", "fp32, counted ahead"])
def test_a_run_steps_and_evaluates_as_without_autocast(gloo: Any, flags: dict[str, Any]) -> None:
    plain, cast = (
        gloo.run(1, two_steps_and_an_evaluation, flags=flags, dtype=dtype) for dtype in (None, torch.bfloat16)
    )
    assert plain == cast and plain[0][0][0][0]


def test_the_shared_experts_gate_is_as_wide_as_an_fp64_model(one_process: None) -> None:
    shared = layer().shared_experts.double()
    hidden = hidden_states().double()
    gated = shared(hidden)
    weight, shared.gate_weight = shared.gate_weight, None
    wanted = shared(hidden) * torch.sigmoid(hidden @ weight.T)
    assert gated.dtype == torch.float64
    torch.testing.assert_close(gated, wanted, rtol=1e-14, atol=1e-14)
    plain = shared.bfloat16()(hidden.bfloat16())
    shared.gate_weight = torch.nn.Parameter(weight.bfloat16())
    gate = torch.sigmoid(hidden.bfloat16().double() @ shared.gate_weight.double().T)
    differ = shared(hidden.bfloat16()) != (plain * gate).bfloat16()
    assert differ.float().mean() < 0.01, "the gate of a model in bf16 is one of fp32"


def test_a_model_called_under_autocast_outside_a_run_says_so(one_process: None) -> None:
    from megatron_moe.model.build import build_model
    from megatron_moe.parallel import groups

    run = build({**PRESETS["tiny"], "mock_data": True, "vocab_size": 100})
    (model,) = build_model(run, groups.initialize(run), 128, wrap=False)
    tokens = torch.zeros(1, run.model.seq_length, dtype=torch.int64)
    model(tokens, tokens, None, labels=tokens)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PrecisionError, match=r"torch\.autocast is on"):
        model(tokens, tokens, None, labels=tokens)
