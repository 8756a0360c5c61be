"""Leaks between the documents of a sequence: what is changed, what must not change with it, and the report.

Each pass changes the tokens of one document, all of them or one, and puts the loss on that document alone. Compared are
outputs of the model: for the tokens of all other documents, and for those before a single token that was changed, they
keep their bits. In the backward pass the gradients of these outputs are zero for every token that the loss must not
depend on. The first output that breaks this names the layer that leaks.

The end of the file probes a model of transformers like that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe_tools.doctor.compare import FindingOfLayout
from megatron_moe_tools.doctor.layouts import PACKED_LENGTH, Layout
from megatron_moe_tools.models.load_model import transformers_model

# ---- Packings, and changes of one document.

# Documents of one token, ones that begin and end at a multiple of 8 or next to it; the last sequence ends in padding.
# Documents of 24 and 51 tokens are cut where a sequence ends, as all are that are longer than one: their parts do not
# see each other either.
PACKINGS: tuple[tuple[int, ...], ...] = ((1, 7, 8, 1, 15), (9, 1, 1, 5, 16), (PACKED_LENGTH,), (3, 12, 10))
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


def changes() -> list[Change]:
    """Return, for each document, a pass that changes all of it, and one for its middle token where it has many."""
    found = []
    for sample, lengths in enumerate(PACKINGS):
        first = 0
        for length in lengths:
            found.append(Change(sample, first, first, first + length, causal=False))
            if length >= SHORTEST_OF_ONE_TOKEN:
                found.append(Change(sample, first, first + length // 2, first + length, causal=True))
            first += length
    return found


def first_tokens(sample: int) -> Tensor:
    """Return [S] int64, for each token its document's first one; -1: padding. Sample i has packing i modulo theirs."""
    firsts, begin = torch.full((PACKED_LENGTH,), -1), 0
    for length in PACKINGS[sample % len(PACKINGS)]:
        firsts[begin : begin + length] = begin
        begin += length
    return firsts


# ---- What is compared, and what was found.

TRAINING, EVALUATION, GENERATION = MODES = ("training", "evaluation", "generation")


