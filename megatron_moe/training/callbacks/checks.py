"""Checks of a run: its dtypes, the audit of one step, the replicas of each weight, and whether every weight trains.

Every copy of a weight and of expert_bias has the same bits on all its ranks. A bit that flips in one rank's memory, or
a collective that goes wrong on one of them, makes replicas drift apart silently: from then on the ranks train different
models. The ranks that have a copy of a tensor compare its hash; the tensor itself is not sent.

A weight without a gradient is skipped by the optimizer, and an update that never reaches a weight is no error either:
the loss falls all the same. So the first steps of a process are watched, for every weight and expert (`Untrained`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_moe import platform
from megatron_moe.checkpoint.errors import all_gather_object
from megatron_moe.checkpoint.state import TrainState, unwrapped
from megatron_moe.config import module_names
from megatron_moe.config.errors import RunFault
from megatron_moe.config.schema import Run
from megatron_moe.engine.optimizer import OwnedPart, named_main_params, owned_part, parts
from megatron_moe.io.texts import listed
from megatron_moe.model.fully_sharded import local
from megatron_moe.model.initialize import global_name
from megatron_moe.moe.experts import LocalExperts
from megatron_moe.moe.router import TopKRouter
from megatron_moe.optim.optimizer import main_param, packing_adam
from megatron_moe.platform.hardware import HostCopy
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.state_checks import global_names, named_expert_biases
from megatron_moe.training.step import StepResult
from megatron_moe.training.step_sums import sum_over_ranks

StepAudit = Callable[[Run, list[torch.nn.Module], Callable[[str], None]], AbstractContextManager[None]]
"""What `--audit-precision` puts around a step: from the run, its model and the reporter's message, a context."""


class PrecisionCheck(Callback):
    """Checks all dtypes of model and optimizer at the end of each `--check-precision-interval`."""

    def after_step(self, step: Step, result: StepResult) -> None:
        """Check the dtypes where that is due.

        Raises:
            PrecisionError: on this rank only: the launcher ends the others.
        """
        interval = self.trainer.run.precision.check_precision_interval
        if interval and step.iteration % interval == 0:
            self.trainer.check_precision("training")


class PrecisionAudit(Callback):
    """Traces the second step of the process: what a process does once is done in the first."""

    def __init__(self, audit: StepAudit | None) -> None:
        self._audit = audit
        self._iteration = 0

    def notes(self) -> Sequence[str]:
        """Say where the run ends before its second step."""
        self._iteration = self.trainer.progress.iteration + 2
        if not self.trainer.run.precision.audit_precision:
            self._audit = None
        if self._audit is None or self._iteration <= (self.trainer.run.training.train_iters or 0):
            return ()
        return ["--audit-precision traces the second step of a process, and only one is left: no audit"]

    def before_step(self, step: Step) -> None:
        """Trace the step from here on."""
        if self._audit is not None and step.iteration == self._iteration:
            trainer = self.trainer
            step.contexts.enter_context(self._audit(trainer.run, list(trainer.trained.model), trainer.reporter.message))


