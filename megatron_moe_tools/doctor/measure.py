"""Measure some optimizer steps of a run's model on every rank of a layout, and assemble the whole model from them.

Groups, model, optimizer and steps are made by the functions that a run uses, on samples that are the same for every
layout. A rank's record consists of plain values and CPU tensors, so that it can be written by torch.save and read
without pickled code.

A tensor is assembled from its shards. Where several ranks hold the same elements (data parallel, expert data parallel,
context parallel, a weight that tensor-parallel ranks hold whole, both ends of tied embeddings) their bits must be the
same: each rank took the same reduced gradient and the same step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, default_collate

from megatron_moe.config.schema import Run, build, flatten
from megatron_moe.data.batches import batch_iterators
from megatron_moe.engine.fully_shard import gathered_dtype, own_range
from megatron_moe.engine.optimizer import OwnedPart, named_main_params, owned_part
from megatron_moe.model.build import build_model
from megatron_moe.model.fully_sharded import local
from megatron_moe.model.initialize import global_name, placement
from megatron_moe.moe.experts import GroupedExperts
from megatron_moe.moe.router import TopKRouter
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
from megatron_moe.optim.optimizer import build_optimizer, build_scheduler, main_param
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.platform.protocols import EngineOptimizer
from megatron_moe.training.evaluate import gathered_parameters
from megatron_moe.training.step import ForwardStep, StepResult, connect, forward_step, train_step
from megatron_moe.training.step_sums import pop_mtp_losses
from megatron_moe_tools.launch.local_ranks import LocalRanks

# ---- Shards: which part of which tensor of the whole model a rank holds.


class Cut(NamedTuple):
    """One cut on the way from a full tensor to a rank's shard.

    `axis` is cut into `stride` blocks, each block into `parts` equal parts; the rank has part `part` of every block.
    """

    axis: int
    part: int
    parts: int
    stride: int


class ParameterShard(NamedTuple):
    """A parameter's name in the whole model, which no layout changes, and its cuts; none if the rank holds it whole."""

    name: str
    cuts: tuple[Cut, ...]


def unwrapped(chunk: torch.nn.Module) -> Any:
    """Return the model inside its wrappers, each of which holds what it wraps as `module`."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def parameter_shards(chunk: torch.nn.Module) -> list[tuple[ParameterShard, torch.nn.Parameter]]:
    """Return every parameter of one model chunk of this rank, wrapped or not, with its shard of the whole model.

    Raises:
        TypeError: experts' tensors have no known cut (those of a registered backend that is no GroupedExperts).
    """
    model = unwrapped(chunk)
    tp, whole = model.pg_collection.tp, placement(model)
    found = []
    for name, parameter in model.named_parameters():
        cuts: tuple[Cut, ...] = ()
        if name in whole:
            full_name, split = whole[name]
            if split.axis is not None:
                cuts = (Cut(split.axis, tp.rank(), tp.size(), split.stride),)
        else:
            experts = model.get_submodule(name.rpartition(".")[0])
            if not isinstance(experts, GroupedExperts):
                raise TypeError(f"{name} of {type(experts).__name__}: cuts are known of GroupedExperts only")
            groups, full_name = experts.groups, global_name(model, name)
            cuts = (
                Cut(0, groups.ep_rank, groups.ep_size, 1),
                Cut(parameter.partition_dim, groups.etp_rank, groups.etp_size, 1),
            )
        found.append((ParameterShard(full_name, cuts), parameter))
    return found


def router_names(chunk: torch.nn.Module) -> list[tuple[str, TopKRouter]]:
    """Return every router of one chunk and its layer's name in the whole model, in the order of `routers`."""
    model = unwrapped(chunk)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            found.append((global_name(model, name + ".").removesuffix(".mlp.router."), module))
    return found


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
        self.routers: dict[str, RouterRecord] = {}
        for chunk in chunks:
            for name, _ in router_names(chunk):
                self.routers[name] = RouterRecord()
        self.gradients: dict[str, Any] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the routers; the step's forward and backward passes run in this context."""
        with ExitStack() as stack:
            for chunk in self._chunks:
                for name, router in router_names(chunk):
                    stack.enter_context(router.observed_by(self.routers[name].see))
            yield

    def following(self, forward_step: ForwardStep) -> ForwardStep:
        """Watch nothing of a micro-batch."""
        return forward_step

    def see_gradients(self, optimizer: EngineOptimizer) -> None:
        """Keep every gradient; with a distributed optimizer, the part of it that this rank reduces."""
        if self._wanted:
            self.gradients = values_of_masters(self._chunks, optimizer, lambda master: master.grad)

    def watching_update(self, optimizer: EngineOptimizer) -> AbstractContextManager[None]:
        """Watch nothing of the update."""
        return nullcontext()


