"""What one rank measures: some optimizer steps of a run's own model, on samples that are the same for every layout.

Everything goes the way of a run: `groups.initialize`, `build_model`, `build_optimizer`, `train_step`. A record holds
plain values and CPU tensors only, so that it can be written by torch.save and read without pickled code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from megatron_moe.config import derived
from megatron_moe.config.schema import Run
from megatron_moe.data.batches import batch_iterators
from megatron_moe.doctor.names import Cut, parameter_places, router_names
from megatron_moe.model.build import build_model
from megatron_moe.moe.routing import choice_scores, group_scores, ranked_values
from megatron_moe.moe.routing_probe import RoutingProbe, choice_margins
from megatron_moe.parallel import groups
from megatron_moe.parallel.seeds import seed_everything
from megatron_moe.training.evaluate import gathered_parameters
from megatron_moe.training.optimizer import build_optimizer, build_scheduler, owned_range
from megatron_moe.training.step import connect, train_step


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        run: has passed `config.rules.check` for the number of ranks, and names vocabulary and global batch.
        padded_vocab_size: rows of the embedding table, the same for every layout.
        steps: optimizer steps.
        gradients_at: the steps, from 1, whose gradients are kept.
        data_seed: which samples.
        masked: whether they hold tokens without a loss.
    """

    run: Run
    padded_vocab_size: int
    steps: int = 3
    gradients_at: tuple[int, ...] = (1,)
    data_seed: int = 0
    masked: bool = True


class MadeUpSamples(Dataset):
    """Random tokens; sample i is a function of (seed, i). With `masked`, tokens without loss stand in every sample, in
    each another number: a mean over micro-batches is then not a mean over tokens."""

    def __init__(self, seed: int, number: int, run: Run, masked: bool = True) -> None:
        assert run.model.vocab_size is not None
        self._seed, self._number, self._masked = seed, number, masked
        self._vocab_size, self._length = run.model.vocab_size, run.model.seq_length

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed((self._seed << 20) + index)
        tokens = torch.randint(0, self._vocab_size, (self._length + 1,), generator=generator)
        share = (0.05 + 0.3 * torch.rand((), generator=generator)) * self._masked
        mask = (torch.rand(self._length, generator=generator) >= share).float()
        mask[0] = 1.0
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": mask,
            "position_ids": torch.arange(self._length),
        }


