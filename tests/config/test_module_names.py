"""The declared parts are those of the built model: names, parameters, buffers and dtypes; and patterns choose among
them."""

import pytest
import torch

from megatron_moe.config import module_names
from megatron_moe.config.module_names import NONE, SHORT, every_part
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.model import build
from megatron_moe.model.float16_module import model_dtypes, module_name
from megatron_moe.moe.grouped_gemm_fp8 import Fp8Product
from megatron_moe.moe.router import TopKRouter
from megatron_moe.parallel import groups
from megatron_moe.precision import table
from megatron_moe.precision.contract import PrecisionError
from tests.helpers.rows import rows

pytestmark = pytest.mark.engine

TINY = PRESETS["tiny"]
MODELS = {
    "latent, experts": TINY,
    "no query latent": {**TINY, "q_lora_rank": None, "qk_layernorm": False, "moe_shared_expert_gate": True},
    "no query latent, norms": {**TINY, "q_lora_rank": None, "qk_layernorm": True},
    "grouped, experts": PRESETS["tiny-gqa"],
    "norms after the rotation": {**PRESETS["tiny-gqa"], "qk_layernorm": True, "qk_layernorm_after_rotation": True},
    "every second layer": {**TINY, "moe_layer_freq": 2},
    "capacity, no bias, no shared expert": {
        **TINY, "moe_expert_capacity_factor": 1.0, "moe_router_enable_expert_bias": False,
        "moe_shared_expert_intermediate_size": None,
    },
    "dense, biased": {"num_layers": 2, "add_bias_linear": True, "qk_layernorm": True},
    "norms of all heads, and behind": {
        **PRESETS["tiny-gqa"], "qk_layernorm": True, "qk_layernorm_across_heads": True, "reordered_norm": True,
    },
    "dense, tied": {"num_layers": 1, "add_qkv_bias": True},
    "further predictions, experts": {**TINY, "mtp_num_layers": 2},
    "further predictions, tied": {"num_layers": 1, "mtp_num_layers": 1},
    "further predictions, the last layer dense": {**TINY, "moe_layer_freq": 2, "mtp_num_layers": 1},
}  # fmt: skip
# Published models with the layers that differ: names do not depend on how many there are.
FEW_LAYERS = {
    name: {**flags, "num_layers": 3, "moe_layer_freq": "[0]+[1]*2" if "[0]" in str(flags.get("moe_layer_freq")) else 1}
    for name, flags in PRESETS.items()
}


def built(flags):
    """A run and its model in whole, on the meta device: names, shapes and dtypes without storage."""
    run = replace(Run(), **flags)
    with torch.device("meta"):
        return run, build.build_model(run, groups.initialize(run), 128, wrap=False, draw=False)[0]


@pytest.mark.parametrize("model", rows([*MODELS, *FEW_LAYERS], test=MODELS))
def test_names_and_buffers_from_the_run_are_those_of_the_built_model(model, one_process):
    run, chunk = built({**MODELS, **FEW_LAYERS}[model])
    seen = {}
    for path, module in chunk.named_modules():
        own = {name for name, _ in module.named_parameters(recurse=False)}
        if any(True for _ in module.parameters()) or path.endswith("core_attention") or path == "output_layer":
            seen[module_name(chunk, path)] = own
    for chain in ("", "decoder", "decoder.layers", "mtp", "mtp.layers"):
        seen.pop(chain, None)
    known = {name: set(own) for name, own in module_names.modules(run).items()}
    if not run.model.untie_embeddings_and_output_weights:
        known["output_layer"] = set()  # its weight is the embedding's
    assert known == seen

    # Buffers are the declared fp32 state.
    declared, saved = {}, set()
    for name, part in module_names.parts(run).items():
        for buffer, tensor_class in part.state.items():
            if tensor_class.when(run):
                declared[f"{name}.{buffer}"] = tensor_class.stored
            if tensor_class.when(run) and tensor_class.saved != NONE:
                saved.add(f"{name}.{buffer}")
    buffers = {
        f"{module_name(chunk, path)}.{name}": SHORT[str(buffer.dtype).removeprefix("torch.")]
        for path, module in chunk.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
    }
    assert buffers == declared
    prefix = {module_name(chunk, path): path for path, _ in chunk.named_modules()}
    assert {f"{prefix[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}" for name in saved} == {
        key for key in torch.nn.Module.state_dict(chunk) if key.rpartition(".")[2] in TopKRouter.fp32_state
    }


def test_the_router_owns_the_state_that_is_declared():
    declared = {name: tensor.stored for part in every_part() for name, tensor in part.state.items()}
    assert declared == {
        **dict.fromkeys(TopKRouter.fp32_state, "fp32"),
        "local_num_tokens": "int64",
        "local_differences": "int32",
    }


