"""A model that transformers made is the same model here, at any layout: logits, choices, loss, gradients, export."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import imported_cases as cases
from tests.unit.conversion import tiny_models

# layout -> ranks, flags, seeds of the models
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {
    "one": (1, {}, (1, 2)),
    "TP2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, (1, 2)),
    "PP2": (2, {"pipeline_model_parallel_size": 2}, (2, 3)),
    "EP2": (2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}, (1, 3)),
    "TP2xEP2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
        (2, 3),
    ),
}
SEEDS = (1, 2, 3)


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
def references(tmp_path_factory) -> dict[tuple[str, int], Reference]:
    folder = tmp_path_factory.mktemp("imported")
    return {
        (case, seed): reference(case, seed, folder / f"{case}-{seed}") for case in tiny_models.CASES for seed in SEEDS
    }


@pytest.fixture(scope="module")
def steps(gloo, references) -> dict[str, dict[tuple[str, int], list[dict[str, Any]]]]:
    """Layout -> (case, seed) -> what each rank saw."""
    found = {}
    for layout, (ranks, flags, seeds) in LAYOUTS.items():
        wanted = [(case, seed) for case in tiny_models.CASES for seed in seeds]
        folders = [references[key].folder for key in wanted]
        by_rank = gloo.run_within(300, ranks, cases.imported, folders=folders, layout=flags)
        found[layout] = {key: [rank[number] for rank in by_rank] for number, key in enumerate(wanted)}
    return found


def pairs() -> list[Any]:
    return [pytest.param(layout, case, id=f"{layout}-{case}") for layout in LAYOUTS for case in tiny_models.CASES]


def assembled(ranks: list[dict[str, Any]], quantity: str) -> dict[str, torch.Tensor]:
    """Whole tensors by key, out of all ranks' parts; ranks that hold the same elements agree to the bit."""
    from megatron_moe.doctor.assemble import assemble

    records = [{"place": rank["place"], "tensors": {quantity: rank[quantity]}, "steps": []} for rank in ranks]
    whole = assemble(records)
    assert whole.missing == [] and whole.disagreements == []
    return whole.tensors[quantity]


def by_hf_name(folder: str, flags: dict[str, Any], native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the table makes of tensors by our keys; keys that are not there make nothing."""
    from megatron_moe.config.schema import build
    from megatron_moe.conversion.families import family_of
    from megatron_moe.conversion.mapping import mapping

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


def in_order(ranks: list[dict[str, Any]], of_rank: Any) -> torch.Tensor:
    """Rows of all tokens, sequence by sequence: data-parallel ranks have sequences, tensor-parallel ones parts of them."""
    by_place = {(rank["place"]["dp_rank"], rank["place"]["tp_rank"]): of_rank(rank) for rank in ranks if of_rank(rank)}
    replicas = sorted({dp for dp, _ in by_place})
    slices = sorted({tp for _, tp in by_place})
    rows = []
    for dp in replicas:
        for number in range(len(by_place[dp, slices[0]])):
            rows.append([by_place[dp, tp][number] for tp in slices])
    return rows


@pytest.mark.parametrize(("layout", "case"), pairs())
def test_logits_choices_loss_and_gradients_are_those_of_transformers(steps, references, layout, case):
    flags = LAYOUTS[layout][1]
    for seed in LAYOUTS[layout][2]:
        ranks, expected = steps[layout][case, seed], references[case, seed]
        logits = torch.cat([torch.cat(parts, dim=-1) for parts in in_order(ranks, lambda rank: rank["logits"])])
        assert bool(logits[:, tiny_models.VOCABULARY :].isneginf().all())
        difference = (logits[:, : tiny_models.VOCABULARY] - expected.logits.flatten(0, 1)).abs().max()
        assert float(difference) < 1e-4

        layers = {name for rank in ranks for name in rank["choices"]}
        assert layers == {f"decoder.layers.{layer}" for layer in expected.choices}
        for layer, chosen in expected.choices.items():
            rows = in_order(ranks, lambda rank, layer=layer: rank["choices"].get(f"decoder.layers.{layer}"))
            mine = torch.cat([torch.cat(parts) for parts in rows])
            assert torch.equal(mine.sort(-1).values, chosen.sort(-1).values), f"layer {layer}"

        assert {round(rank["loss"] - expected.loss, 5) for rank in ranks} == {0.0}

        gradients = by_hf_name(expected.folder, flags, assembled(ranks, "gradients"))
        assert gradients.keys() == expected.gradients.keys()
        floor = 1e-6 * max(float(value.norm()) for value in expected.gradients.values())
        for name, value in expected.gradients.items():
            error = float((gradients[name] - value).norm()) / max(float(value.norm()), floor)
            assert error < 1e-4, (name, error)


@pytest.mark.parametrize(("layout", "case"), pairs())
def test_an_untouched_model_goes_back_bit_for_bit_under_the_same_names(steps, references, layout, case):
    for seed in LAYOUTS[layout][2]:
        ranks, expected = steps[layout][case, seed], references[case, seed]
        native = assembled(ranks, "tensors")
        for rank in ranks:
            for key, bias in rank["biases"].items():
                assert torch.equal(native.setdefault(key, bias), bias)
        back = by_hf_name(expected.folder, LAYOUTS[layout][1], native)
        assert back.keys() == expected.tensors.keys()
        for name, value in expected.tensors.items():
            assert back[name].dtype == value.dtype and torch.equal(back[name], value), name
        assert all(rank["masters_follow"] and rank["warnings"] == [] for rank in ranks)
