"""No parameter is read before its gather has arrived, and no gradient is written after its bucket has left.

With `--overlap-param-gather` the engine waits for a bucket where the module of one of its parameters is called, with
`--overlap-grad-reduce` it sends one where autograd has the last of its gradients. Guards watch every operation of torch
in a run, so that a parameter that is read past its module's `__call__`, or a gradient that is late, is found.
"""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_moe.config.schema import build
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import EP2, PP2, TP2, ZERO_2, ZERO_3
from tests.helpers.trained_steps import SMALL, TINY

pytestmark = pytest.mark.engine


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Its first address in memory, and the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class ArrivalGuard(TorchDispatchMode):
    """Raises, naming the parameter, where one is read between the optimizer's update and the end of its gather.

    A rank may read its own shard, which it has updated itself. Kernels outside torch are not seen: switch them off.

    Attributes:
        arrivals: gathers that were waited for.
    """

    def __init__(self, chunks: Any, optimizer: Any) -> None:
        super().__init__()
        self.arrivals = 0
        self._parameters: dict[int, list[tuple[str, tuple[int, int]]]] = {}
        self._own: dict[int, list[tuple[int, int]]] = {}
        names = {parameter: name for chunk in chunks for name, parameter in chunk.named_parameters()}
        for group in (group for chunk in chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups):
            self._parameters[id(group)] = [
                (names[parameter], span_of(parameter)) for bucket in group.buckets for parameter in bucket.params
            ]
            size, rank = (getattr(group, f"intra_distributed_optimizer_instance_{what}") for what in ("size", "rank"))
            shards = [bucket.param_data.view(size, -1)[rank] for bucket in group.buckets]
            self._own[id(group)] = [span_of(shard) for shard in shards]
            group.finish_param_sync = self._arriving(group, group.finish_param_sync)
            group.start_param_sync = self._arriving(group, group.start_param_sync, where="force_sync")
        self._waiting = set(self._parameters)  # in the first step, too, though it gathers what is there
        optimizer.step_with_ready_grads = self._updated(optimizer.step_with_ready_grads)

    def _arriving(self, group: Any, act: Callable[..., Any], where: str | None = None) -> Callable[..., Any]:
        def arriving(**how: bool) -> Any:
            result = act(**how)
            if where is None or how.get(where):
                self.arrivals += id(group) in self._waiting
                self._waiting.discard(id(group))
            return result

        return arriving

    def _updated(self, update: Callable[[], Any]) -> Callable[[], Any]:
        def updated() -> Any:
            assert not self._waiting, "an update of parameters that were not gathered"
            result = update()
            self._waiting = set(self._parameters)
            return result

        return updated

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The gather itself writes into its bucket; a view reads nothing.
        if self._waiting and function.namespace != "c10d" and not function.is_view:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.numel() and tensor.device.type != "meta":
                    self._require_arrived(*span_of(tensor), function)
        return function(*args, **(kwargs or {}))

    def _require_arrived(self, begin: int, end: int, function: Any) -> None:
        for group in self._waiting:
            own = any(first <= begin and end <= behind for first, behind in self._own[group])
            for name, (first, behind) in self._parameters[group]:
                if begin < behind and first < end and not own:
                    raise AssertionError(f"{function} reads {name} before its gather has arrived")


class DepartureGuard(TorchDispatchMode):
    """Raises where a gradient is written between its bucket's departure and the wait for it.

    The wait itself writes the sums: gloo copies them in there. The engine sends buckets early from its second step on.

    Attributes:
        departures: buckets that left before the end of the backward pass.
    """

    def __init__(self, chunks: Any) -> None:
        super().__init__()
        self.departures = 0
        self._away: dict[int, list[tuple[int, int]]] = {}
        for group in (group for chunk in chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups):
            group.start_grad_sync = self._departing(group, group.start_grad_sync)
            group.finish_grad_sync = self._returning(group, group.finish_grad_sync)
        self._is_waiting = False

    def _departing(self, group: Any, send: Callable[..., None]) -> Callable[..., None]:
        def departing(**how: bool) -> None:
            send(**how)
            if not self._is_waiting:
                self._away[id(group)] = [span_of(bucket.grad_data) for bucket in group.buckets]

        return departing

    def _returning(self, group: Any, wait: Callable[..., None]) -> Callable[..., None]:
        def returning(**how: bool) -> None:
            self.departures += self._away.pop(id(group), None) is not None
            self._is_waiting = True
            wait(**how)  # the first step's buckets leave in here
            self._is_waiting = False

        return returning

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._away and function.namespace != "c10d":
            names = [one.name for one in function._schema.arguments if one.alias_info and one.alias_info.is_write]
            given = {**dict(zip((one.name for one in function._schema.arguments), args)), **(kwargs or {})}
            for tensor in tree_leaves([given.get(name) for name in names]):
                begin, end = span_of(tensor) if isinstance(tensor, torch.Tensor) and tensor.numel() else (0, 0)
                for first, behind in (span for spans in self._away.values() for span in spans):
                    assert not (begin < behind and first < end), f"{function} writes a gradient whose bucket has left"
        return function(*args, **(kwargs or {}))


def require_nothing_on_its_way(chunks: Any, optimizer: Any) -> None:
    """Let each update raise where ZeRO has a weight gathered, which it would outdate, or a gradient on its way."""
    update = optimizer.step_with_ready_grads

    def updated() -> Any:
        for unit in (unit for chunk in chunks for unit in chunk._units):
            (group,) = unit._get_fsdp_state()._fsdp_param_groups
            assert group.is_sharded and group._all_gather_result is None, "a gathered weight outlives the update"
            assert not group._post_reduce_event and not group.comm_ctx.reduce_scatter_states, "a sum is not there yet"
        return update()

    optimizer.step_with_ready_grads = updated


