"""Documents that do not see each other: packed under any layout, each trains as it does alone on one rank."""

import copy
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.data.batches import DOCUMENTS
from megatron_moe.parallel.sequence import balanced_places
from megatron_moe.training import step
from megatron_moe.training.evaluate import evaluate, gathered_parameters
from tests.helpers import model_cases as cases
from tests.helpers.errors import relative
from tests.helpers.rows import rows
from tests.model.test_build_ranks import cut
from tests.numbers.test_layout_matrix import (
    ALL_AGAIN,
    CP2,
    CP4,
    EP2,
    EXPANDED,
    PARTS_AGAIN,
    PP2,
    SHARDED,
    SINGLES,
    TP2,
    VPP,
    ZERO2,
    ZERO3,
)

LENGTH, AT = 64, "at"
# An Adam whose step is smooth in the gradient: rounding must not decide about a sign.
FLAGS = {"seq_length": LENGTH, "moe_aux_loss_coeff": (0.0,), "init_method_std": 0.1, "lr": 1e-2, "adam_eps": 1e-2}
FLAGS |= {"calculate_per_token_loss": True, "global_batch_size": 4, "reset_attention_mask": True}
SINKS = {"softmax_type": "learnable", "window_size": "5,0", "window_attn_skip_freq": 2, "num_layers": 4}
MODELS = {**PRESETS, "sinks": {**PRESETS["tiny-gqa"], **SINKS, "add_bias_linear": True}}
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "rotary_base": 100.0}
MTP, POSITIONS = {"mtp_num_layers": 1}, {"reset_position_ids": True}
BOTH = {**CP2, **TP2}
# (preset, number of the packing, ranks, flags): every pair of two of layout, attention and the rest is in a row.
PACKED: list[tuple[str, int, int, dict[str, Any]]] = [
    ("tiny", 0, 1, {**MTP, **POSITIONS}),
    ("tiny", 1, 2, {**CP2, **ALL_AGAIN}),
    ("tiny-gqa", 2, 4, {**CP4, **MTP, **YARN}),
    ("tiny-gqa", 3, 2, PP2),
    ("sinks", 17, 2, {**CP2, **EP2}),
    ("tiny-gqa", 4, 1, {**ALL_AGAIN, **SINGLES}),
    ("sinks", 18, 4, {**CP2, **TP2, **POSITIONS}),
    ("tiny", 5, 2, {**TP2, **MTP}),
    ("tiny", 6, 2, {**CP2, **EXPANDED, **MTP, **POSITIONS}),
    ("tiny", 7, 4, {**CP4, **PARTS_AGAIN}),
    ("tiny", 8, 4, {**BOTH, **POSITIONS}),
    ("tiny", 9, 4, {**BOTH, **EXPANDED, **ALL_AGAIN}),
    ("tiny", 10, 4, {**CP2, **VPP, **SINGLES}),
    ("tiny", 11, 4, {**CP2, **EP2, **ZERO3, **MTP}),
    ("tiny", 12, 2, {**EP2, **ZERO2, **ALL_AGAIN}),
    ("tiny-gqa", 13, 2, {**CP2, **SHARDED, **POSITIONS}),
    ("tiny-gqa", 14, 4, {**TP2, **PP2, **MTP, **POSITIONS}),
    ("tiny-gqa", 15, 4, {**CP2, **TP2, **ALL_AGAIN}),
    ("tiny-gqa", 16, 2, {**EP2, **ZERO3, **POSITIONS}),
]


def packing(length: int, sequences: int, number: int) -> numpy.ndarray:
    """`documents` [sequences, length] of a stream of documents, among them one of 1 token and a long one."""
    random = numpy.random.default_rng(number)
    lengths = [1, *numpy.exp(random.uniform(0, numpy.log(2 * length), sequences * length)).astype(int)]
    lengths.insert(int(random.integers(1, 12)), length + 7)
    begins = numpy.repeat(numpy.cumsum(lengths) - lengths, lengths)[: sequences * length].reshape(sequences, length)
    return numpy.maximum(begins - length * numpy.arange(sequences)[:, None], 0)


def packed_batch(run: Run, number: int) -> dict[str, torch.Tensor]:
    batch = cases.global_batch(LENGTH)
    documents = torch.from_numpy(packing(LENGTH, cases.SEQUENCES, number))
    last = torch.ones(cases.SEQUENCES, LENGTH, dtype=torch.bool)
    last[:, :-1] = documents.diff() != 0
    batch["loss_mask"] = batch["loss_mask"] * ~last
    if run.data.reset_position_ids:
        batch["position_ids"] = batch["position_ids"] - documents
    return {**batch, DOCUMENTS: documents, AT: torch.arange(documents.numel()).view_as(documents)}


