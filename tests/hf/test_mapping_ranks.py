"""A model that transformers made is the same model here, at any layout: logits, choices, loss, gradients, export."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_moe.config import module_names
from megatron_moe.config.schema import build
from megatron_moe.hf.families import family_of
from megatron_moe.hf.family import DEEPSEEK
from megatron_moe.hf.mapping import mapping
from megatron_moe.parallel.sequence import in_order
from tests.helpers import tiny_models
from tests.helpers.conversions import held, unequal
from tests.helpers.errors import largest, worst
from tests.helpers.rows import rows
from tests.hf import imported_cases as cases

pytestmark = pytest.mark.engine

ALL = tuple(tiny_models.CASES)
DENSE = ("llama", "llama-tied", "qwen2", "qwen3", "mistral", "olmo2")
SPARSE = tuple(case for case in ALL if case not in DENSE)
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
VPP = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}
ONE_OF_EACH_ATTENTION = ("deepseek-v2-grouped", "qwen2-moe", "gpt-oss")


class Layout(NamedTuple):
    """Ranks and flags; the models that make test imports at it, and all that can be."""

    ranks: int
    flags: dict[str, Any]
    first: tuple[str, ...]
    cases: tuple[str, ...] = ALL


LAYOUTS = {
    "one": Layout(1, {}, ALL),
    "TP2": Layout(2, TP2, ("deepseek-v3", "qwen2-moe", "hunyuan-v1-moe", "qwen2", "flex-olmo")),
    "PP2": Layout(2, PP2, ("qwen3-moe-tied", "deepseek-v2", "llama-tied", "olmo2")),
    "EP2": Layout(
        2,
        {**EP2, "use_distributed_optimizer": True},
        ("moonlight", "qwen3-moe", "granitemoe", "bailing-moe-v2"),
        SPARSE,
    ),
    "TP2xEP2": Layout(4, {**TP2, **EP2}, ("mixtral", "gpt-oss", "qwen3-vl-moe"), SPARSE),
    "TP2xEP2, experts whole": Layout(
        2, {**TP2, **EP2, "expert_tensor_parallel_size": 1}, ("glm4-moe", "ernie4-5-moe"), SPARSE
    ),
    "VPP": Layout(2, VPP, ("deepseek-v3",), ("deepseek-v3", "qwen3-moe-tied", "qwen2-moe")),
    "CP2": Layout(2, {**EP2, "context_parallel_size": 2}, ONE_OF_EACH_ATTENTION, (*ONE_OF_EACH_ATTENTION, "flex-olmo")),
    "CP2, dense": Layout(2, {"context_parallel_size": 2}, ("llama", "qwen2", "qwen3"), DENSE),
}


@dataclass
class Reference:
    """What transformers computes, in fp32. choices: layer -> [T, K]; gradients by the names of the saved tensors."""

    folder: str
    logits: torch.Tensor
    loss: float
    choices: dict[int, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]


def reference(case: str, seed: int, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Reference:
    """What transformers computes of a case that was saved in a dtype. changes: of its settings."""
    model = tiny_models.make(case, seed, folder / "model", dtype, **changes)
    if dtype != torch.float32:
        model = type(model).from_pretrained(folder / "model", dtype=torch.float32)
    tensors = held(folder / "model")
    batch = cases.batch_of(model.config.get_text_config().vocab_size)
    choices: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(getattr(model.model, "language_model", model.model).layers):
        mlp = getattr(block, "block_sparse_moe", None) or block.mlp
        if hasattr(mlp, "experts"):
            keep = lambda module, args, layer=layer: choices.__setitem__(layer, args[1])  # noqa: E731
            mlp.experts.register_forward_pre_hook(keep)
    logits = model(batch["tokens"], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    tiny_models.save(model, folder / "gradients")
    carried = family_of(json.loads((folder / "model" / "config.json").read_text()), case).names.carried
    others = (*tiny_models.ROUTER_BIASES, *carried)
    gradients = {name: value for name, value in held(folder / "gradients").items() if not any(map(name.count, others))}
    tensors = {name: value for name, value in tensors.items() if not any(map(name.count, carried))}
    return Reference(str(folder / "model"), logits.detach(), float(loss), choices, gradients, tensors)


@pytest.fixture(scope="module")
def reference_of(folder: Path) -> Callable[[str], Reference]:
    """A case's reference, computed once."""
    return cache(lambda case: reference(case, 1, folder / case))


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_has_the_models_parameters_and_copies_of_what_it_has(tied: bool) -> None:
    sizes = {"num_layers": 2, "moe_layer_freq": "[1,0]", "num_experts": 4, "mtp_num_layers": 1, "vocab_size": 99}
    run = build({**sizes, "untie_embeddings_and_output_weights": not tied})
    table, wanted = mapping(run, DEEPSEEK), module_names.parameters_of(run, "*")
    assert table.shapes.keys() == set(wanted) - ({"output_layer.weight"} if tied else set())
    assert set(table.copies.values()) <= {name for piece in table.pieces for name in piece.hf}


def assembled(ranks: list[dict[str, Any]], quantity: str) -> dict[str, torch.Tensor]:
    """Whole tensors by key, out of all ranks' parts; ranks that hold the same elements agree to the bit."""
    from megatron_moe_tools.doctor.measure import assemble

    records = [{"place": rank["place"], "tensors": {quantity: rank[quantity]}, "steps": []} for rank in ranks]
    whole = assemble(records)
    assert whole.differences == []
    return whole.tensors[quantity]


