"""Run a trainer on a rank, and record what it does in the form that `measure.assemble` puts together.

A record holds whole tensors: shards are gathered here, where the trainer's groups are. Copies on several ranks are kept
apart, so that copies that differ are seen, and what they add up to.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_moe_tools.doctor.trainers.protocol import AXES, Held, TestedTrainer
from megatron_moe_tools.doctor.trainers.samples import Case, Sizes, micro_batches
from megatron_moe_tools.doctor.trainers.targets import load_trainer

_UNKNOWN_ROUTER: dict[str, Any] = {
    **dict.fromkeys(("counts", "dropped", "expert_bias", "bias_rate")),
    "aux_losses": {},
    "margin": math.inf,
    "router_error": 0.0,
}


@dataclass(frozen=True)
class TrainerRequest:
    """A case for one trainer.

    Attributes:
        target: a name of `targets.TARGETS`.
        config: what the target reads.
        case: see `Case`; with more than one rank it runs on as many.
        folder: for records and saved trainers.
    """

    target: str
    config: str
    case: Case
    sizes: Sizes
    folder: str

    def as_argument(self) -> dict[str, Any]:
        """Return the request as plain values."""
        return asdict(self)


def run_into(argument: dict[str, Any]) -> str:
    """Run a request that was taken apart; return the path of this rank's record."""
    case, sizes = Case(**argument.pop("case")), Sizes(**argument.pop("sizes"))
    request = TrainerRequest(case=case, sizes=sizes, **argument)
    path = os.path.join(request.folder, f"record{dist.get_rank()}.pt")
    torch.save(run(request, load_trainer(request.target, Path(request.config))), path)
    return path


def run(request: TrainerRequest, trainer: TestedTrainer) -> dict[str, Any]:
    """Run a trainer on this rank, in the default process group.

    Returns:
        A record as `measure.measure` returns it, with `sizes`: axis -> ranks.
    """
    before = dict(os.environ)
    try:
        # What torchrun gives: trainers read it themselves.
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.update(LOCAL_WORLD_SIZE=str(dist.get_world_size()), ACCELERATE_USE_CPU="true")
        os.environ["TRAINER_FOLDER"] = request.folder
        return _run(request, trainer)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(request: TrainerRequest, trainer: TestedTrainer) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    case, steps = request.case, list[dict[str, Any]]()
    _build(trainer, rank, world)
    tensors = {"initial weight": _weights(trainer)}
    place = dict.fromkeys(AXES, (0, 1))
    place |= trainer.place() if hasattr(trainer, "place") else {"dp": (rank, world)}
    batches = []
    for step in range(1, case.steps + 1):
        batches.append(micro_batches(case, request.sizes, step, *place["dp"]))
    for step, batch in enumerate(batches, start=1):
        if case.saved and step > 1:
            trainer.save(request.folder)
            dist.barrier()
            _build(trainer, rank, world)
            trainer.load(request.folder)
        if hasattr(trainer, "prepare") and (step == 1 or case.saved):
            trainer.prepare([batch] if case.saved else batches)
        said = trainer.step(batch)
        if not isinstance(said, Mapping):
            said = {"loss": said}
        tensors[f"gradient, step {step}"] = _recorded(trainer.named_gradients())
        norm = math.nan
        if hasattr(trainer, "update") and (known := trainer.update()) is not None:
            norm = float(known)
        tensors[f"weight after step {step}"] = _weights(trainer)
        # Counts belong to the pass, the bias to the update: both are read here.
        layers = {}
        if hasattr(trainer, "routers"):
            for name, router in trainer.routers().items():
                layers[name] = _UNKNOWN_ROUTER | _plain(router)
        if said.get("aux_losses"):
            layers["all routers"] = _UNKNOWN_ROUTER | {"aux_losses": dict(said["aux_losses"])}
        steps.append(
            {
                "committed": True,
                "loss": float(said["loss"]),
                "token_loss": float(said.get("token_loss", said["loss"])),
                "tokens": None,  # a trainer does not say
                "grad_norm": norm,
                "loss_scale": None,
                "mtp_losses": [],
                "layers": layers,
            }
        )
    ranks, sizes = dict[str, int](), dict[str, int]()
    for axis in AXES:
        ranks[f"{axis}_rank"], sizes[axis] = place[axis]
    return {
        "place": ranks,
        "sizes": sizes,
        "steps": steps,
        "tensors": tensors,
    }


def _build(trainer: TestedTrainer, rank: int, world: int) -> None:
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    trainer.build(rank, world)


def _weights(trainer: TestedTrainer) -> dict[str, Any]:
    return _recorded(trainer.named_weights()) if hasattr(trainer, "named_weights") else {}


@torch.no_grad()
def _recorded(named: Iterable[tuple[str, Tensor | Held | None]]) -> dict[str, Any]:
    """Return tensors as `measure.values_of_masters` returns parts: name -> (cuts, tensor, part).

    None, a weight without a gradient, is kept as an empty tensor.
    """
    found = {}
    for name, tensor in named:
        if isinstance(tensor, tuple):
            cuts, shard, part = tensor
            found[name] = (cuts, shard.detach().float().cpu().clone(), part)
            continue
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if tensor is None:
            tensor = torch.empty(0)
        tensor = tensor.detach().to("cpu", torch.float64 if tensor.dtype == torch.float64 else torch.float32).clone()
        found[name] = ((), tensor, (None, 0, tensor.numel()))
    return found


def _plain(router: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(router)
    for name in ("counts", "dropped", "expert_bias"):
        if isinstance(found.get(name), Tensor):
            found[name] = found[name].detach().cpu().clone()
    return found