def alone(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each document of a packed batch as a micro-batch of its own, which knows of no documents."""
    found = []
    for row, documents in enumerate(batch[DOCUMENTS]):
        for first in documents.unique().tolist():
            inside = (documents == first).nonzero().flatten()
            one = {key: tensor[row : row + 1, inside] for key, tensor in batch.items() if key != DOCUMENTS}
            one["position_ids"] = torch.arange(len(inside)).view(1, -1)
            found.append(one)
    return found


def whole(tensor: Any) -> Any:
    """A fully sharded model's tensor in one piece, on all ranks together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(run: Run, numbers: Sequence[int], apart: bool = False) -> list[dict[str, Any]]:
    """Evaluate packings, or their documents `apart`, and take a step on each; the token losses of this rank too."""
    trainer, stock, prepare = cases.Trainer(run), step.forward_step, step.prepare_global_batch
    size, results = run.training.micro_batch_size, []
    sizes = {"micro_batch_size": size, "seq_length": LENGTH, "pg_collection": trainer.groups}
    for number in numbers:
        batch, losses = packed_batch(run, number), {}
        batches = alone(batch) if apart else cases.share_of(batch, trainer.groups, size)

        def noting(iterator: Any, chunk: Any, *options: Any, losses: dict[int, float] = losses) -> Any:
            read = next(iterator)
            output, loss = stock(iter([read]), chunk, *options)
            if output.shape == read[AT].shape:  # of the last stage
                losses.update(zip(read[AT].flatten().tolist(), output.detach().flatten().tolist()))
            return output, loss

        def announced(*args: Any, **options: Any) -> Any:
            """Documents are as many tokens as the sequences that they make up."""
            whole = {"num_micro_batches": 1, "micro_batch_size": cases.SEQUENCES} if apart else {}
            return prepare(*args, **{**options, **whole})

        iterators, count = [iter(batches) for _ in trainer.model], len(batches)
        evaluated = evaluate(trainer.model, iterators, split="valid", iteration=0, num_micro_batches=count, **sizes)
        with mock.patch.multiple(step, forward_step=noting, prepare_global_batch=announced):
            result = trainer.step_of([iter(batches) for _ in trainer.model], count)
        with gathered_parameters(trainer.model):
            tensors = {name: tuple(map(whole, each)) for name, each in cases.tensors_of(trainer.model).items()}
        numbers_of_step = (evaluated.loss, result.loss, *result.mtp_losses, result.grad_norm)
        results.append({"numbers": numbers_of_step, "losses": losses, "tensors": copy.deepcopy(tensors)})
    return results


def require_as_alone(
    gloo: Any, preset: str, numbers: Sequence[int], ranks: int, flags: dict[str, Any], **more: Any
) -> None:
    own = {name: value for name, value in flags.items() if name in (*MTP, *POSITIONS, *YARN)}
    base = {**MODELS[preset], **FLAGS, **more}
    (wanted,) = gloo.run(1, trained, run=replace(Run(), **{**base, **own}), numbers=numbers, apart=True)
    run = replace(Run(), **{**base, **flags})
    for found, alone in zip(zip(*gloo.run(ranks, trained, run=run, numbers=numbers)), wanted, strict=True):
        losses: dict[int, float] = {}
        for result in found:
            assert result["numbers"] == pytest.approx(alone["numbers"], rel=1e-5)
            losses |= result["losses"]
            for name, (recipe, weight, grad) in result["tensors"].items():
                _, full_weight, full_grad = alone["tensors"][name]
                assert relative(weight, cut(full_weight, recipe)) < 1e-5, name
                if run.derived.zero_stage == 0:  # a rank has the whole sum of its own shard only
                    assert (grad - cut(full_grad, recipe)).norm() <= 1e-5 * full_grad.norm(), name
        assert losses == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.parametrize(("preset", "number", "ranks", "flags"), rows(PACKED, test=PACKED[:5]))
def test_each_document_of_a_packing_trains_as_it_does_alone(gloo, preset, number, ranks, flags):
    require_as_alone(gloo, preset, [number], ranks, flags)


@pytest.mark.parametrize(("size", "length"), [(2, 2048), (4, 48), (8, 4000)])
def test_ranks_have_equal_attention_work_whatever_the_documents(size, length):
    for number in range(100):
        firsts = packing(length, 1 + number % 2, number)
        places = balanced_places(firsts, size)
        assert numpy.array_equal(numpy.sort(places, axis=None), numpy.arange(length))
        work = (numpy.arange(length) - firsts + 1).sum(axis=0)[places].sum(axis=1)
        assert work.max() <= 1.05 * work.mean(), number