@dataclass
class Leak:
    """An output of one pass that depends on what it must not see.

    Attributes:
        name: which output, by its name in the whole model.
        mode: one of `MODES`. Generation continues the document of `change` alone, with a key/value cache.
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
    mode: str
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
        where = f"{self.place()}: token {self.token} of sequence {self.sample}, and {self.tokens - 1} more on rank "
        where += f"{self.rank}"
        if self.mode == GENERATION:
            return f"{where}, differs by up to {self.error:.1e} from the same token of the packed sequence"
        if self.deaf:
            return f"{where}, did not change with {self.change.shown()}, which it should see"
        if self.backward:
            return f"{where}, got a gradient of up to {self.error:.1e} from the loss of {self.change.shown()}"
        return f"{where}, changed by up to {self.error:.1e} with {self.change.shown()}"

    def place(self) -> str:
        """Return words for the output, with a mode that is not training."""
        return self.name if self.mode == TRAINING else f"{self.mode}: {self.name}"


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


@dataclass
class WatchedOutputs:
    """The outputs of the first pass, and how those of a later one differ.

    Attributes:
        allowed: largest difference, of the largest element; 0 where bits are compared.
        change: that of the pass; None: the first one.
        mode: one of `MODES`.
    """

    allowed: float = 0.0
    change: Change | None = None
    mode: str = TRAINING
    outputs: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    leaks: list[Leak] = field(default_factory=list)
    compared: int = 0

    def see(self, name: str, number: int, output: Tensor, tokens: Tokens, ahead: int = 0, sees: bool = False) -> None:
        """Keep an output [s, b, ...] of the first pass, or compare one of a later pass.

        Args:
            number: that of the micro-batch.
            tokens: those of its rows.
            ahead: how many tokens further a row looks.
            sees: whether rows from a single changed token on have to change, as an attention's do.
        """
        key = (self.mode, name, number)
        if self.change is None:
            self.outputs[key] = output.detach().clone()
            self.order.setdefault(name, len(self.order))
            return
        before = self.outputs[key]
        difference = (output.detach().double() - before.double()).abs().flatten(2).amax(-1)
        hidden = tokens.hidden_from(self.change, ahead)
        limit = self.allowed * float(before.double().abs().max())
        # not "above the limit": a difference that is no number is a leak
        self.report(name, ~(difference <= limit) & hidden, difference, tokens, self.change)
        if sees and self.change.causal:
            self.report(name, (difference == 0) & ~hidden, difference, tokens, self.change, deaf=True)

    def see_gradient(self, name: str, gradient: Tensor, tokens: Tokens) -> None:
        """Look whether the gradient [s, b, ...] of an output is zero where the loss must not depend on it."""
        if (change := self.change) is None:
            return
        size = gradient.detach().double().abs().flatten(2).amax(-1)
        unseen = tokens.hidden_from(change._replace(causal=False), 0)
        if change.causal and change.sample in tokens.samples:
            unseen[:, tokens.samples.index(change.sample)] |= tokens.places >= change.token
        self.report(name, ~(size == 0) & unseen, size, tokens, change, backward=True)

    def report(
        self,
        name: str,
        wrong: Tensor,
        error: Tensor,
        tokens: Tokens,
        change: Change,
        *,
        backward: bool = False,
        deaf: bool = False,
    ) -> None:
        """Keep a leak if a token is `wrong` [s, b], with its `error` [s, b]."""
        self.compared += not deaf
        if not bool(wrong.any()):
            return
        row, column = wrong.nonzero()[0].tolist()
        number, largest = int(wrong.sum()), float(error[wrong].max())
        sample, place, order = tokens.samples[column], int(tokens.places[row]), self.order.get(name, 0)
        self.leaks.append(Leak(name, self.mode, backward, change, number, sample, place, largest, deaf, order=order))


_GROUPS = {"embedding": 0, "mtp": 2, "output_layer": 3, "loss": 4}


def first_leak(leaks: Sequence[Leak]) -> Leak:
    """Return the leak that others follow from: the first one of a forward pass, the last one of a backward pass."""

    def depth(leak: Leak) -> tuple[int, int, int, int]:
        words = leak.name.split(".")
        layer = next((int(word) for word in words if word.isdigit()), 0)
        return MODES.index(leak.mode), _GROUPS.get(words[0], 1), layer, leak.order

    forward = [leak for leak in leaks if not leak.backward]
    return min(forward, key=depth) if forward else max(leaks, key=depth)


def leaks_at(leaks: Sequence[Leak]) -> str:
    """Return words for the place of the leak that the others follow from."""
    first = first_leak(leaks)
    return f"backward, from what reads {first.name}" if first.backward else first.place()


_SHOWN, _KEPT = 6, 500
APART = ("no document sees another in {}", "let documents see each other, or were not tested")


@dataclass(frozen=True)
class LeakFinding(FindingOfLayout):
    """The outcome of a layout or model that was probed.

    Attributes:
        allowed: that of `WatchedOutputs`.
        with_cache: the same of logits with a key/value cache; 0: there were none.
    """

    leaks: list[Leak]
    compared: int
    passes: int
    allowed: float = 0.0
    with_cache: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing leaks."""
        return not self.leaks

    def result(self) -> str:
        """Return what was compared, or where it leaks."""
        if self.leaks:
            return f"LEAKS: {leaks_at(self.leaks)}"
        how = f"to {self.allowed:.0e}" if self.allowed else "to the bit"
        if self.with_cache:
            how += f", with a cache to {self.with_cache:.0e}"
        return f"apart: {self.compared} outputs and gradients in {self.passes} passes, {how}"

    def lines(self) -> Iterator[str]:
        """Yield the leak that the others follow from, and some of these."""
        first = first_leak(self.leaks)
        yield f"  it leaks at {leaks_at(self.leaks)}; later outputs follow from it"
        for leak in (first, *[leak for leak in self.leaks if leak is not first][: _SHOWN - 1]):
            yield f"  {leak.shown()}"
        if len(self.leaks) > _SHOWN:
            yield f"  and {len(self.leaks) - _SHOWN} more"

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain values for JSON."""
        shown = [{**asdict(leak), "error": str(leak.error), "shown": leak.shown()} for leak in self.leaks[:_KEPT]]
        facts = {"compared": self.compared, "passes": self.passes, "allowed": self.allowed}
        facts["allowed_with_cache"] = self.with_cache
        at = leaks_at(self.leaks) if self.leaks else None
        return {**super().as_dict(), **facts, "leaks_at": at, "number_of_leaks": len(self.leaks), "leaks": shown}


def finding_of(layout: Layout, records: Sequence[dict[str, Any]], seconds: float = 0.0) -> LeakFinding:
    """Return what the ranks of a layout found together, each with a record as `documents.probe` returns it."""
    leaks = []
    for record in records:
        leaks += [Leak(**{**leak, "change": Change(*leak["change"])}) for leak in record["leaks"]]
    compared, first = sum(record["compared"] for record in records), records[0]
    return LeakFinding(layout, seconds, leaks, compared, first["passes"], with_cache=first["with_cache"])


# ---- A model of transformers.

ROUNDING = 1e-5
"""Largest difference, of an output's largest element, that is rounding in fp32."""


