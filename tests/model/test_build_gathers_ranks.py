"""With `--overlap-param-gather` no parameter is read before its gather has arrived.

The engine waits for a bucket where the module of one of its parameters is called. `ArrivalGuard` watches every
operation of torch in a run, so that a parameter that is read past its module's `__call__` is found.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_moe.config.schema import build
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import EP2, PP2, TP2
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


def guarded(flags: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Train under the guard, where the flags gather later; return exact records and gathers that were waited for."""
    from megatron_moe.platform import env_vars
    from megatron_moe.training import run as runs

    train, arrivals = runs.train, []

    def watched(trainer: Any, callbacks: Any) -> None:
        if not flags.get("overlap_param_gather"):
            return train(trainer, callbacks)
        with ArrivalGuard(trainer.trained.model, trainer.trained.optimizer) as guard:
            train(trainer, callbacks)
        arrivals.append(guard.arrivals)

    in_torch = {env_vars.KERNELS: "torch", env_vars.CPU_KERNELS: "torch"}
    with mock.patch.object(runs, "train", watched), mock.patch.dict(env_vars.chosen, in_torch):
        return runs.recorded(build({**TINY, **FOUR_LAYERS, **BUCKETS, **flags})), sum(arrivals)


FOUR_LAYERS = {**SMALL, "num_layers": 4, "moe_layer_freq": "[0,1,1,1]", "global_batch_size": 8, "clip_grad": 1.0}
BUCKETS = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 1}
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
    "EP2, Muon, QK-clip": (2, {**EP2, "optimizer": "muon", "qk_clip": True, "qk_clip_threshold": 1e-3}),
}


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=list(LAYOUTS)[:2]))
def test_parameters_are_read_when_they_are_there_and_train_as_without_the_overlap(gloo: Any, layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    wanted, _ = gloo.run(ranks, guarded, flags=flags)[0]
    found = gloo.run(ranks, guarded, flags={**flags, "overlap_param_gather": True})
    assert found[0][0] == wanted and len(wanted) == TINY["train_iters"]
    assert all(arrivals > 2 * TINY["train_iters"] for _, arrivals in found)


def read_past_its_hook(flags: dict[str, Any]) -> str:
    """What the guard says where a router computes without its `__call__`."""
    from megatron_moe.moe.router import TopKRouter

    with mock.patch.object(TopKRouter, "__call__", TopKRouter.forward), pytest.raises(AssertionError) as found:
        guarded(flags)
    return str(found.value)


def test_the_guard_names_a_parameter_that_is_read_too_early(gloo: Any) -> None:
    for said in gloo.run(2, read_past_its_hook, flags={"overlap_param_gather": True}):
        assert "mlp.router.weight before its gather has arrived" in said
