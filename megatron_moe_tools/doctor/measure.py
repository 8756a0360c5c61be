"""Measure some optimizer steps of a run's model on one rank, on samples that are the same for every layout.

Groups, model, optimizer and steps are made by the functions that a run uses. A record consists of plain values and CPU
tensors, so that it can be written by torch.save and read without pickled code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, default_collate

from megatron_moe.config.schema import Run, build, flatten
from megatron_moe.data.batches import batch_iterators
from megatron_moe.engine.fully_shard import gathered_dtype, own_range
from megatron_moe.model.build import build_model
from megatron_moe.model.fully_sharded import local
from megatron_moe.moe.routing import (
    RoutedTokens,
    choice_scores,
    group_scores,
    ranked_values,
    scores_from_logits,
    sinkhorn_scores,
    weigh_experts,
)
from megatron_moe.moe.routing_probe import RoutingProbe
from megatron_moe.optim.optimizer import (
    OwnedPart,
    build_optimizer,
    build_scheduler,
    main_param,
    named_main_params,
    owned_part,
)
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.training.evaluate import gathered_parameters
from megatron_moe.training.step import connect, forward_step, train_step
from megatron_moe.training.step_sums import pop_mtp_losses
from megatron_moe_tools.doctor.assemble import parameter_shards, router_names
from megatron_moe_tools.launch.local_ranks import LocalRanks

# ---- What is recorded of a step: gradients, each router's rounding errors and its closest choices.


class StepRecorder:
    """A step probe, like `HealthProbe`: it observes routers while they choose, and the gradients.

    Attributes:
        routers: a record per router, by its layer's name.
        gradients: name -> (cuts, gradient, first and last + 1 element that this rank knows) of every parameter, as the
            optimizer uses it before clipping: fp32, reduced, divided by the loss scale.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], gradients: bool) -> None:
        self._chunks, self._wanted = chunks, gradients
        self.routers = {name: RouterRecord() for chunk in chunks for name, _ in router_names(chunk)}
        self.gradients: dict[str, Any] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the routers; the step's forward and backward passes run in this context."""
        with ExitStack() as stack:
            for chunk in self._chunks:
                for name, router in router_names(chunk):
                    stack.enter_context(router.observed_by(self.routers[name].see))
            yield

    def see_gradients(self, optimizer: Any) -> None:
        """Keep every gradient; with a distributed optimizer, the part of it that this rank reduces."""
        if self._wanted:
            self.gradients = values_of_masters(self._chunks, optimizer, lambda master: master.grad)

    def watching_update(self, optimizer: Any) -> AbstractContextManager[None]:
        """Watch nothing of the update."""
        return nullcontext()


@torch.no_grad()
def values_of_masters(
    chunks: Sequence[torch.nn.Module], optimizer: Any, value: Callable[[Tensor], Tensor | None]
) -> dict[str, Any]:
    """Return `value` of every main weight, or of this rank's shard of it, under its parameter's name.

    Frozen parameters have none.

    Returns:
        name -> (cuts, fp32 tensor of the parameter's shape, the `OwnedPart` that it holds). The other elements are not
        initialised.
    """
    masters = {id(parameter): master for parameter, master in named_main_params(chunks, optimizer)}
    values = {}
    for chunk in chunks:
        for shard, parameter in parameter_shards(chunk):
            if not parameter.requires_grad:
                continue
            part = owned_part(optimizer, parameter)
            full = torch.empty(parameter.shape, dtype=torch.float32)
            if part.begin < part.end and (own := value(masters[id(parameter)])) is not None:
                there = part.of(full)
                there.copy_(own.view_as(there))
            values[shard.name] = (tuple(tuple(cut) for cut in shard.cuts), full, tuple(part))
    return values