def leaks_of_folder(folder: Path) -> LeakFinding:
    """Probe the transformers model of a folder, with its weights if it has any, in fp32 on the CPU.

    Documents are told as a padding-free collator tells them: position_ids start again, and there is no attention_mask.
    A document that chooses other experts changes the shapes of their products, so a model with experts is compared to
    rounding. Gradients have to be zero in any model.

    Raises:
        ConfigError: transformers is missing or does not load the folder.
    """
    began, model = time.monotonic(), transformers_model(folder, torch.float32)
    model.eval()  # without dropout
    has_experts = any(getattr(module, "experts", None) is not None for module in model.modules())
    found, passes = WatchedOutputs(allowed=has_experts * ROUNDING), changes()
    documents, places = torch.stack(list(map(first_tokens, range(len(PACKINGS))))), torch.arange(PACKED_LENGTH)
    tokens = Tokens(list(range(len(PACKINGS))), documents, places)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, documents.shape, generator=generator)
    # transformers has no padding here: what is left of a sequence is one more document
    positions = places - torch.where(documents < 0, sum(PACKINGS[-1]), documents)

    def watched(of: str) -> Callable[..., None]:
        def see(_: object, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
            tensor = first_tensor(output)
            if not isinstance(tensor, Tensor) or tensor.shape[:2] != ids.shape:
                return
            found.see(of, 0, tensor.transpose(0, 1), tokens)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: found.see_gradient(of, gradient.transpose(0, 1), tokens))

        return see

    model.get_input_embeddings().register_forward_hook(watched("embedding"))
    for path, module in model.named_modules():
        parts = path.split(".")
        if len(parts) > 1 and (parts[-1].isdigit() or parts[-2].isdigit()) and parts[-1] != "experts":
            module.register_forward_hook(watched(path))
    for change in (None, *passes):
        found.change, changed = change, ids.clone()
        if change is not None:
            row = changed[change.sample]
            row[change.changed] = (row[change.changed] + 7) % model.config.vocab_size
        logits = model(input_ids=changed, position_ids=positions, use_cache=False).logits
        found.see("output_layer", 0, logits.transpose(0, 1), tokens)
        if change is not None:
            logits[change.sample, change.trained].float().log_softmax(-1)[..., 0].sum().backward()
            model.zero_grad()
    layout = Layout(type(model).__name__, 1, {}, frozenset())
    return LeakFinding(
        layout, time.monotonic() - began, found.leaks, found.compared, len(passes), allowed=found.allowed
    )


def first_tensor(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return what a module returns, without the biases and caches that may come with it."""
    return output[0] if isinstance(output, tuple) else output