@torch.no_grad()
def values_of_masters(
    chunks: Sequence[torch.nn.Module], optimizer: EngineOptimizer, value: Callable[[Tensor], Tensor | None]
) -> dict[str, Any]:
    """Return `value` of every main weight, or of this rank's shard of it, under its parameter's name.

    Frozen parameters have none.

    Returns:
        name -> (cuts, fp32 tensor of the parameter's shape, the `OwnedPart` that it holds). The other elements are not
        initialised.
    """
    masters = dict(named_main_params(chunks, optimizer))
    values = {}
    for chunk in chunks:
        for shard, parameter in parameter_shards(chunk):
            if not parameter.requires_grad:
                continue
            part = owned_part(optimizer, parameter)
            full = torch.empty(parameter.shape, dtype=torch.float32)
            if part.begin < part.end and (own := value(masters[parameter])) is not None:
                there = part.of(full)
                there.copy_(own.view_as(there))
            values[shard.name] = (tuple(map(tuple, shard.cuts)), full, tuple(part))
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
    def see(self, router: TopKRouter, routed: RoutedTokens) -> None:
        """Measure one micro-batch."""
        options, decision, logits = router.options, routed.decision, routed.logits
        exact = router.logits_in_fp64(routed.hidden)
        weights = weigh_experts(exact, scores_from_logits(exact, options), decision.expert_ids, options)
        if decision.kept is not None:
            if options.drop_policy == "probs" and not bool(decision.kept.all()):
                # Of the expert where they are closest: the least weight kept minus the largest dropped. This rank's
                # choices are compared, which are all there are in one process.
                experts, dropped = decision.expert_ids, ~decision.kept
                lowest = weights.new_full((options.num_experts,), torch.inf)
                highest = -lowest
                lowest = lowest.scatter_reduce(0, experts[decision.kept], weights[decision.kept], "amin")
                highest = highest.scatter_reduce(0, experts[dropped], weights[dropped], "amax")
                self.drop_margin = min(self.drop_margin, float((lowest - highest).min()))
            weights = weights.masked_fill(~decision.kept, 0.0)
        self.error = max(self.error, _worst(logits, exact), _worst(decision.probs, weights))
        if options.sinkhorn:  # every rank of the micro-batch is here
            ranked = sinkhorn_scores(logits, routed.micro_batch.is_padding, router.groups.tp_cp)
        else:
            ranked = ranked_values(logits, routed.scores, options)
        self.margins.append(_margins(ranked, router))