class RouterRecord(RoutingProbe):
    """A record of what one router did in a step.

    Attributes:
        margins: per micro-batch [T] fp64, the distance of each token's choice from its alternative; infinite where
            there is none.
        drop_margin: the same for choices dropped by a capacity, by weight.
        error: largest relative error of logits and weights, against fp64 from the same hidden states and weight: the
            cost of a lower precision inside the router, which a comparison of two runs in that precision cannot show.
    """

    def __init__(self) -> None:
        super().__init__(num_tokens=0, num_micro_batches=1)
        self.margins: list[Tensor] = []
        self.drop_margin, self.error = float("inf"), 0.0

    @property
    def smallest(self) -> float:
        """The smallest of all margins."""
        return min([self.drop_margin, *(float(margins.min()) for margins in self.margins)])

    @torch.no_grad()
    def see(self, router: Any, routed: RoutedTokens) -> None:
        """Measure one micro-batch."""
        options, decision, logits = router.options, routed.decision, routed.logits
        exact = F.linear(routed.hidden.double(), router.weight.double())
        weights = weigh_experts(exact, scores_from_logits(exact, options), decision.expert_ids, options)
        if decision.kept is not None:
            self.drop_margin = min(self.drop_margin, _drop_margin(weights, decision, options))
            weights = weights.masked_fill(~decision.kept, 0.0)
        self.error = max(self.error, _worst(logits, exact), _worst(decision.probs, weights))
        if options.sinkhorn:  # every rank of the micro-batch is here
            ranked = sinkhorn_scores(logits, routed.micro_batch.is_padding, router.groups.tp_cp)
        else:
            ranked = ranked_values(logits, routed.scores, options)
        self.margins.append(torch.minimum(_choice_margins(ranked, router), _group_margins(ranked, router)))


