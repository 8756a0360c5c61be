"""Do the documents of a packed sequence see each other? A small copy of a run's model is asked on every rank.

Each pass changes the tokens of one document, all of them or one, and puts the loss on that document alone. Compared are
the outputs of the embedding, of every attention, MLP and layer, the choices of experts, the logits and the losses: for
the tokens of all other documents, and for those before a single token that was changed, they keep their bits. In the
backward pass the gradients of these outputs are zero for every token that the loss must not depend on. The first output
that breaks this names the layer that leaks.

Bits can be compared because every pass computes products of the same shapes. Experts would not: a document that chooses
others changes the number of rows of each product, and with it how rows are rounded. So every router chooses as usual,
its choice for other documents is compared, and the choice of the first pass is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from megatron_moe.config.schema import Run, build
from megatron_moe.data.batches import DOCUMENTS, PLACES, Batch, batch_iterators
from megatron_moe.model.build import build_model
from megatron_moe.model.initialize import global_name
from megatron_moe.moe.router import RouterSnapshot, TopKRouter
from megatron_moe.optim.optimizer import build_optimizer
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.parallel.sequence import context_parallel_slice
from megatron_moe.platform.protocols import ProcessGroups
from megatron_moe.training.finalize_model_grads import finalize_model_grads
from megatron_moe.training.step import connect, run_micro_batches
from megatron_moe.training.step_sums import pop_mtp_losses, wrapped
from megatron_moe_tools.doctor.measure import unwrapped

# ---- Packings, and changes of one document.

# Under CP 2 a rank has blocks of 8 tokens. Documents of one token, ones that begin and end at a block's edge or next to
# it, one as long as the sequence; the last sequence ends in padding.
PACKINGS: tuple[tuple[int, ...], ...] = ((1, 7, 8, 1, 15), (9, 1, 1, 5, 16), (32,), (3, 12, 10))
SHORTEST_OF_ONE_TOKEN = 8
"""Tokens of a document, at least, of which a pass changes one alone."""


class Change(NamedTuple):
    """A pass: the tokens from `token` to `end` of a sample change, which begin a document or are within it.

    first: where the document begins. causal: whether one token is changed, and the loss is on the tokens before it.
    """

    sample: int
    first: int
    token: int
    end: int
    causal: bool

    @property
    def changed(self) -> slice:
        """The tokens that change."""
        return slice(self.token, self.token + 1) if self.causal else slice(self.token, self.end)

    @property
    def trained(self) -> slice:
        """The tokens with a loss."""
        return slice(self.first, self.token) if self.causal else slice(self.first, self.end)

    def shown(self) -> str:
        """Return words for what was changed."""
        if self.causal:
            return f"token {self.token} of the document at {self.first}, sequence {self.sample}"
        return f"the document at tokens {self.first} to {self.end - 1}, sequence {self.sample}"


def changes(packings: Sequence[Sequence[int]] = PACKINGS) -> Iterator[Change]:
    """Yield, for each document, a pass that changes all of it, and one for its middle token where it has many."""
    for sample, lengths in enumerate(packings):
        first = 0
        for length in lengths:
            yield Change(sample, first, first, first + length, causal=False)
            if length >= SHORTEST_OF_ONE_TOKEN:
                yield Change(sample, first, first + length // 2, first + length, causal=True)
            first += length


def first_tokens(lengths: Sequence[int], total: int) -> Tensor:
    """Return [total] int64, for each token its document's first one; -1: padding after the last document."""
    firsts, begin = torch.full((total,), -1), 0
    for length in lengths:
        firsts[begin : begin + length] = begin
        begin += length
    return firsts


class PackedSamples(Dataset):
    """Samples of random tokens in documents; sample i has packing i modulo their number.

    Attributes:
        change: what is changed in the samples that are read.
    """

    def __init__(self, number: int, run: Run, packings: Sequence[Sequence[int]] = PACKINGS) -> None:
        assert run.model.vocab_size is not None
        self._number, self._length, self._vocab_size = number, run.model.seq_length, run.model.vocab_size
        self._restart, self._packings = run.data.reset_position_ids, packings
        self.change: Change | None = None

    def __len__(self) -> int:
        return self._number

    def documents(self, sample: int) -> Tensor:
        """Return what `first_tokens` does, of one sample."""
        return first_tokens(self._packings[sample % len(self._packings)], self._length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self._vocab_size, (self._length + 1,), generator=generator)
        firsts, place = self.documents(index), torch.arange(self._length)
        mask = torch.ones(self._length)
        if (change := self.change) is not None:
            mask.zero_()
            if change.sample == index:
                tokens[change.changed] = (tokens[change.changed] + 7) % self._vocab_size
                mask[change.trained] = 1.0
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": mask,
            "position_ids": place - firsts.clamp_min(0) if self._restart else place,
            DOCUMENTS: firsts,
        }