def _worst(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def _margins(ranked: Tensor, router: TopKRouter) -> Tensor:
    """Return [T] fp64: K-th minus (K+1)-th of what experts are ranked by, or what groups are told apart by, if less.

    For groups that is the worst chosen one minus the best other. Infinite where a token has no other choice.
    """
    options, bias = router.options, router.expert_bias
    ranks = choice_scores(ranked, bias, options)
    margins = ranked.new_full(ranked.shape[:1], torch.inf, dtype=torch.float64)
    if options.topk < options.num_experts:
        best = ranks.double().topk(options.topk + 1, dim=-1).values
        margins = best[:, -2] - best[:, -1]
    if options.num_groups is None or options.group_topk is None or options.group_topk == options.num_groups:
        return margins
    if bias is not None:
        ranked = ranked + bias.to(ranked.dtype)
    of_groups = group_scores(ranked.double(), options)
    inside = torch.isfinite(ranks).unflatten(-1, (options.num_groups, -1)).any(-1)
    worst_inside = of_groups.masked_fill(~inside, torch.inf).amin(-1)
    return torch.minimum(margins, worst_inside - of_groups.masked_fill(inside, -torch.inf).amax(-1))


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

    def __exit__(self, *_: object) -> None:
        self.ranks.__exit__()

    def measure(self, request: Request, ranks: int) -> list[dict[str, Any]]:
        """Return every rank's record of one layout.

        Raises:
            RankFailure: some rank raised, died or hung; the next request gets new processes.
        """
        options = dict(vars(request))
        argument = {"flags": flatten(options.pop("run")), "options": options, "folder": str(self.ranks.folder)}
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
        if run.moe.moe_alltoall_by_node:
            groups.pretend_machines(1)  # or no token would leave its node
        seed_everything(run)
        chunks = build_model(run, pg_collection, run.model.vocab_size, padded_vocab_size=request.padded_vocab_size)
        with torch.no_grad():
            for chunk in chunks:
                for own in map(local, chunk.parameters()):
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
        for named in tensors.values():  # records of many layouts are assembled and compared in the CPU's memory
            for name, (cuts, tensor, part) in named.items():
                named[name] = (cuts, tensor.cpu(), part)
        place = asdict(groups.rank_facts())
        return {"place": place, "steps": steps, "tensors": tensors, "picked": samples.picked}
    finally:
        # The engine hooks closures over its wrapper into autograd nodes, a cycle that no collector sees; it would keep
        # the model, the groups and their threads.
        for chunk in chunks:
            vars(chunk).clear()
        groups.destroy()


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
            found[shard.name] = (tuple(map(tuple, shard.cuts)), weight, tuple(part))
    return found


def _clearest(chunk: torch.nn.Module, samples: MadeUpSamples, candidates: Sequence[int], wanted: int) -> list[int]:
    """Return the `wanted` candidates whose smallest margin, over all tokens and layers, is largest.

    The model as it is makes forward passes in one process; counts and losses that they leave are removed.
    """
    recorder, margins = StepRecorder([chunk], gradients=False), []
    for begin in range(0, len(candidates), _AT_ONCE):
        numbers = candidates[begin : begin + _AT_ONCE]
        with recorder.watching():
            forward_step(iter([default_collate(list(map(samples.sample, numbers)))]), chunk)
        # each router's last micro-batch, [S x B] in the engine's order
        closest = torch.stack([record.margins[-1] for record in recorder.routers.values()]).amin(dim=0)
        margins.append(closest.view(-1, len(numbers)).amin(dim=0))
    for _, router in router_names(chunk):
        router.reset_counts()
    pop_mtp_losses([chunk])
    best = torch.cat(margins).topk(wanted).indices
    return [candidates[index] for index in sorted(best.tolist())]


def _step_record(result: StepResult, probe: StepRecorder, scaled: bool) -> dict[str, Any]:
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


# ---- Assembling: the whole model from the ranks' records.

_QUANTITIES = {
    "grad_norm": "gradient norm",
    "loss_scale": "loss scale",
    "counts": "token counts",
    "dropped": "dropped choices",
}
Places = list[dict[str, int]]
"""Every rank's coordinates."""
AXES = ("tp", "pp", "cp", "dp", "ep", "etp")


@dataclass(frozen=True)
class LayoutDifference:
    """A quantity that was compared with the oracle's.

    Attributes:
        quantity: what was compared, e.g. "gradient, step 1".
        name: which tensor or layer, where there are several.
        step: the step from 1; 0 for the weights before the first.
        error: relative error; largest absolute difference where bits are compared.
        allowed: tolerance of the error; 0 where bits are compared.
        detail: the values, or what is known about the difference.
    """

    quantity: str
    name: str
    step: int
    error: float
    allowed: float
    detail: str = ""


@dataclass
class AssembledModel:
    """The result of one layout: tensors by quantity and name, and steps as one process would report them.

    differences: copies of a quantity that should have the same bits and do not, and tensors of which no rank had some
    element.
    """

    tensors: dict[str, dict[str, Tensor]]
    steps: list[dict[str, Any]]
    cut_over_tp: set[str] = field(default_factory=set)
    differences: list[LayoutDifference] = field(default_factory=list)

    @property
    def smallest_margin(self) -> float:
        """The smallest distance of any choice of an expert from its alternative."""
        smallest = math.inf
        for step in self.steps:
            for layer in step["layers"].values():
                smallest = min(smallest, layer["margin"])
        return smallest

    def disagree(
        self, quantity: str, name: str, step: int, error: float, ranks: tuple[int, int], places: Places
    ) -> None:
        """Record that two ranks hold a quantity with other bits."""
        one, other = places[ranks[0]], places[ranks[1]]
        axes = []
        for axis in AXES:
            if one[f"{axis}_rank"] != other[f"{axis}_rank"]:
                axes.append(axis.upper())
        along = " and ".join(axes) or "no axis"
        detail = f"ranks {ranks[0]} and {ranks[1]}, which differ along {along}, should hold the same bits"
        self.differences.append(LayoutDifference(f"copies of {quantity}", name, step, error, 0.0, detail))


def absent(quantity: str, name: str, step: int, detail: str) -> LayoutDifference:
    """Return the difference that something is not there."""
    return LayoutDifference(quantity, name, step, math.inf, 0.0, detail)


def matching_views(full: Tensor, local: Tensor, cuts: tuple[Cut, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of views, of a full tensor and of a rank's tensor, that hold the same elements."""
    views = [(full, local)]
    for axis, index, count, stride in cuts:
        cut = []
        for whole, mine in views:
            for block, own in zip(whole.chunk(stride, axis), mine.chunk(stride, axis)):
                cut.append((block.chunk(count, axis)[index], own))
        views = cut
    return views


def full_shape(local: Tensor, cuts: tuple[Cut, ...]) -> list[int]:
    """Return the shape of the tensor that `local` was cut out of."""
    shape = list(local.shape)
    for cut in cuts:
        shape[cut.axis] *= cut.parts
    return shape


def assemble(records: Sequence[dict[str, Any]]) -> AssembledModel:
    """Assemble the ranks' records of one layout.

    Steps are as rank 0 reports them, with the layers of all ranks; what several ranks report must be equal.
    """
    places = [record["place"] for record in records]
    whole = AssembledModel({}, [])
    for quantity in records[0]["tensors"]:
        owners: dict[str, list[_Owner]] = {}
        for rank, record in enumerate(records):
            for name, (cuts, shard, part) in record["tensors"][quantity].items():
                owner = _Owner(rank, tuple(map(Cut._make, cuts)), shard, OwnedPart(*part))
                owners.setdefault(name, []).append(owner)
        whole.tensors[quantity] = {}
        for name, found in owners.items():
            whole.tensors[quantity][name] = _assemble_tensor(whole, quantity, name, found, places)
    for number, steps in enumerate(zip(*(record["steps"] for record in records)), start=1):
        joined = {**steps[0], "layers": {}}
        first_rank: dict[str, int] = {}
        for rank, step in enumerate(steps):
            for key in ("loss", "tokens", "grad_norm", "committed", "loss_scale", "mtp_losses"):
                if step[key] != joined[key] and step[key] == step[key]:
                    whole.disagree(_QUANTITIES.get(key, key), "", number, math.inf, (0, rank), places)
            for name, layer in step["layers"].items():
                if name not in joined["layers"]:
                    joined["layers"][name], first_rank[name] = dict(layer), rank
                    continue
                known, ranks = joined["layers"][name], (first_rank[name], rank)
                known["margin"] = min(known["margin"], layer["margin"])
                known["router_error"] = max(known["router_error"], layer["router_error"])
                for key in ("counts", "dropped", "expert_bias"):
                    if known[key] is not None and not torch.equal(known[key], layer[key]):
                        whole.disagree(_QUANTITIES.get(key, key), name, number, math.inf, ranks, places)
        whole.steps.append(joined)
    return whole


def step_of(quantity: str) -> int:
    """Return the step that a tensor quantity belongs to; 0 for what there was before the first."""
    last = quantity.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0


class _Owner(NamedTuple):
    """A rank that holds some of a tensor: the cuts of its shard, the shard, and the part of it that the rank knows."""

    rank: int
    cuts: tuple[Cut, ...]
    local: Tensor
    part: OwnedPart


def _assemble_tensor(whole: AssembledModel, quantity: str, name: str, owners: list[_Owner], places: Places) -> Tensor:
    by_cut: dict[tuple[Cut, ...], list[_Owner]] = {}
    for owner in owners:
        by_cut.setdefault(owner.cuts, []).append(owner)
    shape = full_shape(owners[0].local, owners[0].cuts)
    full = torch.full(shape, torch.nan, dtype=owners[0].local.dtype)
    for cuts, holders in by_cut.items():
        if len(cuts) == 1 and cuts[0].parts > 1:
            whole.cut_over_tp.add(name)
        local = torch.full_like(holders[0].local, torch.nan)
        source = torch.full(local.shape, -1, dtype=torch.int16)
        for rank, _, tensor, part in holders:
            mine, other, known = part.of(tensor), part.of(local), part.of(source)
            twice = known >= 0
            unlike = twice & (mine != other) & ~(mine.isnan() & other.isnan())
            if bool(unlike.any()):
                difference = (mine.double() - other.double()) * unlike
                error = float(difference.norm() / other.double().norm().clamp_min(1e-30))
                ranks = (int(known[unlike][0]), rank)
                whole.disagree(quantity, name, step_of(quantity), error, ranks, places)
            other.copy_(torch.where(twice, other, mine))
            known.copy_(torch.where(twice, known, rank))
        if bool((source < 0).any()):
            whole.differences.append(absent(quantity, name, step_of(quantity), "no rank has all of it"))
        for target, own in matching_views(full, local, cuts):
            target.copy_(own)
    return full