def _worst(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def _choice_margins(ranked: Tensor, router: Any) -> Tensor:
    """Return [T] fp64: K-th minus (K+1)-th of what experts are ranked by; infinite where a token has no further one."""
    options = router.options
    if options.topk == options.num_experts:
        return ranked.new_full(ranked.shape[:1], torch.inf, dtype=torch.float64)
    best = choice_scores(ranked, router.expert_bias, options).double().topk(options.topk + 1, dim=-1).values
    return best[:, -2] - best[:, -1]


def _group_margins(ranked: Tensor, router: Any) -> Tensor:
    """Return [T] fp64: worst chosen group minus best other group; infinite without groups or where all are chosen."""
    options = router.options
    if options.num_groups is None or options.group_topk is None or options.group_topk == options.num_groups:
        return ranked.new_full(ranked.shape[:1], torch.inf, dtype=torch.float64)
    ungrouped = ranked if router.expert_bias is None else ranked + router.expert_bias.to(ranked.dtype)
    best = group_scores(ungrouped.double(), options)
    chosen = torch.isfinite(choice_scores(ranked, router.expert_bias, options)).unflatten(-1, (options.num_groups, -1))
    inside = chosen.any(-1)
    worst_inside = best.masked_fill(~inside, torch.inf).amin(-1)
    return worst_inside - best.masked_fill(inside, -torch.inf).amax(-1)


def _drop_margin(weights: Tensor, decision: Any, options: Any) -> float:
    """Return the least weight kept minus the largest dropped, of the expert where they are closest.

    This rank's choices are compared, which are all there are in one process. Infinite where nothing is dropped, or not
    by weight.
    """
    if options.drop_policy != "probs" or bool(decision.kept.all()):
        return float("inf")
    experts, kept = decision.expert_ids.flatten(), decision.kept.flatten()
    lowest = weights.new_full((options.num_experts,), torch.inf)
    lowest = lowest.scatter_reduce(0, experts[kept], weights.flatten()[kept], "amin")
    highest = weights.new_full((options.num_experts,), -torch.inf)
    highest = highest.scatter_reduce(0, experts[~kept], weights.flatten()[~kept], "amax")
    return float((lowest - highest).min())


# ---- The measurement.

_AT_ONCE = 128


@dataclass(frozen=True)
class Request:
    """What a rank is asked to measure.

    Attributes:
        run: a run that has passed `config.rules.check` for the number of ranks, and names vocabulary and global batch.
        padded_vocab_size: rows of the embedding table, the same for every layout.
        steps: optimizer steps.
        gradients_at: the steps, from 1, whose gradients are kept.
        data_seed: seed of the samples.
        masked: whether samples hold tokens without a loss.
        initial_dtype: the initial weights are rounded to this dtype, whatever the run's own: a run in fp32 then begins
            with the weights of one in half precision.
        candidates: in one process, number of samples from which each step's batch is picked: those with the largest
            margins of their choices of experts. 0: none is picked, the first ones are taken.
        picked: the samples to take in turn, from an earlier record with `candidates`; empty: all, in order.
    """

    run: Run
    padded_vocab_size: int
    steps: int = 3
    gradients_at: tuple[int, ...] = (1,)
    data_seed: int = 0
    masked: bool = True
    initial_dtype: str = "float32"
    candidates: int = 0
    picked: tuple[int, ...] = ()


class MadeUpSamples(Dataset):
    """A dataset of random tokens; sample i is a function of (seed, i).

    With `masked`, every sample has tokens without a loss, each another number of them: a mean over micro-batches then
    differs from a mean over tokens.

    Attributes:
        picked: the samples that the dataset consists of, all if empty; it may grow while the dataset is read.
    """

    def __init__(self, seed: int, number: int, run: Run, masked: bool = True, picked: Sequence[int] = ()) -> None:
        assert run.model.vocab_size is not None
        self._seed, self._number, self._masked = seed, number, masked
        self._vocab_size, self._length = run.model.vocab_size, run.model.seq_length
        self.picked = list(picked)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.sample(self.picked[index] if self.picked else index)

    def sample(self, number: int) -> dict[str, Tensor]:
        """Return sample `number`, picked or not."""
        generator = torch.Generator().manual_seed((self._seed << 20) + number)
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


class MeasuringRanks:
    """A context with as many processes of this machine as the largest layout needs, each with one thread.

    Args:
        number: number of processes.
        seconds: a layout that takes longer has hung.
    """

    def __init__(self, number: int, seconds: float = 120.0) -> None:
        self.ranks = LocalRanks(measure_into, number, seconds=seconds, threads=1)

    def __enter__(self) -> MeasuringRanks:
        return self

    def __exit__(self, *_: Any) -> None:
        self.ranks.__exit__()

    def measure(self, request: Request, ranks: int) -> list[dict[str, Any]]:
        """Return every rank's record of one layout.

        Raises:
            RankFailure: some rank raised, died or hung; the next request gets new processes.
        """
        options = {name: value for name, value in vars(request).items() if name != "run"}
        argument = {"flags": flatten(request.run), "options": options, "folder": str(self.ranks.folder)}
        return [torch.load(path, weights_only=True) for path in self.ranks.call(argument, ranks)]


def measure_into(argument: dict[str, Any]) -> str:
    """Measure a request that was taken apart into plain values; return the path of this rank's record."""
    path = os.path.join(argument["folder"], f"record{os.environ['RANK']}.pt")
    torch.save(measure(Request(build(argument["flags"]), **argument["options"])), path)
    return path


def measure(request: Request) -> dict[str, Any]:
    """Measure on this rank, in the default process group if there is one; all process groups are destroyed.

    Returns:
        A record with these keys. place: this rank's coordinates. steps: per step loss, mtp_losses, tokens, grad_norm,
        committed, loss_scale (the next step's; None except in fp16), and per layer of this rank counts and dropped [E]
        int64, expert_bias [E] fp32 after the step, aux_losses, margin (smallest distance of any choice from its
        alternative), router_error (see `RouterRecord`). tensors: quantity -> name -> (cuts, this rank's tensor, first
        and last + 1 of the flattened tensor's elements that it knows); "weight after" is the optimizer's, "rounded
        weight after" the model's where that is not fp32. picked: the samples that were picked.
    """
    run, chunks = request.run, []
    assert run.model.vocab_size is not None, "a request says how many tokens there are"
    try:
        pg_collection = groups.initialize(run)
        seed_everything(run)
        chunks = build_model(run, pg_collection, run.model.vocab_size, padded_vocab_size=request.padded_vocab_size)
        with torch.no_grad():
            for own in (local(parameter) for chunk in chunks for parameter in chunk.parameters()):
                own.copy_(own.to(getattr(torch, request.initial_dtype)))
        optimizer = build_optimizer(run, chunks, pg_collection)
        scheduler = build_scheduler(run, optimizer)
        connect(chunks, optimizer)
        world_size = dist.get_world_size()
        batch = run.derived.global_batch_size(world_size)
        samples = MadeUpSamples(request.data_seed, request.steps * batch, run, request.masked, request.picked)
        batches = batch_iterators(samples, run, pg_collection=pg_collection)
        tensors = {"initial weight": _weights(chunks)}
        steps = []
        for step in range(1, request.steps + 1):
            if request.candidates:
                first = (step - 1) * request.candidates
                samples.picked += _clearest(chunks[0], samples, range(first, first + request.candidates), batch)
            probe = StepRecorder(chunks, gradients=step in request.gradients_at)
            result = train_step(
                chunks,
                optimizer,
                scheduler,
                batches,
                num_micro_batches=run.derived.num_microbatches(world_size),
                micro_batch_size=run.training.micro_batch_size,
                seq_length=run.model.seq_length,
                pg_collection=pg_collection,
                probe=probe,
            )
            steps.append(_step_record(result, probe, run.precision.fp16))
            if probe.gradients:
                tensors[f"gradient, step {step}"] = probe.gradients
        after = f"weight after step {request.steps}"
        with gathered_parameters(chunks):
            tensors[after] = last = _weights(chunks)
        if run.derived.params_dtype_name != "float32":
            tensors[after] = values_of_masters(chunks, optimizer, lambda main: main_param(optimizer, main))
            tensors[f"rounded {after}"] = last
        place = asdict(groups.rank_facts())
        return {"place": place, "steps": steps, "tensors": _on_host(tensors), "picked": samples.picked}
    finally:
        # The engine hooks closures over its wrapper into autograd nodes, a cycle that no collector sees; it would keep
        # the model, the groups and their threads.
        for chunk in chunks:
            vars(chunk).clear()
        groups.destroy()


def _on_host(tensors: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the tensors in the CPU's memory, where records of many layouts are put together and compared."""
    return {
        quantity: {name: (cuts, tensor.cpu(), part) for name, (cuts, tensor, part) in named.items()}
        for quantity, named in tensors.items()
    }


@torch.no_grad()
def _weights(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Return weights as `values_of_masters` does; of a fully sharded one, what this rank has."""
    found = {}
    for chunk in chunks:
        for shard, parameter in parameter_shards(chunk):
            if isinstance(parameter, DTensor):
                weight = torch.empty(parameter.shape, dtype=gathered_dtype(parameter))
                part = OwnedPart(*own_range(parameter))
                part.of(weight).copy_(local(parameter))
            else:
                weight, part = parameter.detach().clone(), OwnedPart(None, 0, parameter.numel())
            found[shard.name] = (tuple(tuple(cut) for cut in shard.cuts), weight, tuple(part))
    return found


def _clearest(chunk: torch.nn.Module, samples: MadeUpSamples, candidates: Sequence[int], wanted: int) -> list[int]:
    """Return the `wanted` candidates whose smallest margin, over all tokens and layers, is largest.

    The model as it is makes forward passes in one process; counts and losses that they leave are removed.
    """
    recorder, margins = StepRecorder([chunk], gradients=False), []
    for begin in range(0, len(candidates), _AT_ONCE):
        numbers = candidates[begin : begin + _AT_ONCE]
        with recorder.watching():
            forward_step(iter([default_collate([samples.sample(number) for number in numbers])]), chunk)
        # each router's last micro-batch, [S x B] in the engine's order
        closest = torch.stack([record.margins[-1] for record in recorder.routers.values()]).amin(dim=0)
        margins.append(closest.view(-1, len(numbers)).amin(dim=0))
    for _, router in router_names(chunk):
        router.reset_counts()
    pop_mtp_losses([chunk])
    best = torch.cat(margins).topk(wanted).indices
    return [candidates[index] for index in sorted(best.tolist())]


def _step_record(result: Any, probe: StepRecorder, scaled: bool) -> dict[str, Any]:
    """Return a step's result as plain values, layers by their names."""
    update = result.router_update
    layers = {}
    for name, counts, dropped, bias, losses in zip(
        probe.routers,
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
            "margin": probe.routers[name].smallest,
            "router_error": probe.routers[name].error,
        }
    return {
        "committed": result.committed,
        "loss": result.loss,
        "tokens": result.tokens,
        "grad_norm": result.grad_norm,
        "loss_scale": result.next_loss_scale if scaled else None,
        "mtp_losses": list(result.mtp_losses),
        "layers": layers,
    }
