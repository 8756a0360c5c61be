"""Do the documents of a packed sequence see each other? A small copy of a run's model is asked on every rank.

Watched are the outputs of the embedding, of every attention, MLP and layer, the choices of experts, the logits and the
losses, in the forward and backward passes of a training step and in an evaluation: see `leaks`. In one process, each
document is also continued alone with a key/value cache, which has to give the logits of the packed sequence.

Bits can be compared because every pass computes products of the same shapes. Experts would not: a document that chooses
others changes the number of rows of each product, and with it how rows are rounded. So every router chooses as usual,
its choice for other documents is compared, and the choice of the first pass is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from megatron_moe.config.schema import Run, build
from megatron_moe.data.batches import DOCUMENTS, PLACES, Batch, batch_iterators
from megatron_moe.model.build import build_model
from megatron_moe.model.generate import cached, evaluation
from megatron_moe.model.initialize import global_name
from megatron_moe.moe.router import RouterSnapshot
from megatron_moe.optim.optimizer import build_optimizer
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.parallel.sequence import Documents, context_parallel_slice
from megatron_moe.platform.protocols import ProcessGroups
from megatron_moe.training.evaluate import evaluate
from megatron_moe.training.finalize_model_grads import finalize_model_grads
from megatron_moe.training.global_batch import same_random_states
from megatron_moe.training.step import connect, run_micro_batches
from megatron_moe.training.step_sums import pop_mtp_losses, wrapped
from megatron_moe_tools.doctor.compare import rounding_error
from megatron_moe_tools.doctor.leaks import (
    EVALUATION,
    GENERATION,
    ROUNDING,
    TRAINING,
    Change,
    Tokens,
    WatchedOutputs,
    changes,
    first_tensor,
    first_tokens,
)
from megatron_moe_tools.doctor.measure import router_names, unwrapped
from megatron_moe_tools.doctor.small_copy import PADDED_VOCABULARY


class ProbeSamples(Dataset):
    """A stream of random tokens in documents, cut into samples; `leaks.PACKINGS` say where these begin.

    Attributes:
        change: what is changed in the samples that are read.
    """

    def __init__(self, number: int, run: Run) -> None:
        assert run.model.vocab_size is not None
        self._number, self._length, self._vocab_size = number, run.model.seq_length, run.model.vocab_size
        self._restart = run.data.reset_position_ids
        self.change: Change | None = None

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.cat((self._tokens(index), self._tokens(index + 1)[:1]))
        firsts, place = first_tokens(index), torch.arange(self._length)
        mask = torch.ones(self._length)
        if self.change is not None:
            mask.zero_()
            if self.change.sample == index:
                mask[self.change.trained] = 1.0
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": mask,
            "position_ids": place - firsts.clamp_min(0) if self._restart else place,
            DOCUMENTS: firsts,
        }

    def _tokens(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self._vocab_size, (self._length,), generator=generator)
        if self.change is not None and self.change.sample == index:
            tokens[self.change.changed] = (tokens[self.change.changed] + 7) % self._vocab_size
        return tokens


def probe_into(flags: dict[str, Any]) -> dict[str, Any]:
    """Probe a run that was taken apart into plain values; return plain values."""
    return probe(build(flags))


def probe(run: Run, passes: Sequence[Change] | None = None) -> dict[str, Any]:
    """Probe on this rank, in the default process group if there is one; all process groups are destroyed.

    Args:
        run: a small copy with documents apart that passes `config.rules.check`.
        passes: the changes to make; None: all of `changes`.

    Returns:
        leaks: as dicts, in the order in which they were met. compared: how many outputs and gradients were compared.
        passes: how many changes were made. with_cache: see `LeakFinding`.
    """
    assert run.model.vocab_size is not None, "a small copy says how many tokens there are"
    chunks, passes = [], list(passes or changes())
    try:
        pg_collection = groups.initialize(run)
        if run.moe.moe_alltoall_by_node:
            groups.pretend_machines(1)  # or no token would leave its node
        seed_everything(run)
        chunks = build_model(run, pg_collection, run.model.vocab_size, padded_vocab_size=PADDED_VOCABULARY)
        optimizer = build_optimizer(run, chunks, pg_collection)
        connect(chunks, optimizer)
        world_size = dist.get_world_size()
        sizes: dict[str, Any] = {
            "num_micro_batches": run.derived.num_microbatches(world_size),
            "micro_batch_size": run.training.micro_batch_size,
            "seq_length": run.model.seq_length,
            "pg_collection": pg_collection,
        }
        samples = ProbeSamples(run.derived.global_batch_size(world_size), run)
        watch = _Watch(chunks, samples, run, pg_collection)
        found, snapshot = watch.found, RouterSnapshot.capture(chunks)
        for change in (None, *passes):
            samples.change = found.change = change
            for chunk in wrapped(chunks):
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            with watch.watching(TRAINING) as batches, same_random_states():
                run_micro_batches(chunks, batches, finalize_model_grads, **sizes)
            pop_mtp_losses(chunks)
            snapshot.restore()
            with watch.watching(EVALUATION) as batches:
                evaluate(chunks, batches, split="valid", iteration=0, **sizes)
        if world_size == 1:
            samples.change, found.mode = None, GENERATION
            found.allowed = ROUNDING if run.derived.params_dtype_name == "float32" else 2 * rounding_error(run)
            for change in passes:
                if not change.causal:
                    _continue_alone(unwrapped(chunks[0]), samples[change.sample], found, change)
        for leak in found.leaks:
            leak.rank = dist.get_rank()
        return {
            "leaks": list(map(asdict, found.leaks)),
            "compared": found.compared,
            "passes": len(passes),
            "with_cache": found.allowed,
        }
    finally:
        for built in chunks:  # see `measure.measure`
            vars(built).clear()
        groups.destroy()


def _continue_alone(model: Any, sample: dict[str, Tensor], found: WatchedOutputs, change: Change) -> None:
    """Continue half of a document token by token, and compare its logits with those of the packed sequence.

    Tokens have the experts that they chose in the packed sequence: rounding must not choose others.
    """
    packed = {key: tensor.unsqueeze(0) for key, tensor in sample.items()}
    tokens, documents, positions = packed["tokens"], packed[DOCUMENTS], packed["position_ids"]
    choices: dict[str, Tensor] = {}
    vocabulary = slice(model.output_layer.vocab_size)  # behind it logits are the lowest number there is
    with evaluation([model]), _choosing(model, choices.setdefault):
        logits = model(tokens, positions, Documents(documents, positions).as_mask())[0, :, vocabulary].float()
    begin, errors = change.first, []
    ends = torch.arange(begin + max(1, (change.end - begin) // 2), change.end + 1)
    with (
        _choosing(model, lambda name, own: choices[name][begin : begin + len(own)]),
        cached(model, change.end - begin) as step,
    ):
        for end in ends.tolist():
            errors.append((step(tokens[:, begin:end])[0, vocabulary] - logits[end - 1]).abs().max())
            begin = end
    error = torch.stack(errors).view(-1, 1)
    wrong = ~(error <= found.allowed * logits.abs().max())
    found.report("output_layer", wrong, error, Tokens([change.sample], documents, ends - 1), change)


@contextmanager
def _choosing(model: torch.nn.Module, decide: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Let every router take the experts [T, K] that `decide` makes of its layer's name and its own choice."""

    def decided(name: str, choose: Callable[..., Tensor], *args: Any) -> Tensor:
        return decide(f"{name}.mlp.router", choose(*args))

    with ExitStack() as stack:
        for name, router in router_names(model):
            stack.callback(setattr, router, "choose", router.choose)
            router.choose = partial(decided, name, router.choice())
        yield


