"""Module names from the run alone are those of the built model, and patterns choose among them."""

from __future__ import annotations

import pytest

from megatron_moe.config import module_names
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.build import build_model
from megatron_moe.model.kept_fp32 import module_name
from megatron_moe.parallel import groups

TINY = PRESETS["tiny"]
MODELS = {
    "latent, experts": TINY,
    "no query latent": {**TINY, "q_lora_rank": None, "qk_layernorm": False, "moe_shared_expert_gate": True},
    "grouped, experts": PRESETS["tiny-gqa"],
    "dense, biased": {"num_layers": 2, "add_bias_linear": True, "qk_layernorm": True},
    "dense, tied": {"num_layers": 1, "add_qkv_bias": True},
    "further predictions, experts": {**TINY, "mtp_num_layers": 2},
    "further predictions, tied": {"num_layers": 1, "mtp_num_layers": 1},
}


@pytest.mark.parametrize("model", MODELS)
def test_names_from_the_run_are_those_of_the_built_model(model, one_process):
    run = replace(Run(), **MODELS[model])
    chunk = build_model(run, groups.initialize(run), 128, wrap=False)[0]
    built = {}
    for path, module in chunk.named_modules():
        own = tuple(name for name, _ in module.named_parameters(recurse=False))
        if any(True for _ in module.parameters()) or path.endswith("core_attention") or path == "output_layer":
            built[module_name(chunk, path)] = own
    for chain in ("", "decoder", "decoder.layers", "mtp", "mtp.layers"):
        built.pop(chain, None)
    known = {name: set(own) for name, own in module_names.modules(run).items()}
    if not run.model.untie_embeddings_and_output_weights:
        known["output_layer"] = set()  # its weight is the embedding's
    assert known == {name: set(own) for name, own in built.items()}


def kept(*patterns, **changes):
    return module_names.kept_in_fp32(replace(Run(), **{**TINY, "bf16": True, "keep_fp32": patterns, **changes}))


def test_layers_count_from_zero_and_a_pattern_is_no_prefix():
    assert kept("decoder.layers.1", num_layers=12, moe_layer_freq=1) == ("decoder.layers.1",)
    assert kept("first_layer", "last_layer") == ("decoder.layers.0", "decoder.layers.3")


def test_a_parameter_stands_for_the_module_that_holds_it():
    assert kept("decoder.layers.2.mlp.experts.weight1") == ("decoder.layers.2.mlp.experts",)
    assert kept("*.router.weight") == tuple(f"decoder.layers.{layer}.mlp.router" for layer in (1, 2, 3))


def test_what_lies_inside_a_kept_module_is_not_named_again():
    assert kept("decoder.layers.0.*", "decoder.layers.0", "*.core_attention") == (
        "decoder.layers.0",
        *(f"decoder.layers.{layer}.self_attention.core_attention" for layer in (1, 2, 3)),
    )


def test_every_short_word_names_something_in_a_model_that_has_all_parts():
    run = replace(Run(), **TINY)
    assert module_names.usable_aliases(run) == list(module_names.aliases(run))
