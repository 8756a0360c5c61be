"""A model that transformers made is the same model here, at any layout: logits, choices, loss, gradients, export.

The second engine has every model on one rank, and two of them at each layout: how a table's tensors are cut for one is
our code's alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_moe.parallel.sequence import in_order
from tests.helpers import imported_cases as cases
from tests.helpers import tiny_models
from tests.helpers.errors import largest, worst
from tests.helpers.rows import rows

pytestmark = pytest.mark.engine

ALL = tuple(tiny_models.CASES)
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}


class Layout(NamedTuple):
    """Flags of a layout, and the models that are imported at it."""

    ranks: int
    flags: dict[str, Any]
    seeds: tuple[int, ...]
    cases: tuple[str, ...] = ALL

    def either_engine(self) -> list[str]:
        """The models that are imported at it with either engine: one with each kind of attention, or a short list's."""
        return [case for case in self.cases if self.cases is not ALL or case in ("deepseek-v3", "qwen2-moe")]


LAYOUTS = {
    "one": Layout(1, {}, (1, 2)),
    "TP2": Layout(2, TP2, (1,)),
    "PP2": Layout(2, PP2, (1,)),
    "EP2": Layout(2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}, (2,)),
    "TP2xEP2": Layout(4, {**TP2, "expert_model_parallel_size": 2}, (2,)),
    "TP2xEP2, experts whole": Layout(
        2, {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, (2,), ("glm4-moe",)
    ),
    "VPP": Layout(
        2, {**PP2, "num_layers_per_virtual_pipeline_stage": 1}, (2,), ("deepseek-v3", "qwen3-moe-tied", "qwen2-moe")
    ),
    "CP2": Layout(
        2, {"context_parallel_size": 2, "expert_model_parallel_size": 2}, (1,), ("deepseek-v2-grouped", "qwen2-moe")
    ),
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


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def reference(case: str, seed: int, folder: Path) -> Reference:
    model = tiny_models.make(case, seed, folder / "model")
    tensors = saved(folder / "model")
    batch = cases.batch_of(tiny_models.VOCABULARY)
    choices: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "experts"):
            keep = lambda module, args, layer=layer: choices.__setitem__(layer, args[1])  # noqa: E731
            block.mlp.experts.register_forward_pre_hook(keep)
    logits = model(batch["tokens"], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "gradients")
    gradients = {name: value for name, value in saved(folder / "gradients").items() if "correction_bias" not in name}
    return Reference(str(folder / "model"), logits.detach(), float(loss), choices, gradients, tensors)


@pytest.fixture(scope="module")
def asked(request) -> dict[str, list[tuple[str, int]]]:
    """Layout -> the (case, seed) that the selected tests look at."""
    own = [item.callspec.params for item in request.session.items if item.path == request.path]
    chosen = {(params["layout"], params["case"]) for params in own}
    return {
        name: wanted
        for name, layout in LAYOUTS.items()
        if (wanted := [(case, seed) for case in layout.cases for seed in layout.seeds if (name, case) in chosen])
    }


@pytest.fixture(scope="module")
def references(asked, tmp_path_factory) -> dict[tuple[str, int], Reference]:
    folder = tmp_path_factory.mktemp("imported")
    wanted = sorted({key for keys in asked.values() for key in keys})
    return {(case, seed): reference(case, seed, folder / f"{case}-{seed}") for case, seed in wanted}


@pytest.fixture(scope="module")
def steps(gloo, asked, references) -> dict[str, dict[tuple[str, int], list[dict[str, Any]]]]:
    """Layout -> (case, seed) -> what each rank saw."""
    found = {}
    for name, wanted in asked.items():
        layout = LAYOUTS[name]
        folders = [references[key].folder for key in wanted]
        by_rank = gloo.run_within(600, layout.ranks, cases.imported, folders=folders, layout=layout.flags)
        found[name] = {key: [rank[number] for rank in by_rank] for number, key in enumerate(wanted)}
    return found


def pairs() -> list[Any]:
    every = [(layout, case) for layout in LAYOUTS for case in LAYOUTS[layout].cases]
    both = [(layout, case) for layout, case in every if layout == "one" or case in LAYOUTS[layout].either_engine()]
    return rows(every, test=both)


def assembled(ranks: list[dict[str, Any]], quantity: str) -> dict[str, torch.Tensor]:
    """Whole tensors by key, out of all ranks' parts; ranks that hold the same elements agree to the bit."""
    from megatron_moe.apps.doctor.assemble import assemble

    records = [{"place": rank["place"], "tensors": {quantity: rank[quantity]}, "steps": []} for rank in ranks]
    whole = assemble(records)
    assert whole.missing == [] and whole.disagreements == []
    return whole.tensors[quantity]


def by_hf_name(folder: str, flags: dict[str, Any], native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the table makes of tensors by our keys; keys that are not there make nothing."""
    from megatron_moe.config.schema import build
    from megatron_moe.hf.families import family_of
    from megatron_moe.hf.mapping import mapping

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
    logits = joined(ranks, lambda rank: rank["logits"], -1)
    assert bool((logits[:, tiny_models.VOCABULARY :] == torch.finfo(torch.float32).min).all())
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
        float((logits[:, : tiny_models.VOCABULARY] - expected.logits.flatten(0, 1)).abs().max()),
        largest(abs(rank["loss"] - expected.loss) for rank in ranks),
        others,
        errors[which],
        which,
    )


@pytest.mark.parametrize(("layout", "case"), pairs())
def test_logits_choices_loss_and_gradients_are_those_of_transformers(steps, references, layout, case):
    for seed in LAYOUTS[layout].seeds:
        found = difference(steps[layout][case, seed], references[case, seed], LAYOUTS[layout].flags)
        assert found.logits < 1e-4 and found.loss < 1e-5 and found.choices == [] and found.gradient < 1e-4, found


@pytest.mark.parametrize(("layout", "case"), pairs())
def test_an_untouched_model_goes_back_bit_for_bit_under_the_same_names(steps, references, layout, case):
    for seed in LAYOUTS[layout].seeds:
        ranks, expected = steps[layout][case, seed], references[case, seed]
        native = assembled(ranks, "tensors")
        for rank in ranks:
            for key, bias in rank["biases"].items():
                assert torch.equal(native.setdefault(key, bias), bias)
        back = by_hf_name(expected.folder, LAYOUTS[layout].flags, native)
        assert back.keys() == expected.tensors.keys()
        for name, value in expected.tensors.items():
            assert back[name].dtype == value.dtype and torch.equal(back[name], value), name
        assert all(rank["masters_follow"] and rank["warnings"] == [] for rank in ranks)