def by_hf_name(folder: str, flags: dict[str, Any], native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the table makes of tensors by our keys; keys that are not there make nothing."""
    table = mapping(
        build(cases.flags_of(folder, flags)),
        family_of(json.loads((Path(folder) / "config.json").read_text()), folder).names,
    )
    assert native.keys() <= table.shapes.keys()
    assert {key: tuple(value.shape) for key, value in native.items()} == {key: table.shapes[key] for key in native}
    found = {}
    for piece in table.pieces:
        if piece.key in native:
            block = native[piece.key][tuple(slice(a, a + n) for a, n in zip(piece.start, piece.transform.native_shape))]
            found.update(zip(piece.hf, piece.transform.to_hf(block)))
    return found


def joined(ranks: list[dict[str, Any]], of_rank: Any, tp_axis: int) -> torch.Tensor:
    """[T, ...] for all tokens: DP ranks have sequences, CP ranks chunks of each, TP ranks rows or columns of those."""
    places = [rank["place"] for rank in ranks]
    held = {
        tuple(place[f"{axis}_rank"] for axis in ("dp", "cp", "tp")): of_rank(rank)
        for place, rank in zip(places, ranks)
        if of_rank(rank)
    }
    dps, cps, tps = (range(max(key[axis] for key in held) + 1) for axis in range(3))
    sequences = []
    for dp in dps:
        for number in range(len(held[dp, 0, 0])):
            parts = [torch.cat([held[dp, cp, tp][number] for tp in tps], dim=tp_axis) for cp in cps]
            sequences.append(in_order(torch.cat(parts), len(cps)))
    return torch.cat(sequences)


@dataclass
class Difference:
    """How far a layout is from transformers: largest absolute logit and loss, layers where a token has other experts,
    worst relative error of a gradient and whose it is."""

    logits: float
    loss: float
    choices: list[int]
    gradient: float
    worst: str


def difference(ranks: list[dict[str, Any]], expected: Reference, flags: dict[str, Any]) -> Difference:
    """From what the ranks saw; every tensor has to be there, and what pads the vocabulary has no logit."""
    logits, vocabulary = joined(ranks, lambda rank: rank["logits"], -1), expected.logits.shape[-1]
    assert bool((logits[:, vocabulary:] == torch.finfo(torch.float32).min).all())
    assert {name for rank in ranks for name in rank["choices"]} == {f"decoder.layers.{n}" for n in expected.choices}
    others = []
    for layer, chosen in expected.choices.items():
        mine = joined(ranks, lambda rank, layer=layer: rank["choices"].get(f"decoder.layers.{layer}"), 0)
        if not torch.equal(mine.sort(-1).values, chosen.sort(-1).values):
            others.append(layer)
    gradients = by_hf_name(expected.folder, flags, assembled(ranks, "gradients"))
    assert gradients.keys() == expected.gradients.keys()
    # Experts without a token have no gradient: nothing to divide by.
    floor = 1e-6 * max(float(value.norm()) for value in expected.gradients.values())
    errors = {
        name: float((gradients[name] - value).norm()) / max(float(value.norm()), floor)
        for name, value in expected.gradients.items()
    }
    which = worst(errors)
    return Difference(
        float((logits[:, :vocabulary] - expected.logits.flatten(0, 1)).abs().max()),
        largest(abs(rank["loss"] - expected.loss) for rank in ranks),
        others,
        errors[which],
        which,
    )


def require_untouched(ranks: list[dict[str, Any]], expected: Reference, flags: dict[str, Any]) -> None:
    """What was imported goes back bit for bit under the same names, and main weights are the model's."""
    native = assembled(ranks, "tensors")
    for rank in ranks:
        for key, bias in rank["biases"].items():
            assert torch.equal(native.setdefault(key, bias), bias)
    assert unequal(by_hf_name(expected.folder, flags, native), expected.tensors) == []
    assert all(rank["masters_follow"] and rank["warnings"] == [] for rank in ranks)


def groups() -> list[Any]:
    """(layout, its models): a few models of each layout, all on one rank; in make test-all all that can be."""
    first = [(name, layout.first) for name, layout in LAYOUTS.items()]
    every = [(name, layout.cases) for name, layout in LAYOUTS.items() if layout.cases != layout.first]
    return rows([*first, *every], test=first)


@pytest.mark.parametrize(("layout", "models"), groups())
def test_an_imported_model_computes_what_transformers_does_and_goes_back_bit_for_bit(
    gloo: Any, reference_of: Callable[[str], Reference], layout: str, models: tuple[str, ...]
) -> None:
    ranks, flags, *_ = LAYOUTS[layout]
    expected = [reference_of(case) for case in models]
    folders = [one.folder for one in expected]
    by_rank = gloo.run_within(600, ranks, cases.imported, folders=folders, layout=flags)
    for case, seen, wanted in zip(models, zip(*by_rank), expected, strict=True):
        found = difference(list(seen), wanted, flags)
        assert found.choices == [], (case, found)
        assert found.logits < 1e-4 and found.loss < 1e-5 and found.gradient < 1e-4, (case, found)
        require_untouched(list(seen), wanted, flags)
