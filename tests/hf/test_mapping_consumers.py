"""vLLM's and SGLang's classes take every tensor of an exported folder, once, and are filled by it.

`consumers.yaml` has what their sources say. Neither is installed: a folder's names and shapes walk through the same
steps as in their `load_weights`, without weights, tensor parallelism or quantization.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import build
from megatron_moe.hf.config import config_of, settings
from megatron_moe.hf.families import FAMILIES
from megatron_moe.hf.mapping import mapping
from tests.helpers import tiny_models

FACTS = yaml.safe_load(Path(__file__).with_name("consumers.yaml").read_text(encoding="utf-8"))
CONSUMERS = ("vllm", "sglang")
Shapes = dict[str, tuple[int, ...]]
Slots = dict[tuple[str, Any], tuple[int, ...]]


class Known(dict[str, Any]):
    """Values by name for expressions; a key that config.json lacks is None, as for getattr(config, key, None)."""

    def __missing__(self, key: str) -> Any:
        return None

    def value(self, expression: Any) -> Any:
        return eval(str(expression), {"__builtins__": {}}, self)


def of_config(loader: dict[str, Any], config: dict[str, Any]) -> Known:
    """The keys of config.json and the sizes that a class computes from them."""
    known = Known(config)
    for name, expression in loader["sizes"].items():
        known[name] = known.value(expression)
    return known


def slots_of(loader: dict[str, Any], known: Known) -> Slots:
    """What a class has to be given: the shape of each parameter's slices, an expert's by (slice, expert)."""
    slots: Slots = {}

    def add(parts: list[str], prefix: str) -> None:
        for part in parts:
            name, _, condition = part.partition(" if ")
            for parameter, shape in FACTS["parts"][name].items() if not condition or known.value(condition) else ():
                for piece, sizes in shape.items() if isinstance(shape, dict) else ((None, shape),):
                    dimensions = tuple(known.value(size) for size in sizes)
                    experts = range(known["E"]) if str(piece).startswith("w") else (None,)
                    for expert in experts:
                        slots[prefix + parameter, piece if expert is None else (piece, expert)] = dimensions

    add([*loader["top"]], "")
    if loader["head"] == "own" or not known["tie_word_embeddings"]:
        add(["head"], "")
    for layer in range(known["num_hidden_layers"]):
        known["L"] = layer
        add([*loader["layer"], *loader["sparse" if known.value(loader["moe"]) else "dense"]], f"model.layers.{layer}.")
    return slots


def slot(loader: dict[str, Any], known: Known, parameters: set[str], name: str) -> tuple[str, Any]:
    """Where a tensor goes, by its name alone."""
    for was, becomes in loader.get("renamed", ()):
        name = name.replace(was, becomes)
    is_expert = loader["expert_marks"] is not None and loader["expert_marks"] in name
    for part, becomes, piece in loader["stacked"]:
        mapped = name.replace(part, becomes)
        # latent attention without a low rank of the queries has no joined parameter, and takes both as they are
        joined = becomes != "fused_qkv_a_proj" or mapped in parameters
        if part in name and not is_expert and joined:
            return mapped, piece
    for matrix, parameter, piece in zip(loader["experts"] or (), ("w13_", "w13_", "w2_"), ("w1", "w3", "w2")):
        for expert in range(known["E"]):
            if f"experts.{expert}.{matrix}." in name:
                return name.replace(f"experts.{expert}.{matrix}.", f"experts.{parameter}"), (piece, expert)
    return name, None


def loaded(loader: dict[str, Any], config: dict[str, Any], folder: Shapes) -> list[str]:
    """Let a class take a folder; return its complaints, and what it would not complain about."""
    known = of_config(loader, config)
    slots = slots_of(loader, known)
    parameters = {parameter for parameter, _ in slots}
    depth, predicted = known["num_hidden_layers"], known[loader["prediction"] or ""] or 0
    later = tuple(f"model.layers.{depth + number}." for number in range(predicted))
    said, taken = [], {}
    for name, shape in folder.items():
        if any(part in name for part in loader["skipped"]) or (later and name.startswith(later)):
            continue
        if name == "lm_head.weight" and loader["head"] == "tied" and known["tie_word_embeddings"]:
            continue
        place = slot(loader, known, parameters, name)
        if place not in slots:
            said.append(f"{name} has no parameter: {loader['unknown']}")
        elif place in taken:
            said.append(f"{name} is taken where {taken[place]} was")
        elif slots[place] != tuple(shape):
            said.append(f"{name} is {tuple(shape)}, and not {slots[place]}")
        taken[place] = name
    return said + [f"{parameter} {piece or ''} is left as it was" for parameter, piece in slots.keys() - taken.keys()]


def exported(case: str, **changes: Any) -> tuple[str, dict[str, Any], Shapes]:
    """The family, config.json and tensors of a case, as `convert --to hf` writes a model that was trained here."""
    config = tiny_models.config(case)
    config.architectures = [tiny_models.class_of(case, "ForCausalLM").__name__]
    read = settings(json.loads(config.to_json_string()), has_prediction_layers=False, where="folder")
    run = build({**read.flat, **changes})
    table = mapping(run, read.family.names)
    folder = dict(table.hf_shapes)
    for name, same_as in table.copies.items():
        if name != "lm_head.weight" or read.family.served_untied:
            folder[name] = folder[same_as]
    try:
        return read.family.name, config_of(run, read.family, "float32"), folder
    except ConfigError as refused:
        pytest.skip(f"a model that was trained here is not written so: {refused}")


def loader_of(consumer: str, family: str, config: dict[str, Any]) -> dict[str, Any]:
    loader = FACTS[consumer][family]
    if not isinstance(loader, dict):
        pytest.skip(f"{consumer} has {loader} for {family}")
    if "fits" in loader and not Known(config).value(loader["fits"]):
        pytest.skip(f"{loader['class']} only loads where {loader['fits']}")
    return loader


def test_every_family_says_what_its_consumers_take() -> None:
    unsaid = {name for name in FAMILIES for consumer in CONSUMERS if name not in FACTS[consumer]}
    assert unsaid == set(), "each needs an entry in tests/hf/consumers.yaml, or a word such as `no loader`"


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("case", tiny_models.CASES)
def test_a_consumer_takes_every_tensor_once_and_is_filled(case: str, consumer: str) -> None:
    family, config, folder = exported(case)
    assert loaded(loader_of(consumer, family, config), config, folder) == []


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.predicts])
def test_layers_of_multi_token_prediction_are_left_to_a_class_of_their_own(family: str) -> None:
    architecture = FAMILIES[family].architecture
    case = next(
        case for case in tiny_models.CASES if architecture == tiny_models.class_of(case, "ForCausalLM").__name__
    )
    _, config, folder = exported(case, mtp_num_layers=1)
    assert any("eh_proj" in name for name in folder)
    for consumer in CONSUMERS:
        loader = loader_of(consumer, family, config)
        assert loaded(loader, config, folder) == []
        assert loaded({**loader, "prediction": None}, config, folder) != []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_output_layer_is_written_where_a_consumer_would_leave_its_own_unset(family: str) -> None:
    loaders = [FACTS[consumer][family] for consumer in CONSUMERS]
    unset = [loader["class"] for loader in loaders if isinstance(loader, dict) and loader["head"] == "own"]
    assert not unset or FAMILIES[family].served_untied, f"unset in {unset}: served_untied=True"


@pytest.mark.parametrize(
    "planted, said",
    {
        "a tensor more": (lambda folder: folder | {"model.layers.1.mlp.norm.weight": (8,)}, "has no parameter"),
        "a bias more": (lambda folder: folder | {"model.layers.1.self_attn.q_proj.bias": (96,)}, "has no parameter"),
        "an expert less": (
            lambda folder: {name: shape for name, shape in folder.items() if "1.mlp.experts.7.up" not in name},
            "('w3', 7) is left as it was",
        ),
        "another name of gates": (
            lambda folder: {name.replace("mlp.gate.", "mlp.router."): shape for name, shape in folder.items()},
            "mlp.gate.weight  is left as it was",
        ),
        "down as up": (
            lambda folder: {name: shape[::-1] if "down_proj" in name else shape for name, shape in folder.items()},
            "and not (64, 24)",
        ),
        "an expert twice": (lambda folder: folder | {"model.layers.1.mlp.experts.0.gate_proj.w": (24, 64)}, ""),
    }.values(),
)
def test_what_a_consumer_would_miss_is_found(planted: Any, said: str) -> None:
    family, config, folder = exported("qwen3-moe")
    for consumer in CONSUMERS:
        complaints = loaded(FACTS[consumer][family], config, planted(folder))
        assert any(said in complaint for complaint in complaints), complaints