# Odd, so that a changed bit changes the sum modulo 2^64 whatever it is multiplied with; 2^64 over the golden ratio.
_ODD = 0x9E3779B97F4A7C15 - 2**64
_CHUNK = 2**20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _pieces(rows: Tensor) -> Sequence[Tensor]:
    """Split rows, [k, n], into some columns each, for what takes several times the memory."""
    return rows.split(max(_CHUNK // len(rows), 1), dim=1)


@torch.no_grad()
def bit_hashes(tensors: Sequence[Tensor]) -> Tensor:
    """Return for each row of these tensors, [k, n] each, a hash of its bits: int64 [sum of k], on the device.

    It is the sum modulo 2^64 of the row's words, each times an odd number of its own. Any single element that differs
    changes it; of rows that differ in more, one in 2^60 or so escapes.
    It depends on the shape of the tensor, and on nothing else.
    """
    longest = max((part.shape[1] for tensor in tensors for part in _pieces(tensor)), default=0)
    index = torch.arange(longest, dtype=torch.int64, device=platform.device()) * _ODD
    # Twice anything plus one is odd; the shift brings high bits down, where neighbours differ.
    odd = 2 * (index ^ (index >> 29)) + 1
    found = [index[:0]]
    for tensor in tensors:
        total = torch.zeros(len(tensor), dtype=torch.int64, device=platform.device())
        for part in _pieces(_words(tensor)):
            near = part.to(platform.device()).to(torch.int64)
            total = total * _ODD + (near * odd[: near.shape[1]]).sum(dim=1)
        found.append(total)
    return torch.cat(found)


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor, [k, n], as integers: of 8 bytes, if rows have a multiple of these."""
    bits, each = tensor.detach().reshape(-1), 8 // tensor.element_size()
    kind = torch.int64
    if tensor.shape[1] % each:
        kind = _INTEGERS[tensor.element_size()]
    elif bits.storage_offset() % each:  # torch views aligned memory alone
        bits = bits.clone()
    return bits.view(kind).view(len(tensor), -1)


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor whose copies differ: its name, and (rank, hash) of each rank of its group."""

    name: str
    hashes: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        ranks_of: dict[int, list[int]] = {}
        for rank, value in self.hashes:
            ranks_of.setdefault(value, []).append(rank)
        groups = sorted(ranks_of.values(), key=len, reverse=True)
        every = [rank for rank, _ in self.hashes]
        if len(groups) > 1 and len(groups[0]) > len(groups[1]):
            odd = [rank for rank in every if rank not in groups[0]]
            whose = f"those of ranks {listed(odd, 8)} differ"
            if len(odd) == 1:
                whose = f"that of rank {odd[0]} differs"
            return f"{self.name}: of {len(every)} copies (ranks {listed(every, 8)}) {whose} from the others"
        halves = " and ".join(listed(group, 8) for group in groups)
        return f"{self.name}: the copies of ranks {halves} differ, with no majority"


class Replicas(Callback):
    """Compares all replicas every `--check-weight-hash-across-dp-replicas-interval`, before a step changes a weight."""

    def before_update(self, step: Step) -> None:
        """Compare the replicas where that is due. Collective over all ranks.

        Raises:
            RunFault: on every rank, naming the first tensors and the ranks whose copy differs from the others'.
        """
        interval = self.trainer.run.faults.check_weight_hash_across_dp_replicas_interval
        if not interval or step.iteration % interval:
            return
        found = compare_replicas(self.trainer.trained)
        if not sum_over_ranks(torch.tensor([len(found)], device=platform.device()))[0]:
            return
        # Every rank of a group found the same.
        differences = list(dict.fromkeys(chain.from_iterable(all_gather_object(found))))
        shown = "; ".join(map(str, differences[:4]))
        if len(differences) > 4:
            shown += f"; and {len(differences) - 4} more tensors"
        raise RunFault(
            f"iteration {step.iteration}: replicas differ: {shown}. The ranks train different models: continue from a "
            "checkpoint before the last comparison that was well; a rank that is named again has bad memory"
        )


def compare_replicas(trained: TrainState) -> list[ReplicaDifference]:
    """Compare all replicas that this rank has a copy of; return those that differ. Collective over all ranks.

    Parameters have to be gathered. Dense weights are compared over data and context parallel ranks, those that tensor
    parallelism does not split over its ranks too; experts over theirs; expert_bias over every rank of the stage; a
    tied embedding between the first and the last stage.
    """
    found: list[ReplicaDifference] = []
    for group, named in _by_group(trained):
        if group is None or group.size() == 1 or not named:
            continue
        own = bit_hashes([tensor.reshape(1, -1) for _, tensor in named])
        every = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(every, own, group=group)
        table = torch.stack(every)
        ranks = dist.get_process_group_ranks(group)
        for column in (table != table[0]).any(dim=0).nonzero().flatten().tolist():
            found.append(ReplicaDifference(named[column][0], tuple(zip(ranks, table[:, column].tolist()))))
    return found


def _by_group(trained: TrainState) -> Iterator[tuple[Any, list[tuple[str, Tensor]]]]:
    """Yield each group of ranks that have copies, with the tensors copied, in the same order on all of its ranks."""
    groups = trained.pg_collection
    split: list[tuple[str, Tensor]] = []
    whole, experts, biases, tied, shards = split[:], split[:], split[:], split[:], split[:]
    for chunk in trained.model:
        shown = global_names(chunk)
        for name, parameter in chunk.named_parameters():
            entry = (shown[name], local(parameter))
            if isinstance(parameter, DTensor):
                # Data-parallel ranks have different shards, tensor-parallel ones the same of what they all hold.
                if getattr(parameter, "allreduce", True) and not getattr(parameter, "tensor_model_parallel", False):
                    shards.append(entry)
            elif not getattr(parameter, "allreduce", True):
                experts.append(entry)
            elif getattr(parameter, "tensor_model_parallel", False):
                split.append(entry)
            else:
                whole.append(entry)
            if getattr(parameter, "shared_embedding", False):
                tied.append(("the tied embedding", local(parameter)))
        for name, bias in named_expert_biases(chunk, shown):
            biases.append((f"{name}.expert_bias", bias))
    yield groups.dp_cp, split
    yield groups.tp_dp_cp, whole + biases
    yield groups.expt_dp, experts
    yield groups.tp, shards
    if trained.pg_collection.pp.size() > 1:
        yield groups.embd, tied[:1]


# ---- Weights that do not train.

FIRST_STEPS, RARE_STEPS = 10, 100
"""Committed steps after which weights are judged, and after which a weight is that may only have had bad luck."""

SMALL_UPDATE = 0.01
"""Of the learning rate: an update of Adam's or Muon's is rarely smaller for all elements of a weight."""

TRAINABLE, OPTIMIZED, GRADIENT, MOVED, MOVABLE, LOST, TOKENS = range(7)
"""What ranks see of a weight: it requires a gradient; an optimizer has it; a gradient of it was not 0; its main weight
changed; a small update would change that; it is not its main weight rounded; its expert got tokens."""


@dataclass(frozen=True)
class WatchedTensor:
    """A trained tensor of the whole model, and the numbers of its weights: one for each expert, else one."""

    name: str
    first: int
    end: int

    @property
    def is_of_experts(self) -> bool:
        """Whether it has a weight for each expert."""
        return self.end - self.first > 1


@dataclass(frozen=True)
class WatchedRows:
    """Weights, or a piece of one, that lie one after the other in what this rank updates of a parameter.

    first, count: number of the first one, and how many. begin, end: their elements in `own`, the part that the rank
    updates. main: that part's main param, in the optimizer's parameter group number `group`; None: in no optimizer.
    """

    first: int
    count: int
    begin: int
    end: int
    parameter: torch.nn.Parameter
    own: OwnedPart
    main: Tensor | None
    group: int | None

    def of_own(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor that has this rank's part alone, such as the main param: [count, n]."""
        return tensor.detach().reshape(-1)[self.begin : self.end].view(self.count, -1)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor like the parameter, of a sharded one like the shard: [count, n]."""
        if not isinstance(self.parameter, DTensor):
            tensor = self.own.of(tensor)
        return self.of_own(tensor)

    def single(self, row: int) -> WatchedRows:
        """Return one of the rows."""
        length = (self.end - self.begin) // self.count
        begin = self.begin + row * length
        return replace(self, first=self.first + row, count=1, begin=begin, end=begin + length)


def _spans(
    first: int, count: int, parameter: torch.nn.Parameter, own: OwnedPart
) -> Iterator[tuple[int, int, int, int]]:
    """Yield first, count, begin and end of `WatchedRows` for a parameter of `count` weights from number `first` on."""
    if isinstance(parameter, DTensor):
        if count > 1 and own.axis == 0:
            first, count = first + own.begin, own.end - own.begin
        if numel := local(parameter).numel():
            yield first, count, 0, numel
        return
    length, begin = parameter.numel() // count, own.begin
    while begin < own.end:
        row, inside = divmod(begin, length)
        rows = 1
        if not inside:
            rows = max((own.end - begin) // length, 1)
        end = min((row + rows) * length, own.end)
        yield first + row, rows, begin - own.begin, end - own.begin
        begin = end


class TrainedWeights:
    """What the first steps of a process show of each trained weight. Construction is collective over pipeline ranks.

    A step reads on the device, in addition, every gradient in the first step, and later those that were 0 so far. Main
    weights are read at the start and in `over_all_ranks`, for their hashes.
    """

    def __init__(self, run: Run, trained: TrainState) -> None:
        self.steps = 0
        """Committed steps."""
        self.tensors: list[WatchedTensor] = []
        self._run, self._trained = run, trained
        self._layers: list[str] = []
        """Prefix of the names in each layer with a router, in the order of a `RouterUpdate`."""
        found, own = list(self._parameters()), dict[str, int]()
        for name, _, experts in found:
            own[name] = 1
            if experts is not None:
                own[name] = experts.options.num_experts
        stages, pp = [own], trained.pg_collection.pp
        if pp.size() > 1:
            stages *= pp.size()
            dist.all_gather_object(stages, own, group=pp)
        firsts: dict[str, int] = {}
        total = 0
        for stage in stages:
            for name, size in stage.items():
                if name not in firsts:
                    firsts[name] = total
                    self.tensors.append(WatchedTensor(name, total, total + size))
                    total += size
        self._seen = torch.zeros(TOKENS + 1, total, dtype=torch.bool)
        mains = {id(parameter): main for parameter, main in named_main_params(trained.model, trained.optimizer)}
        self._groups: list[dict[str, Any]] = []
        for part in parts(trained.optimizer):
            if not part.is_stub_optimizer:
                self._groups += part.param_groups
        numbers: dict[int, int] = {}
        for number, group in enumerate(self._groups):
            numbers.update(dict.fromkeys(map(id, group["params"]), number))
        self._rates = [0.0] * len(self._groups)
        self._rows: list[WatchedRows] = []
        for name, parameter, experts in found:
            first, count = firsts[name], 1
            if experts is not None:
                first, count = first + experts.first_expert, experts.num_local_experts
            main = mains.get(id(parameter))
            self._seen[TRAINABLE, first : first + count] |= parameter.requires_grad
            self._seen[OPTIMIZED, first : first + count] |= main is not None
            if parameter.requires_grad:
                part = owned_part(trained.optimizer, parameter)
                for span in _spans(first, count, parameter, part):
                    self._rows.append(WatchedRows(*span, parameter, part, main, numbers.get(id(main))))
        self._without_gradient = self._rows
        self._arriving: HostCopy | None = None
        self._tokens: Tensor | None = None
        self._num_experts: list[int] = []
        self._before = self._hashes()

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, LocalExperts | None]]:
        """Yield name and parameter of what no --freeze names on this rank, and whose stacked experts it has, if any."""
        left_alone = module_names.frozen(self._run)
        for chunk in map(unwrapped, self._trained.model):
            shown = global_names(chunk)
            stacked: dict[int, LocalExperts] = {}
            for name, module in chunk.named_modules():
                if isinstance(module, TopKRouter):
                    self._layers.append(shown[name].removesuffix("router"))
                elif isinstance(module, LocalExperts):
                    for parameter in module.parameters():
                        if parameter.dim() > 1 and len(parameter) == module.num_local_experts:
                            stacked[id(parameter)] = module
            for name, parameter in chunk.named_parameters():
                if global_name(chunk, name) not in left_alone:
                    yield shown[name], parameter, stacked.get(id(parameter))

    @torch.no_grad()
    def see_gradients(self) -> None:
        """Look at the reduced gradients of weights that had none so far; the host does not wait for the device."""
        for number, group in enumerate(self._groups):
            self._rates[number] = max(self._rates[number], group["lr"])
        found = [torch.zeros(0, dtype=torch.bool, device=platform.device())]
        for rows in self._without_gradient:
            gradient = getattr(rows.parameter, "main_grad", None)
            if gradient is None:
                found.append(found[0].new_zeros(rows.count))
            else:
                values = rows.of(gradient)  # two reductions without a copy; on a CPU they are the fastest there are
                found.append(((values.amax(dim=1) != 0) | (values.amin(dim=1) != 0)).to(platform.device()))
        self._arriving = HostCopy(torch.cat(found))

    def count(self, result: StepResult) -> None:
        """Count a committed step, whose gradients were seen."""
        self.steps += 1
        assert self._arriving is not None
        arrived = self._arriving.result().split([rows.count for rows in self._without_gradient])
        remaining: list[WatchedRows] = []
        for rows, had in zip(self._without_gradient, arrived):
            self._seen[GRADIENT, rows.first : rows.first + rows.count] |= had
            if not had.any():
                remaining.append(rows)
            elif not had.all():
                remaining += map(rows.single, (~had).nonzero().flatten().tolist())
        self._without_gradient = remaining
        if counts := result.router_update.tokens_per_expert:
            self._num_experts = list(map(len, counts))
            tokens = torch.cat(counts)
            if self._tokens is not None:
                tokens += self._tokens
            self._tokens = tokens

    @property
    def rate(self) -> float:
        """The largest learning rate of any parameter group so far."""
        return max(self._rates, default=0.0)

    @torch.no_grad()
    def over_all_ranks(self) -> Tensor:
        """Return what some rank saw, bool [7, weights], on the host. Collective over all ranks."""
        seen, optimizer = self._seen, self._trained.optimizer
        stored = [rows for rows, _ in self._stored()]
        moved = (self._hashes() != self._before).cpu().split([rows.count for rows in stored])
        for rows, changed in zip(stored, moved):
            seen[MOVED, rows.first : rows.first + rows.count] |= changed
        for rows in self._rows:
            own = slice(rows.first, rows.first + rows.count)
            if rows.main is None or rows.group is None:
                continue
            if not seen[MOVED, own].all():
                update = SMALL_UPDATE * self._rates[rows.group]
                for main in _pieces(rows.of_own(main_param(optimizer, rows.main))):
                    seen[MOVABLE, own] |= (main + update != main).any(dim=1).cpu()
            weight = local(rows.parameter)
            if weight.dtype != rows.main.dtype and packing_adam(optimizer, rows.main) is None:
                for main, narrow in zip(_pieces(rows.of_own(rows.main)), _pieces(rows.of(weight))):
                    seen[LOST, own] |= (main.to(narrow.dtype) != narrow).any(dim=1).cpu()
        if self._tokens is not None:
            counts = dict(zip(self._layers, self._tokens.cpu().split(self._num_experts)))
            for tensor in self.tensors:
                layer, is_routed, _ = tensor.name.rpartition("experts.")
                if is_routed and layer in counts and tensor.is_of_experts:
                    seen[TOKENS, tensor.first : tensor.end] = counts[layer] > 0
        every = seen.to(platform.device(), torch.uint8)
        dist.all_reduce(every, op=dist.ReduceOp.MAX)
        return every.cpu().bool()

    def _stored(self) -> Iterator[tuple[WatchedRows, Tensor]]:
        """Yield what is stored of main weights, [count, n]: of packed ones, the weight and its low bits."""
        for rows in self._rows:
            if rows.main is None:
                continue
            adam = packing_adam(self._trained.optimizer, rows.main)
            if adam is None:
                yield rows, rows.of_own(rows.main)
            else:
                yield rows, rows.of(rows.parameter)
                yield rows, rows.of_own(adam.state[rows.main]["low_bits"])

    def _hashes(self) -> Tensor:
        return bit_hashes([tensor for _, tensor in self._stored()])


@dataclass(frozen=True)
class Reason:
    """Why a weight does not train.

    waits: it may be bad luck until `RARE_STEPS`. is_fault: False for what a schedule does on purpose.
    """

    text: str
    waits: bool = False
    is_fault: bool = True


NOT_TRAINABLE = Reason("requires no gradient, though no --freeze names it")
NOT_OPTIMIZED = Reason("in no parameter group of the optimizer")
NOT_STORED = Reason("not the fp32 main weight rounded (updates do not reach it)")
NO_GRADIENT = Reason("gradient 0 in every step (cut off from the loss, zeroed, or multiplied by zeros)")
NO_GRADIENT_OF_EXPERT = replace(NO_GRADIENT, waits=True)
NO_TOKEN = Reason("no token in any step", waits=True)
NOT_MOVED = Reason("fp32 main weight unchanged by its gradient (not updated, or rounded away)", waits=True)
TOO_SLOW = Reason("learning rate too small to change it", waits=True, is_fault=False)


def _reason(seen: Sequence[bool], tensor_has_gradient: bool, is_expert: bool) -> Reason:
    """Return why a weight does not train. seen: the 7 flags of it; tensor_has_gradient: any weight of its tensor."""
    if not seen[TRAINABLE]:
        return NOT_TRAINABLE
    if not seen[OPTIMIZED]:
        return NOT_OPTIMIZED
    if seen[LOST]:
        return NOT_STORED
    if not seen[GRADIENT]:
        if not (is_expert and tensor_has_gradient):
            return NO_GRADIENT
        if not seen[TOKENS]:
            return NO_TOKEN
        return NO_GRADIENT_OF_EXPERT
    if seen[MOVABLE]:
        return NOT_MOVED
    return TOO_SLOW


class Untrained(Callback):
    """Names the weights that have no gradient or do not move in the first steps of a process.

    They are judged after `FIRST_STEPS` and, where some may only have had bad luck, `RARE_STEPS` committed steps. Each
    is named once. A shorter run is not watched.
    """

    def before_training(self) -> None:
        """Take hold of the weights as they are. Collective over pipeline ranks."""
        trainer = self.trainer
        self._named: set[int] = set()
        self._watch: TrainedWeights | None = None
        self._left = (trainer.run.training.train_iters or 0) - trainer.progress.iteration
        if self._left >= FIRST_STEPS and not trainer.finished:
            self._watch = TrainedWeights(trainer.run, trainer.trained)

    def before_update(self, step: Step) -> None:
        """Look at the gradients."""
        if self._watch is not None:
            self._watch.see_gradients()

    def after_step(self, step: Step, result: StepResult) -> None:
        """Count a committed step, and judge the weights where that is due. Collective in that case.

        Raises:
            RunFault: weights do not train, with `--on-untrained-weights stop`; on all ranks.
        """
        watch = self._watch
        if watch is None or not result.committed:
            return
        watch.count(result)
        if watch.steps in (FIRST_STEPS, RARE_STEPS):
            self._judge(watch, step.iteration)

    def _judge(self, watch: TrainedWeights, iteration: int) -> None:
        """Report what trains and what does not; end the watch where there is nothing to wait for."""
        seen = watch.over_all_ranks()
        trains = (seen[TRAINABLE] & seen[OPTIMIZED] & seen[GRADIENT] & seen[MOVED] & ~seen[LOST]).tolist()
        whole: dict[Reason, list[str]] = defaultdict(list)
        some: dict[Reason, list[str]] = defaultdict(list)
        before, waiting = len(self._named), 0
        for tensor in watch.tensors:
            has_gradient = bool(seen[GRADIENT, tensor.first : tensor.end].any())
            found: dict[Reason, list[int]] = defaultdict(list)
            for number in range(tensor.first, tensor.end):
                if not trains[number] and number not in self._named:
                    reason = _reason(seen[:, number].tolist(), has_gradient, tensor.is_of_experts)
                    found[reason].append(number)
            for reason, numbers in found.items():
                if not reason.is_fault or (reason.waits and watch.steps < RARE_STEPS):
                    waiting += len(numbers)
                    continue
                self._named.update(numbers)
                if len(numbers) == tensor.end - tensor.first:
                    whole[reason].append(tensor.name)
                else:
                    experts = listed([number - tensor.first for number in numbers], 8)
                    some[reason].append(f"{tensor.name} (experts {experts})")
        told = (
            f"weights after {watch.steps} steps: {int((~seen[GRADIENT]).sum())} of {len(trains)} without a gradient, "
            f"{int((seen[GRADIENT] & ~seen[MOVED]).sum())} more have not moved (each expert's counted by itself)"
        )
        if not waiting or self._left < RARE_STEPS or watch.steps == RARE_STEPS:
            self._watch = None
        if waiting and watch.steps < RARE_STEPS:
            told += f"; {waiting} are watched until step {RARE_STEPS}"
            if self._watch is None:
                told += ", which this run does not reach"
        elif waiting:
            told += f"; a learning rate of {watch.rate:.2g} at most is too small to change {waiting} of them"
        self.trainer.reporter.message(told)
        causes = []
        for reason in {**whole, **some}:
            names = [*_merged(whole[reason], watch.tensors), *some[reason]]
            causes.append(f"{reason.text}: {listed(names, 12)}")
        if not causes:
            return
        text = f"iteration {iteration}: {len(self._named) - before} of {len(trains)} weights do not train: "
        text += "; ".join(causes)
        if self.trainer.run.faults.on_untrained_weights == "stop":
            raise RunFault(f"{text}; stopped (--on-untrained-weights stop)")
        self.trainer.reporter.event("warning", text)


def _merged(names: Sequence[str], every: Sequence[WatchedTensor]) -> list[str]:
    """Return names of tensors, with `MODULE.*` in the place of those that are all that a module has."""
    others = [tensor.name for tensor in every if tensor.name not in names]
    found: dict[str, None] = {}
    for name in names:
        shown, path = name, name.split(".")
        for length in range(1, len(path)):
            module = ".".join(path[:length]) + "."
            inside = sum(one.startswith(module) for one in names)
            if inside > 1 and not any(other.startswith(module) for other in others):
                shown = f"{module}*"
                break
        found[shown] = None
    return list(found)