class _Watch:
    """Hooks on the chunks of a rank that hand every output to a `WatchedOutputs`.

    Forward passes of a chunk run in the order of its micro-batches, and so do backward passes, in which layers may be
    recomputed: the n-th pass of a layer outside its chunk's forward is that of micro-batch n.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], samples: ProbeSamples, run: Run, pg: ProcessGroups) -> None:
        self._chunks, self._samples, self._run, self._pg = chunks, samples, run, pg
        self.found = WatchedOutputs()
        self._choices: dict[tuple[str, str, int], Tensor] = {}

    @contextmanager
    def watching(self, mode: str) -> Iterator[list[Any]]:
        """Yield the batches of one pass over all micro-batches, which is watched."""
        self.found.mode = mode
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
        return Tokens(numbers, torch.stack(list(map(first_tokens, numbers))), places)

    def chosen(self, name: str, number: int, own: Tensor, batch: Batch, ahead: int) -> Tensor:
        """Return the choice [T, K] of the first pass; compare this one."""
        tokens = self.tokens_of(batch, number, len(own) // self._run.training.micro_batch_size)
        self.found.see(name, number, own.view(len(tokens.places), len(tokens.samples), -1), tokens, ahead)
        return self._choices.setdefault((self.found.mode, name, number), own)


class _ChunkWatch:
    """The hooks on one chunk, for one pass over all micro-batches."""

    def __init__(self, watch: _Watch, model: Any, iterator: Any) -> None:
        self._watch, self._model = watch, model
        self._batches: list[Batch] = []
        iterator.observer = self._batches.append
        self._inside, self._forward, self._calls = False, -1, dict[str, int]()
        self._again: dict[str, int] = {}
        self._depths = model.config.mtp_num_layers or 0

    def hook(self, stack: ExitStack) -> None:
        """Add hooks to the chunk and to everything in it that is watched; the stack removes them."""

        def hooked(handle: RemovableHandle) -> None:
            stack.callback(handle.remove)

        hooked(self._model.register_forward_pre_hook(self._enter))
        hooked(self._model.register_forward_hook(self._leave))
        for path, module in self._model.named_modules():
            name = global_name(self._model, f"{path}.").removesuffix(".")
            is_layer = hasattr(module, "self_attention") and hasattr(module, "mlp")
            if path in ("embedding", "output_layer") or is_layer:
                hooked(module.register_forward_hook(self._watched(name)))
            if is_layer:
                for part in ("self_attention", "mlp"):
                    hooked(getattr(module, part).register_forward_hook(self._watched(f"{name}.{part}")))
        stack.enter_context(_choosing(self._model, self._choice))

    def _enter(self, *_: object) -> None:
        self._inside, self._calls = True, {}
        self._forward += 1  # not the batches that were read: a step may read ahead

    def _leave(self, _: object, __: object, output: Tensor) -> None:
        self._inside = False
        if not self._model.post_process:
            return
        number = self._forward
        tokens = self._watch.tokens_of(self._batches[number], number, output.shape[1])
        follows = torch.cat((tokens.documents[:, 1:], torch.full((len(tokens.samples), 1), -2)), dim=1)
        same = (follows == tokens.documents).t()[tokens.places]
        # ahead: the label is the next token
        self._watch.found.see("loss", number, (output.detach().t() * same).unsqueeze(-1), tokens, ahead=1)

    def _number(self, name: str) -> tuple[int, int]:
        """Return the micro-batch of a call, and which call of the module in it: each depth embeds tokens anew."""
        if self._inside:
            self._calls[name] = self._calls.get(name, -1) + 1
            return self._forward, self._calls[name]
        self._again[name] = self._again.get(name, -1) + 1
        return self._again[name], 0

    def _ahead(self, name: str) -> int:
        return self._depths if name.startswith("mtp.") else 0

    def _watched(self, name: str) -> Callable[..., None]:
        def see(_: object, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
            tensor, found = first_tensor(output), self._watch.found
            recomputed = not self._inside
            number, call = self._number(name)
            if tensor.dim() != 3:  # the losses of a fused output layer
                return
            tokens = self._watch.tokens_of(self._batches[number], number, tensor.shape[0])
            # A further prediction embeds the tokens ahead, on a stage that may embed no others, and has logits.
            further = call + (name == "embedding" and not self._model.pre_process)
            shown = f"mtp.layers.{further - 1}.{name}" if further else name
            if not recomputed:
                ahead = further or self._ahead(name)
                sees = name.endswith("self_attention") and not name.startswith("mtp.")
                found.see(shown, number, tensor, tokens, ahead, sees)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: found.see_gradient(shown, gradient, tokens))

        return see

    def _choice(self, name: str, own: Tensor) -> Tensor:
        number, _ = self._number(name)
        return self._watch.chosen(name, number, own, self._batches[number], self._ahead(name))