# ---- What is compared, and what was found.


@dataclass
class Leak:
    """An output of one pass that depends on what it must not see.

    Attributes:
        name: which output, by its name in the whole model.
        backward: whether its gradient is not zero, rather than its value another.
        change: the pass.
        tokens: how many tokens of this rank are wrong, over all channels.
        sample, token: the first of them, by its place in the whole sequence.
        error: the largest difference of an element, or the largest gradient.
        deaf: whether tokens of the changed document did not change, which should have seen it.
        rank: which rank saw it.
        order: how many outputs of this rank come before it in the forward pass.
    """

    name: str
    backward: bool
    change: Change
    tokens: int
    sample: int
    token: int
    error: float
    deaf: bool = False
    rank: int = 0
    order: int = 0

    def shown(self) -> str:
        """Return the leak in one line."""
        where = f"{self.name}: token {self.token} of sequence {self.sample}, and {self.tokens - 1} more on rank "
        where += f"{self.rank}"
        if self.deaf:
            return f"{where}, did not change with {self.change.shown()}, which it should see"
        if self.backward:
            return f"{where}, got a gradient of up to {self.error:.1e} from the loss of {self.change.shown()}"
        return f"{where}, changed by up to {self.error:.1e} with {self.change.shown()}"


class Tokens(NamedTuple):
    """The tokens of a tensor [s, b, ...]: for each sample its number and documents [S]; for each row its place [s]."""

    samples: list[int]
    documents: Tensor
    places: Tensor

    def hidden_from(self, change: Change, ahead: int) -> Tensor:
        """Return [s, b] bool, which tokens must not see the change; a row may hold the token `ahead` of it."""
        found = torch.ones(len(self.places), len(self.samples), dtype=torch.bool)
        if change.sample in self.samples:
            column = self.samples.index(change.sample)
            found[:, column] = self.documents[column][self.places] != change.first
            if change.causal:
                found[:, column] |= self.places + ahead < change.token
        return found

    def without_loss(self, change: Change) -> Tensor:
        """Return [s, b] bool, the tokens whose gradients are zero where the loss is on the document changed."""
        found = self.hidden_from(change._replace(causal=False), 0)
        if change.causal and change.sample in self.samples:
            found[:, self.samples.index(change.sample)] |= self.places >= change.token
        return found


@dataclass
class WatchedOutputs:
    """The outputs of the first pass, and how those of a later one differ.

    Attributes:
        allowed: largest difference, of the largest element; 0 where bits are compared.
    """

    allowed: float = 0.0
    change: Change | None = None
    outputs: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    leaks: list[Leak] = field(default_factory=list)
    compared: int = 0

    def see(self, key: tuple[Any, ...], output: Tensor, tokens: Tokens, ahead: int = 0, sees: bool = False) -> None:
        """Keep an output [s, b, ...] of the first pass, or compare one of a later pass.

        Args:
            key: its name first, and what tells it apart.
            tokens: those of its rows.
            ahead: how many tokens further a row looks.
            sees: whether rows from a single changed token on have to change, as an attention's do.
        """
        if self.change is None:
            self.outputs[key] = output.detach().clone()
            self.order.setdefault(key[0], len(self.order))
            return
        before = self.outputs[key]
        difference = (output.detach().double() - before.double()).abs().flatten(2).amax(-1)
        hidden = tokens.hidden_from(self.change, ahead)
        limit = self.allowed * float(before.double().abs().max())
        # not "above the limit": a difference that is no number is a leak
        self._found(key[0], ~(difference <= limit) & hidden, difference, tokens, backward=False)
        if sees and self.change.causal:
            self._found(key[0], (difference == 0) & ~hidden, difference, tokens, backward=False, deaf=True)
        self.compared += 1

    def see_gradient(self, name: str, gradient: Tensor, tokens: Tokens) -> None:
        """Look whether the gradient [s, b, ...] of an output is zero where the loss must not depend on it."""
        if self.change is None:
            return
        size = gradient.detach().double().abs().flatten(2).amax(-1)
        self._found(name, ~(size == 0) & tokens.without_loss(self.change), size, tokens, backward=True)
        self.compared += 1

    def _found(
        self, name: str, wrong: Tensor, error: Tensor, tokens: Tokens, *, backward: bool, deaf: bool = False
    ) -> None:
        if not bool(wrong.any()):
            return
        assert self.change is not None
        row, column = wrong.nonzero()[0].tolist()
        largest = float(error[wrong].max())
        sample, place = tokens.samples[column], int(tokens.places[row])
        number, order = int(wrong.sum()), self.order[name]
        self.leaks.append(Leak(name, backward, self.change, number, sample, place, largest, deaf, order=order))