def guarded(flags: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Train under the guards of what the flags overlap; return exact records and gathers that were waited for."""
    from megatron_moe.platform import env_vars
    from megatron_moe.training import run as runs

    train, arrivals = runs.train, []
    run = build({**TINY, **FOUR_LAYERS, **BUCKETS, **flags})

    def watched(trainer: Any, callbacks: Any) -> None:
        chunks = trainer.trained.model
        with contextlib.ExitStack() as guards:
            if run.derived.zero_stage > 1:
                require_nothing_on_its_way(chunks, trainer.trained.optimizer)
            if run.parallel.overlap_param_gather:
                gathers = guards.enter_context(ArrivalGuard(chunks, trainer.trained.optimizer))
            if run.parallel.overlap_grad_reduce:
                reductions = guards.enter_context(DepartureGuard(chunks))
            train(trainer, callbacks)
        if run.parallel.overlap_param_gather:
            arrivals.append(gathers.arrivals)
        if run.parallel.overlap_grad_reduce:
            groups = sum(len(chunk.bucket_groups + chunk.expert_parallel_bucket_groups) for chunk in chunks)
            assert reductions.departures == groups * (TINY["train_iters"] - 1)

    in_torch = {env_vars.KERNELS: "torch", env_vars.CPU_KERNELS: "torch"}
    with mock.patch.object(runs, "train", watched), mock.patch.dict(env_vars.chosen, in_torch):
        return runs.recorded(run), sum(arrivals)


FOUR_LAYERS = {**SMALL, "num_layers": 4, "moe_layer_freq": "[0,1,1,1]", "global_batch_size": 8, "clip_grad": 1.0}
BUCKETS = {"use_distributed_optimizer": True, "ddp_bucket_size": 1}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
AT_THE_END = {"overlap_grad_reduce": False, "ddp_bucket_size": None}
TIED = {"untie_embeddings_and_output_weights": False, "moe_shared_expert_gate": True, "mtp_num_layers": 1}
VPP = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ("moe_act", "layernorm", "mla_up_proj")}
READ_BY_MANY = {"ema_decay": 0.9, "health_interval": 1, "eval_interval": 1}
READ_BY_MANY |= {"eval_iters": 1, "log_params_norm": True, "check_precision_interval": 1}
# A bucket of one parameter is waited for by nobody else; larger ones begin with each parameter in turn.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2, tied, predictions, read by many": (2, {**TIED, **READ_BY_MANY}),
    "EP2 x DP2, interleaved, parts again": (4, {**EP2, **VPP, **PARTS}),
    "CP2, all again, loop": (2, {"context_parallel_size": 2, **FULL, "moe_expert_backend": "loop"}),
    "TP2 x DP2, bf16, predictions": (4, {**TP2, "mtp_num_layers": 1, "bf16": True}),
    **{f"DP2, buckets of {size}": (2, {"ddp_bucket_size": size}) for size in (600, 1500, 3000, 6400, 20000)},
    "DP2, whole optimizer, tied": (2, {**TIED, "use_distributed_optimizer": False, "overlap_param_gather": False}),
    "EP2, Muon, QK-clip": (2, {**EP2, "optimizer": "muon", "qk_clip": True, "qk_clip_threshold": 1e-3}),
}


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=list(LAYOUTS)[:2]))
def test_parameters_are_read_when_they_are_there_and_train_as_without_the_overlap(gloo: Any, layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    gathers = flags.get("overlap_param_gather", True)
    without = {"overlap_param_gather": False} if gathers else AT_THE_END  # which would cut the optimizer's shards anew
    wanted, _ = gloo.run(ranks, guarded, flags={**OVERLAPS, **flags, **without})[0]
    found = gloo.run(ranks, guarded, flags={**OVERLAPS, **flags})
    assert found[0][0] == wanted and len(wanted) == TINY["train_iters"]
    if gathers:
        assert all(arrivals > 2 * TINY["train_iters"] for _, arrivals in found)


SHARDED = {"ddp_bucket_size": None, "use_distributed_optimizer": False}
SHARDED_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO 2, tied, predictions, read by many": (2, {**ZERO_2, **TIED, **READ_BY_MANY}),
    "ZeRO 3, EP2 x DP2, bf16, parts again": (4, {**ZERO_3, **EP2, **PARTS, "bf16": True}),
    "ZeRO 3, all again, read by many": (2, {**ZERO_3, **FULL, **READ_BY_MANY}),
}


@pytest.mark.parametrize("layout", rows(SHARDED_LAYOUTS, test=list(SHARDED_LAYOUTS)[:1]))
def test_sharded_weights_are_gathered_after_each_update_and_gradients_are_there_before_it(
    gloo: Any, layout: str
) -> None:
    ranks, flags = SHARDED_LAYOUTS[layout]
    assert len(gloo.run(ranks, guarded, flags={**SHARDED, **flags})[0][0]) == TINY["train_iters"]


def written_late() -> str:
    """What is said of a gradient that is written after the backward pass."""
    from megatron_moe.engine import schedules
    from megatron_moe.moe.router import routers

    reduce = schedules.finalize_model_grads

    def late(model: Any, *args: Any, **options: Any) -> None:
        next(routers(model)).weight.main_grad.add_(1.0)
        reduce(model, *args, **options)

    with mock.patch.object(schedules, "finalize_model_grads", late), pytest.raises(AssertionError) as found:
        guarded({"overlap_grad_reduce": True})
    return str(found.value)


# Of reads before their gathers and of gathered weights that stay, mutations.yaml has one each.
def test_a_gradient_that_is_written_after_its_bucket_has_left_is_named(gloo: Any) -> None:
    assert all("add_.Tensor writes a gradient whose bucket has left" in said for said in gloo.run(2, written_late))