KEPT_ENDS = ("embedding", "output_layer", "attention")
KEPT = ("norms", "router", "experts", "shared_experts")


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("grouped, experts", {}),
        ("latent, experts", {"bf16": True}),
        ("further predictions, experts", {"fp16": True, "keep_fp32": KEPT}),
        ("grouped, experts", {"fp16": True, "keep_fp32": KEPT[:3]}),
        ("latent, experts", {"bf16": True, "keep_fp32": KEPT_ENDS, "qk_layernorm": False}),
        ("further predictions, experts", {"bf16": True, "keep_fp32": KEPT_ENDS, "qk_layernorm": False}),
    ],
    ids=str,
)
def test_weights_have_the_dtype_that_the_contract_prints_and_the_guard_wants(model, precision, one_process):
    run, chunk = built({**MODELS[model], "untie_embeddings_and_output_weights": True, **precision})
    printed = {row.name: row.stored for row in table.contract(run)}
    classes = {}
    for name, part in module_names.parts(run).items():
        around = [classes[outer] for outer in classes if name.startswith(f"{outer}.") and classes[outer]]
        classes[name] = part.tensors[0].name if part.tensors else (around[-1] if around else None)
    wanted = {
        f"{name}.{parameter}": printed[classes[name]]
        for name, own in module_names.modules(run).items()
        for parameter in own
    }
    inventory = [entry for entry in model_dtypes(run, [chunk]) if entry.what == "weight"]
    assert {entry.name: SHORT[str(entry.dtype).removeprefix("torch.")] for entry in inventory} == wanted
    assert all(entry.dtype == entry.wanted for entry in inventory)


def test_the_guard_notices_a_module_that_was_not_kept(one_process, monkeypatch):
    monkeypatch.setattr(build, "keep_in_fp32", lambda *_: None)
    with pytest.raises(PrecisionError, match=r"layers\.1\.mlp\.experts\.weight1 .*bfloat16, must be torch\.float32"):
        built({**TINY, "bf16": True, "keep_fp32": ("experts",)})


def kept(*patterns, **changes):
    return module_names.kept_in_fp32(replace(Run(), **{**TINY, "bf16": True, "keep_fp32": patterns, **changes}))


def test_a_pattern_is_no_prefix_and_a_parameter_stands_for_its_module_and_a_module_for_what_is_in_it():
    assert kept("decoder.layers.1", num_layers=12, moe_layer_freq=1) == ("decoder.layers.1",)
    assert kept("first_layer", "last_layer") == ("decoder.layers.0", "decoder.layers.3")
    assert kept("decoder.layers.2.mlp.experts.weight1") == ("decoder.layers.2.mlp.experts",)
    assert kept("*.router.weight") == tuple(f"decoder.layers.{layer}.mlp.router" for layer in (1, 2, 3))
    inside = tuple(f"decoder.layers.{layer}.self_attention.core_attention" for layer in (1, 2, 3))
    assert kept("decoder.layers.0.*", "decoder.layers.0", "*.core_attention") == ("decoder.layers.0", *inside)


# The patterns that the words of `--keep-fp32` have always stood for.
WORDS = {
    "embedding": "embedding",
    "output_layer": "output_layer",
    "norms": "*norm",
    "router": "*.mlp.router",
    "experts": "*.mlp.experts",
    "shared_experts": "*.mlp.shared_experts",
    "attention": "*.self_attention",
    "softmax": "*.core_attention",
    "first_layer": "decoder.layers.0",
    "last_layer": "decoder.layers.3",
}


def test_every_word_names_the_modules_of_its_kind_in_a_model_that_has_all_parts():
    run = replace(Run(), **TINY, mtp_num_layers=1)
    assert module_names.aliases(run) == {word: module_names.matches(run, pattern) for word, pattern in WORDS.items()}
    assert all(module_names.aliases(run).values())


def test_products_in_fp8_are_those_of_linear_layers_and_experts():
    flags = {**TINY, "bf16": True, "fp8_format": "e4m3", "mtp_num_layers": 1}

    def of(**more: object) -> set[str]:
        return set(module_names.multiplied_in_fp8(replace(Run(), **flags, **more)))

    assert of(fp8_modules=("experts",)) == {f"decoder.layers.{i}.mlp.experts" for i in (1, 2, 3)} | {
        "mtp.layers.0.transformer_layer.mlp.experts"
    }
    assert of(fp8_modules=("mlp",)) == {"decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2"}
    assert of(fp8_modules=("shared_experts",), first_last_layers_bf16=True, num_layers_at_start_in_bf16=3) == {
        f"mtp.layers.0.transformer_layer.mlp.shared_experts.linear_fc{i}" for i in (1, 2)
    }
    attention = ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")
    inner = {f"decoder.layers.{i}.self_attention.linear_{name}" for i in (1, 2) for name in attention}
    found = {name for name in of(first_last_layers_bf16=True) if ".self_attention." in name and "mtp" not in name}
    assert found == inner
    assert not any(word in name for name in of() for word in ("router", "norm", "eh_proj", "embedding", "output_layer"))


@pytest.mark.parametrize(
    "model", ["latent, experts", "grouped, experts", "dense, biased", "further predictions, experts"]
)
def test_what_is_said_to_be_in_fp8_is_built_so(model, one_process):
    one_layer = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}
    run, chunk = built({**MODELS[model], "bf16": True, "fp8_format": "e4m3", **one_layer})
    found = {
        module_name(chunk, name)
        for name, module in chunk.named_modules()
        if hasattr(module, "fp8_product") or isinstance(getattr(module, "grouped_linear", None), Fp8Product)
    }
    assert found == set(module_names.multiplied_in_fp8(run)) and found
