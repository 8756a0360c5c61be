"""ZeRO++ in training: each switch and all of them, in every dtype, on simulated machines of two ranks."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_moe.config.schema import Run, build, replace
from megatron_moe.engine.fully_shard import gathered_dtype
from megatron_moe.model.float16_module import without_wrappers
from megatron_moe.model.fully_sharded import FullyShardedDataParallel, Sharding
from megatron_moe.moe.router import routers
from megatron_moe_tools.plan.plan import rank_traffic
from megatron_moe_tools.plan.tracing import trace_ranks
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import TINY, Trainer

ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params", "seq_length": 16}
FLAGS = {**ZERO3, "micro_batch_size": 1, "global_batch_size": 8}
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 4096.0},
}
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": "int8"}
MACHINES = {"zero_hpz_partition_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}  # each machine of two ranks has each expert once
SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "weights": WEIGHTS,
    "gradients": GRADIENTS,
    "gradients, int4": {"zero_quantized_gradients": "int4"},
    "machines": MACHINES,
    "experts": EXPERTS,
    "machines, experts": {**MACHINES, **EXPERTS},
    "all": {**WEIGHTS, **GRADIENTS, **MACHINES},
    # What tests/compat/deepspeed/zeropp_bf16_failing_in_deepspeed.json asks for, which fails elsewhere.
    "published": {**WEIGHTS, **GRADIENTS, **MACHINES, "optimizer_cpu_offload": True},
}
# Each switch alone in one dtype, where its bytes are measured too; all of them in every dtype.
CASES = [("fp32", "weights"), ("bf16", "weights"), ("fp32", "gradients"), ("fp32", "gradients, int4")]
CASES += [("fp16", "machines"), *((dtype, "all") for dtype in DTYPES), ("bf16", "published"), ("fp16", "published")]
IN_TEST = [("bf16", "all")]


def trained(flags: dict[str, Any]) -> dict[str, Any]:
    """Losses of two steps, biases, the second step's bytes; by kind and, of bytes to another machine, by kind too."""
    sent: Counter[str] = Counter()
    me = dist.get_rank() // 2

    def counting(kind: str, call: Any) -> Any:
        def counted(output: torch.Tensor, input: torch.Tensor, *args: Any, group: Any = None, **named: Any) -> Any:
            ranks = dist.get_process_group_ranks(group)
            others = [rank for rank in ranks if rank != dist.get_rank()]
            away = [rank for rank in others if rank // 2 != me]
            whole = max(output.nbytes, input.nbytes)
            sent[kind] += whole * len(others) // len(ranks)
            sent[f"{kind}, away"] += whole * len(away) // len(ranks)
            return call(output, input, *args, group=group, **named)

        return counted

    trainer = Trainer(flags)
    steps = [trainer.step()]
    kinds = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce", "all_to_all_single": "exchange"}
    kinds |= {"all_gather_single": "gather", "reduce_scatter_single": "reduce"}  # which torch 2.13 brought
    for name in kinds.keys() & vars(dist):
        mock.patch.object(dist, name, counting(kinds[name], getattr(dist, name))).start()
    steps.append(trainer.step())
    mock.patch.stopall()
    biases = [router.expert_bias.clone() for router in routers(trainer.model)]
    assert all(bias.dtype == torch.float32 for bias in biases)
    said = [(step.committed, step.loss, step.grad_norm) for step in steps]
    return {"said": said, "biases": biases, "sent": dict(sent)}


@pytest.fixture(scope="module")
def measured(once: Any) -> Any:
    return lambda dtype, switches: once(4, trained, flags={**FLAGS, **DTYPES[dtype], **SWITCHES[switches]})


@pytest.mark.parametrize(("dtype", "switches"), rows(CASES, test=IN_TEST))
def test_a_switch_trains_as_without_it(measured: Any, dtype: str, switches: str) -> None:
    wanted, found = measured(dtype, "none")[0]["said"], measured(dtype, switches)
    # A secondary partition keeps what the forward pass has gathered: nothing is rounded.
    tolerance = 1e-7 if switches == "machines" else 5e-3
    for one in found:
        for (committed, loss, norm), (_, meant, meant_norm) in zip(one["said"], wanted, strict=True):
            assert committed and loss == pytest.approx(meant, rel=tolerance)
            assert norm == pytest.approx(meant_norm, rel=10 * tolerance)
        assert one["said"] == found[0]["said"]
        assert all(a.equal(b) for a, b in zip(one["biases"], found[0]["biases"]))
    assert (found[0]["said"] == wanted) == (switches == "machines")


def test_experts_that_a_machine_has_once_train_bit_for_bit_as_without_partitions(measured: Any) -> None:
    assert measured("fp16", "machines, experts")[0]["said"] == measured("fp16", "experts")[0]["said"]


# What is sent as it is, vectors and router weights, is 2 % of this small model's bytes.
SMALL = 0.02
AWAY = ("gather, away", "reduce, away", "exchange, away")
# What is sent with a switch, kinds, without which other one, kinds, and the part of the bytes.
# The second of two gathers is among the two ranks of a machine. The tables, a ninth of this model, are gathered once at
# stage 3 as well, for the output layer is the first in the backward pass: the ratio of their bytes is 2.03 / 6, where
# a layer's is 2.03 / 8. Experts that a machine has once stay there, and the backward pass gathers nothing of them.
BYTES: list[tuple[str, str, tuple[str, ...], str, tuple[str, ...], float]] = [
    ("bf16", "all", AWAY, "none", AWAY, 0.27 + SMALL + 0.01),
    ("fp16", "machines, experts", ("gather, away",), "experts", ("gather, away",), 0.56),
    ("fp16", "machines, experts", ("gather",), "experts", ("gather",), 0.75),
    ("fp32", "weights", ("gather",), "none", ("gather",), 0.27 + SMALL),
    ("bf16", "weights", ("gather",), "none", ("gather",), 0.54 + SMALL),
    ("fp32", "gradients", ("exchange",), "none", ("reduce",), 0.27 + SMALL),
    ("fp32", "gradients, int4", ("exchange",), "none", ("reduce",), 0.15 + SMALL),
    ("fp16", "machines", ("gather, away",), "none", ("gather, away",), 0.56),
]


@pytest.mark.parametrize(("dtype", "switches", "kinds", "without", "plain_kinds", "part"), rows(BYTES, test=BYTES[:3]))
def test_the_bytes_that_are_sent(measured: Any, dtype, switches, kinds, without, plain_kinds, part) -> None:
    def sent(switches: str, kinds: tuple[str, ...]) -> int:
        return sum(measured(dtype, switches)[0]["sent"].get(kind, 0) for kind in kinds)

    assert 0 < sent(switches, kinds) < part * sent(without, plain_kinds)


@pytest.mark.parametrize(("dtype", "switches"), rows([("fp32", "none"), *CASES[1:5], *IN_TEST], test=IN_TEST))
def test_a_plan_sends_what_a_step_sends(measured: Any, dtype: str, switches: str) -> None:
    run = build({**TINY, **FLAGS, **DTYPES[dtype], **SWITCHES[switches]})
    vocabulary = run.derived.padded_vocab_size(run.model.vocab_size or 0)
    (trace,) = trace_ranks(run, 4, vocabulary, device="cpu", imbalance=1.0)
    planned = [one for name, one in rank_traffic(run, trace, 4, gpus_per_node=2).items() if name in ("DP", "expert DP")]
    sent = measured(dtype, switches)[0]["sent"]
    assert sum(one.sent for one in planned) == pytest.approx(
        sum(sent.get(kind, 0) for kind in ("gather", "reduce", "exchange")), rel=0.01
    )
    # In a ring of four ranks on two machines two of the four links are between these, with 3 / 4 of the bytes each.
    # Counted are equal shares to each other rank, half of the bytes.
    away = 0.75 * (sent["gather, away"] + sent.get("reduce, away", 0)) + sent.get("exchange, away", 0)
    assert sum(one.between_nodes for one in planned) == pytest.approx(away, rel=0.01)


def test_how_weights_and_gradients_are_sent_is_what_the_flags_say() -> None:
    def sharding(**flags: Any) -> Sharding:
        return Sharding.from_run(replace(Run(), **flags))

    assert sharding(data_parallel_sharding_strategy="optim_grads") == Sharding(keep_gathered=True)
    assert sharding(**ZERO3) == Sharding(keep_gathered=False)
    assert sharding(**ZERO3, **WEIGHTS) == Sharding(False, quantized_weights=True)
    assert sharding(**ZERO3, **MACHINES, tensor_model_parallel_size=4) == Sharding(False, machine=8)
    assert [sharding(zero_quantized_gradients=name).gradient_bits for name in (None, "int8", "int4")] == [None, 8, 4]


# ---- what is never rounded: router weights, norms, biases, and the modules that `--keep-fp32` names


KEPT = ("decoder.layers.0.self_attention", "decoder.layers.1.mlp.experts")
KEEPING = {**ZERO3, "bf16": True, "keep_fp32": KEPT, "moe_shared_expert_gate": True}


def gathered(flags: dict[str, Any]) -> set[str]:
    """The weights that the model computes with as the shards have them, bit for bit."""
    (chunk,) = Trainer({**KEEPING, **flags}).model
    own: Any = dict(chunk.named_parameters())
    exact = {name: one.full_tensor().to(gathered_dtype(one)) for name, one in own.items()}
    return {without_wrappers(name) for name, weight in chunk.gathered() if weight.equal(exact[name])}


def reduced(flags: dict[str, Any]) -> dict[str, Any]:
    """The reduced gradients of a first step: this rank's shards."""
    found = {}
    reduce = FullyShardedDataParallel.finish_grad_sync

    def seen(self: Any, *args: Any, **named: Any) -> None:
        reduce(self, *args, **named)
        found.update({without_wrappers(name): one.main_grad.clone() for name, one in self.named_parameters()})

    trainer = Trainer({**KEEPING, **flags})
    with mock.patch.object(FullyShardedDataParallel, "finish_grad_sync", seen):
        assert trainer.step().committed
    return found


def test_router_weights_norms_and_kept_modules_are_sent_as_they_are(gloo: Any) -> None:
    wanted = gloo.run(2, reduced, flags={})
    found = gloo.run(2, reduced, flags={"zero_quantized_gradients": "int8"})
    weights = gloo.run(2, gathered, flags={"zero_quantized_weights": True})
    names = set(wanted[0])
    kept = {one for one in names if one.startswith(KEPT) or one.endswith((".router.weight", ".gate_weight"))}
    kept |= {one for one in names if "norm" in one or one.endswith(".bias")}
    assert {len(kept & {one}) for one in names} == {0, 1} and any(one.endswith(".gate_weight") for one in kept)
    for rank in range(2):
        assert weights[rank] == kept
        # Of two ranks a sum has the same bits in either order.
        assert {name for name in names if found[rank][name].equal(wanted[rank][name])} == kept