_GROUPS = {"embedding": 0, "mtp": 2, "output_layer": 3, "loss": 4}


def depth(leak: Leak) -> tuple[int, int, int]:
    """Return where its output comes in the forward pass: part of the model, layer, order on its rank."""
    words = leak.name.split(".")
    layer = next((int(word) for word in words if word.isdigit()), 0)
    return _GROUPS.get(words[0], 1), layer, leak.order


def first_leak(leaks: Sequence[Leak]) -> Leak:
    """Return the leak that others follow from: the first one of a forward pass, the last one of a backward pass."""
    forward = [leak for leak in leaks if not leak.backward]
    if forward:
        return min(forward, key=depth)
    return max(leaks, key=depth)


# ---- The probe of a run's model on a rank.


@dataclass(frozen=True)
class DocumentsRequest:
    """What a rank is asked: a run that passes `config.rules.check`, with documents apart; rows of its vocabulary."""

    run: Run
    padded_vocab_size: int


def probe_into(argument: dict[str, Any]) -> dict[str, Any]:
    """Probe a request that was taken apart into plain values; return plain values."""
    return probe(DocumentsRequest(build(argument["flags"]), argument["padded_vocab_size"]))


def probe(request: DocumentsRequest, passes: Sequence[Change] | None = None) -> dict[str, Any]:
    """Probe on this rank, in the default process group if there is one; all process groups are destroyed.

    Args:
        passes: the changes to make; None: all of `changes`.

    Returns:
        leaks: as dicts, in the order in which they were met, those of the forward pass first. compared: how many
        outputs and gradients were compared. passes: how many changes were made.
    """
    run, chunks = request.run, []
    assert run.model.vocab_size is not None, "a request says how many tokens there are"
    passes = list(passes or changes())
    try:
        pg_collection = groups.initialize(run)
        if run.moe.moe_alltoall_by_node:
            groups.pretend_machines(1)  # or no token would leave its node
        seed_everything(run)
        chunks = build_model(run, pg_collection, run.model.vocab_size, padded_vocab_size=request.padded_vocab_size)
        optimizer = build_optimizer(run, chunks, pg_collection)
        connect(chunks, optimizer)
        size, world_size = run.training.micro_batch_size, dist.get_world_size()
        samples = PackedSamples(run.derived.global_batch_size(world_size), run)
        watch = _Watch(chunks, samples, run, pg_collection)
        for change in (None, *passes):
            samples.change = watch.found.change = change
            for chunk in wrapped(chunks):
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            snapshot = RouterSnapshot.capture(chunks)
            with watch.watching() as batches:
                run_micro_batches(
                    chunks,
                    batches,
                    _finalize,
                    num_micro_batches=run.derived.num_microbatches(world_size),
                    micro_batch_size=size,
                    seq_length=run.model.seq_length,
                    pg_collection=pg_collection,
                )
            pop_mtp_losses(chunks)
            snapshot.restore()
        found = watch.found
        for leak in found.leaks:
            leak.rank = dist.get_rank()
        return {"leaks": list(map(asdict, found.leaks)), "compared": found.compared, "passes": len(passes)}
    finally:
        for built in chunks:  # see `measure.measure`
            vars(built).clear()
        groups.destroy()