def join(store: str, rank: int, world_size: int, seconds: float) -> None:
    """Make the default gloo group of `world_size` ranks that meet at the file `store`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )


def measure(request: Request) -> dict[str, Any]:
    """Measure on this rank, in the default process group if there is one; leaves no process group behind.

    Returns:
        place: this rank's coordinates. steps: per step loss, mtp_losses, tokens, grad_norm, committed, and per layer of
        this rank counts and dropped [E] int64, expert_bias [E] fp32 after the step, aux_losses, margin (smallest
        distance of any choice from its alternative). tensors: quantity -> name -> (cuts, this rank's tensor, first and
        last + 1 of the flattened tensor's elements that it knows).
    """
    run, chunks = request.run, []
    assert run.model.vocab_size is not None, "a request says how many tokens there are"
    try:
        pg_collection = groups.initialize(run)
        seed_everything(run)
        chunks = build_model(run, pg_collection, run.model.vocab_size, padded_vocab_size=request.padded_vocab_size)
        optimizer = build_optimizer(run, chunks, pg_collection)
        scheduler = build_scheduler(run, optimizer)
        connect(chunks, optimizer)
        world_size = dist.get_world_size()
        samples = request.steps * derived.global_batch_size(run, world_size)
        batches = batch_iterators(
            MadeUpSamples(request.data_seed, samples, run, request.masked),
            run,
            pg_collection=pg_collection,
            num_chunks=len(chunks),
        )
        tensors = {"initial weight": _weights(chunks)}
        steps = []
        for step in range(1, request.steps + 1):
            probe = StepRecorder(chunks, gradients=step in request.gradients_at)
            result = train_step(
                chunks,
                optimizer,
                scheduler,
                batches,
                num_micro_batches=derived.num_microbatches(run, world_size),
                micro_batch_size=run.training.micro_batch_size,
                seq_length=run.model.seq_length,
                pg_collection=pg_collection,
                probe=probe,
            )
            steps.append(_told(result, probe))
            if probe.gradients:
                tensors[f"gradient, step {step}"] = probe.gradients
        with gathered_parameters(chunks):
            tensors[f"weight after step {request.steps}"] = _weights(chunks)
        return {"place": asdict(groups.rank_facts()), "steps": steps, "tensors": tensors}
    finally:
        # The engine hooks closures over its wrapper into autograd nodes, a cycle that no collector sees; it would keep
        # the model, the groups and their threads.
        for chunk in chunks:
            vars(chunk).clear()
        groups.destroy()


class StepRecorder:
    """Looks at one step, as `training/health.py` does: the routers while they choose, gradients before clipping."""

    def __init__(self, chunks: Sequence[torch.nn.Module], gradients: bool) -> None:
        self._chunks, self._wanted = chunks, gradients
        self.margins = {name: _SmallestMargin() for chunk in chunks for name, _ in router_names(chunk)}
        self.gradients: dict[str, Any] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The step's forward and backward passes run within."""
        with ExitStack() as stack:
            for chunk in self._chunks:
                for name, router in router_names(chunk):
                    router.probe = self.margins[name]
                    stack.callback(setattr, router, "probe", None)
            yield

    def see_gradients(self, optimizer: Any) -> None:
        """Keep every reduced gradient; with a distributed optimizer, the part of it that this rank reduces."""
        if not self._wanted:
            return
        for chunk in self._chunks:
            for place, parameter in parameter_places(chunk):
                gradient = parameter.main_grad.detach().float().clone()  # type: ignore[attr-defined]
                self.gradients[place.name] = (_plain(place.cuts), gradient, *owned_range(optimizer, parameter))


class _SmallestMargin(RoutingProbe):
    """Keeps how near the closest choice of a step came to falling otherwise."""

    def __init__(self) -> None:
        super().__init__(num_tokens=0, num_micro_batches=1)
        self.smallest = float("inf")

    @torch.no_grad()
    def see(self, router: Any, hidden: Tensor, logits: Tensor, scores: Tensor, decision: Any, is_padding: Any) -> None:
        """The least distance between the last expert chosen and the first not chosen, and between groups likewise."""
        ranked = ranked_values(logits, scores, router.options)
        margins = [choice_margins(ranked, router.expert_bias, router.options), _group_margins(ranked, router)]
        self.smallest = min([self.smallest, *(float(m.min()) for m in margins if m.numel())])


def _group_margins(ranked: Tensor, router: Any) -> Tensor:
    """Worst group chosen minus best group left out, per token; empty without groups or where all are chosen."""
    options = router.options
    if options.num_groups is None or options.group_topk is None or options.group_topk == options.num_groups:
        return ranked.new_zeros(0)
    ungrouped = ranked if router.expert_bias is None else ranked + router.expert_bias.to(ranked.dtype)
    best = group_scores(ungrouped, options)
    chosen = torch.isfinite(choice_scores(ranked, router.expert_bias, options)).unflatten(-1, (options.num_groups, -1))
    inside = chosen.any(-1)
    worst_inside = best.masked_fill(~inside, torch.inf).amin(-1)
    return worst_inside - best.masked_fill(inside, -torch.inf).amax(-1)


def _weights(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    return {
        place.name: (_plain(place.cuts), parameter.detach().clone(), 0, parameter.numel())
        for chunk in chunks
        for place, parameter in parameter_places(chunk)
    }


def _plain(cuts: tuple[Cut, ...]) -> tuple[tuple[int, ...], ...]:
    """Cuts as torch.load reads them without pickled code."""
    return tuple(tuple(cut) for cut in cuts)


def _told(result: Any, probe: StepRecorder) -> dict[str, Any]:
    """A step's result as plain values, layers by their names."""
    update = result.router_update
    layers = {}
    for name, counts, dropped, bias, losses in zip(
        probe.margins,
        update.tokens_per_expert,
        update.dropped_per_expert,
        update.expert_bias,
        update.aux_losses,
        strict=True,
    ):
        layers[name] = {
            "counts": counts.cpu(),
            "dropped": torch.zeros_like(counts).cpu() if dropped is None else dropped.cpu(),
            "expert_bias": None if bias is None else bias.cpu(),
            "aux_losses": {loss: float(value) for loss, value in losses.items()},
            "margin": probe.margins[name].smallest,
        }
    return {
        "committed": result.committed,
        "loss": result.loss,
        "tokens": result.tokens,
        "grad_norm": result.grad_norm,
        "mtp_losses": list(result.mtp_losses),
        "layers": layers,
    }