def _finalize(chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
    finalize_model_grads(chunks, num_tokens, **options)


class _Watch:
    """Hooks on the chunks of a rank that hand every output to a `WatchedOutputs`.

    Forward passes of a chunk run in the order of its micro-batches, and so do backward passes, in which layers may be
    recomputed: the n-th pass of a layer outside its chunk's forward is that of micro-batch n.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], samples: PackedSamples, run: Run, pg: ProcessGroups) -> None:
        self._chunks, self._samples, self._run, self._pg = chunks, samples, run, pg
        self.found = WatchedOutputs()
        self._choices: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[list[Any]]:
        """Yield the batches of one pass over all micro-batches, which is watched."""
        batches = batch_iterators(self._samples, self._run, pg_collection=self._pg)
        with ExitStack() as stack:
            for chunk, iterator in zip(self._chunks, batches):
                _ChunkWatch(self, unwrapped(chunk), iterator).hook(stack)
            yield batches

    def tokens_of(self, batch: Batch | None, number: int, length: int) -> Tokens:
        """Return the tokens of a tensor of `length` rows in micro-batch `number`: under SP a part of this rank's."""
        size, pg = self._run.training.micro_batch_size, self._pg
        places = torch.arange(self._run.model.seq_length)
        table = None if batch is None else batch.get(PLACES)
        if table is not None:
            places = table[pg.cp.rank()].cpu()
        elif pg.cp.size() > 1:
            places = context_parallel_slice(places, pg.cp.rank(), pg.cp.size())
        if length != len(places):
            places = places.chunk(pg.tp.size())[pg.tp.rank()]
        assert length == len(places), f"a tensor has {length} rows, for {len(places)} tokens"
        first = (number * pg.dp.size() + pg.dp.rank()) * size
        numbers = list(range(first, first + size))
        return Tokens(numbers, torch.stack(list(map(self._samples.documents, numbers))), places)

    def chosen(self, name: str, number: int, chosen: Tensor, tokens: Tokens, ahead: int) -> Tensor:
        """Return the choice of the first pass; compare this one."""
        self.found.see((name, number), chosen.view(len(tokens.places), len(tokens.samples), -1), tokens, ahead)
        return self._choices.setdefault((name, number), chosen)


class _ChunkWatch:
    """The hooks on one chunk, for one pass over all micro-batches."""

    def __init__(self, watch: _Watch, model: Any, iterator: Any) -> None:
        self._watch, self._model = watch, model
        self._batches: list[Batch] = []
        iterator.observer = self._batches.append
        self._inside, self._calls = False, dict[str, int]()
        self._again: dict[str, int] = {}
        self._depths = model.config.mtp_num_layers or 0

    def hook(self, stack: ExitStack) -> None:
        """Add hooks to the chunk and to everything in it that is watched; the stack removes them."""

        def hooked(handle: RemovableHandle) -> None:
            stack.callback(handle.remove)

        hooked(self._model.register_forward_pre_hook(self._enter))
        hooked(self._model.register_forward_hook(self._leave))
        for path, module in self._model.named_modules():
            if not path:
                continue
            name = global_name(self._model, f"{path}.").removesuffix(".")
            if path in ("embedding", "output_layer") or _is_layer(module):
                hooked(module.register_forward_hook(self._watched(name)))
            if _is_layer(module):
                for part in ("self_attention", "mlp"):
                    hooked(getattr(module, part).register_forward_hook(self._watched(f"{name}.{part}")))
            if isinstance(module, TopKRouter):
                choose, module.choose = module.choose, self._choice(name, module.choose)
                stack.callback(setattr, module, "choose", choose)

    def _enter(self, *_: object) -> None:
        self._inside, self._calls = True, {}

    def _leave(self, _: object, __: object, output: Tensor) -> None:
        self._inside = False
        if not self._model.post_process:
            return
        number = len(self._batches) - 1
        tokens = self._tokens(number, output.shape[1])
        follows = torch.cat((tokens.documents[:, 1:], torch.full((len(tokens.samples), 1), -2)), dim=1)
        same = (follows == tokens.documents).t()[tokens.places]
        # ahead: the label is the next token
        self._watch.found.see(("loss", number), (output.detach().t() * same).unsqueeze(-1), tokens, ahead=1)

    def _tokens(self, number: int, length: int) -> Tokens:
        return self._watch.tokens_of(self._batches[number], number, length)

    def _number(self, name: str) -> tuple[int, int]:
        """Return the micro-batch of a call, and which call of the module in it: each depth embeds tokens anew."""
        if self._inside:
            self._calls[name] = self._calls.get(name, -1) + 1
            return len(self._batches) - 1, self._calls[name]
        self._again[name] = self._again.get(name, -1) + 1
        return self._again[name], 0

    def _ahead(self, name: str) -> int:
        return self._depths if name.startswith("mtp.") else 0

    def _watched(self, name: str) -> Callable[..., None]:
        def see(_: object, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
            tensor = first_tensor(output)
            recomputed = not self._inside
            number, call = self._number(name)
            if tensor.dim() != 3:  # the losses of a fused output layer
                return
            tokens = self._tokens(number, tensor.shape[0])
            # A further prediction embeds the tokens ahead, on a stage that may embed no others, and has logits.
            further = call + (name == "embedding" and not self._model.pre_process)
            shown = f"mtp.layers.{further - 1}.{name}" if further else name
            if not recomputed:
                ahead = further or self._ahead(name)
                sees = name.endswith("self_attention") and not name.startswith("mtp.")
                self._watch.found.see((shown, number), tensor, tokens, ahead, sees)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._watch.found.see_gradient(shown, gradient, tokens))

        return see

    def _choice(self, name: str, choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def chosen(*args: Any) -> Tensor:
            own = choose(*args)
            number, _ = self._number(name)
            tokens = self._tokens(number, len(own) // self._watch._run.training.micro_batch_size)
            return self._watch.chosen(name, number, own, tokens, self._ahead(name))

        return chosen


def first_tensor(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return what a module returns, without the biases and caches that may come with it."""
    return output[0] if isinstance(output, tuple) else output


def _is_layer(module: torch.nn.Module) -> bool:
    return hasattr(module, "self_attention") and hasattr(module, "mlp")
