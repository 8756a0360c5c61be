"""The doctor on transformers: published bugs of the installed release are found, sound settings have no finding."""

import json
import re

import pytest
import yaml

from megatron_moe.config.errors import ConfigError
from megatron_moe_tools.doctor.trainers.transformers_target import TransformersTrainer
from tests.helpers.rows import rows
from tests.tools.test_doctor_trainers_ranks import checked, forked  # noqa: F401

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
KINDS = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {
        "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "num_key_value_heads": 4, "n_shared_experts": 1,
    },
    "llama": {},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2_moe": {"moe_intermediate_size": 16, "num_experts": 8, "shared_expert_intermediate_size": 16},
    "qwen3_next": {
        "moe_intermediate_size": 16, "num_experts": 8, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "glm4_moe": {
        "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "ernie4_5_moe": {"moe_intermediate_size": 16, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1},
    "granitemoe": {"num_local_experts": 8},
    "phimoe": {"num_local_experts": 8},  # refused
    "jamba": {
        "num_experts": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "dots1": {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "lfm2_moe": {
        "moe_intermediate_size": 16, "num_experts": 8, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"],
    },
    "minimax_m2": {"num_local_experts": 8},
    "flex_olmo": {"num_experts": 8},
    "deepseek_v2": {
        "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "num_key_value_heads": 4, "n_shared_experts": 1, "topk_method": "greedy",
    },
}  # fmt: skip


FAMILIES = (
    "qwen2_moe", "qwen3_next", "glm4_moe", "ernie4_5_moe", "granitemoe", "jamba", "dots1", "lfm2_moe", "minimax_m2",
    "flex_olmo", "deepseek_v2",
)  # fmt: skip
"""Further kinds of models with experts."""


def model_in(kind, folder):
    """The folder of a small model."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **KINDS[kind]}))
    return model


def found_in(kind, settings, folder, *names):
    """The checks that fail for a model and a run's settings, with all that was found."""
    model_in(kind, folder)
    run = folder / "run.yaml"
    run.write_text(yaml.safe_dump({"model_name_or_path": "model", **settings}))
    target = ("--target", "transformers")
    found, _ = checked(run, folder, *target, *(("--checks", *names) if names else ()))
    return {check for check, one in found.items() if not one["agrees"]}, found


SOUND = {
    "ddp": ("qwen3_moe", {}),
    "dense": ("llama", {}),
    "expert parallel": ("qwen3_moe", {"ep_size": 2, "fsdp_size": 2}),
    "documents apart": ("qwen3_moe", {"packing": True}),
    **{f"{kind} ddp": (kind, {}) for kind in ("mixtral", "olmoe", "gpt_oss", "deepseek_v3")},
    **{f"{kind} ddp": (kind, {}) for kind in FAMILIES},
    "smoothed labels": ("qwen3_moe", {"label_smoothing_factor": 0.1}),
    "auxiliary loss over ranks": ("qwen3_moe", {"router_aux_loss_coef": 0.05}),
    "recomputed": ("qwen3_moe", {"activation_checkpointing": True}),
    "recomputed, old name": ("llama", {"gradient_checkpointing": True}),
    "sgd": ("qwen3_moe", {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.1}),
    "adafactor": ("qwen3_moe", {"optim": "adafactor", "learning_rate": 1e-3}),
    "cosine": ("qwen3_moe", {"lr_scheduler_type": "cosine", "warmup_steps": 10, "learning_rate": 1e-3}),
    "half precision": ("qwen3_moe", {"bf16": True, "tf32": True}),
    "sdpa": ("qwen3_moe", {"attn_implementation": "sdpa"}),
    "flash attention": ("qwen3_moe", {"attn_implementation": "flash_attention_2", "bf16": True}),
    **{
        f"experts by {name}": ("qwen3_moe", {"experts_implementation": name})
        for name in ("eager", "grouped_mm", "batched_mm")
    },
    "tokens of all ranks": ("llama", {"average_tokens_across_devices": True}),
    "resumed": ("llama", {"learning_rate": 1e-3}),
    "resumed, experts in one tensor": ("gpt_oss", {"learning_rate": 1e-3, "lr_scheduler_type": "cosine"}),
    "sharded": ("llama", {"fsdp": "full_shard", "fsdp_config": {"version": 2}}),
    **{f"{kind} tensor parallel": (kind, {"tp_size": 2}) for kind in ("deepseek_v3", "mixtral")},
    **{f"{kind} fully sharded": (kind, {"fsdp_size": 2}) for kind in ("qwen3_moe", "llama")},
    "both": ("mixtral", {"tp_size": 2, "ep_size": 2}),
    "clipped": ("qwen3_moe", {"max_grad_norm": 0.1, "learning_rate": 1e-3, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", rows(SOUND, test=["ddp", "expert parallel"]))
def test_a_sound_setting_has_no_finding(name, tmp_path, capsys):
    kind, settings = SOUND[name]
    checks = {"later-tokens", "padding", "micro-batches", "layout", "gradients"}
    if settings.get("packing"):
        checks = {"documents", "later-tokens", "layout"}
    if name.startswith("resumed"):
        checks = {"resume"}
    if "router_aux_loss_coef" in settings:
        checks.remove("micro-batches")  # a fault of transformers, below
    wrong, _ = found_in(kind, settings, tmp_path, *checks)
    assert wrong == set(), capsys.readouterr().out


FAULTS = {
    "the auxiliary loss grows with the micro-batches": (
        {"router_aux_loss_coef": 0.05}, "micro-batches", "auxiliary losses are added up",
    ),
    "documents of a row see each other while there is a cache": (
        {"packing": True, "use_cache": True}, "documents", "does not tell documents apart",
    ),
    "a resumed Trainer has the experts of the start": (
        {"learning_rate": 1e-3}, "resume", "not restored, or not by its step: model.layers.0.mlp.experts.",
    ),
    "gradients of heads' norms grow with the micro-batches under tensor parallelism": (
        {"tp_size": 2}, "layout", "reduced after every micro-batch",
    ),
    "each rank divides by its own tokens, as it is told to": (
        {"average_tokens_across_devices": False}, "layout", "over different numbers of tokens",
    ),
}  # fmt: skip
"""Of transformers 5.23: settings of a Qwen3-MoE, the check that finds it, and a part of what it says."""


@pytest.mark.parametrize("name", rows(FAULTS, test=list(FAULTS)[:3]))
def test_a_fault_of_the_installed_release_is_found(name, tmp_path, capsys):
    settings, check, says = FAULTS[name]
    wrong, found = found_in("qwen3_moe", settings, tmp_path, check, "later-tokens")
    assert wrong == {check}, capsys.readouterr().out
    assert says in "\n".join([found[check]["first"], *found[check]["causes"]])


REFUSED = {
    "an unknown name": ({"learningrate": 0.1}, "learningrate: not of TrainingArguments"),
    "a string that YAML reads": ({"learning_rate": "1e-3"}, "is '1e-3'. YAML reads 1e-3 as a string"),
    "a string for a switch": ({"packing": "yes please"}, "packing: must not be a string, is 'yes please'"),
    "no size": ({"tp_size": 0}, "tp_size: must be a positive integer, is 0"),
    "an unknown optimizer": ({"optim": "adamw_tirch"}, "optim: unknown value 'adamw_tirch'"),
    "an unknown schedule": ({"lr_scheduler_type": "liner"}, "lr_scheduler_type: unknown value 'liner'"),
    "an unknown attention": ({"attn_implementation": "spda"}, "attn_implementation: unknown value 'spda'"),
    "attention that the model lacks": (
        {"attn_implementation": "sdpa", "kind": "gpt_oss"}, "this model or layout: GptOssForCausalLM",
    ),
    "DeepSpeed": ({"deepspeed": "zero2.json"}, "checked by --target deepspeed"),
    "a layout of accelerate's": ({"parallelism_config": {"tp_size": 2}}, "Use tp_size, ep_size or fsdp_size"),
    "the old name of ep_size": ({"enable_expert_parallel": True, "tp_size": 2}, "Use ep_size"),
    "random choices": ({"kind": "phimoe"}, "its routers sample experts at random"),
    "a plan without a size": ({"tp_plan": "auto"}, "tp_plan: needs tp_size above 1"),
    "experts over too few ranks": ({"ep_size": 2}, "transformers refuses this model or layout: "),
    "more ranks": ({"fsdp_size": 4}, "needs a multiple of 4 ranks"),
    "no model": ({"model_name_or_path": "elsewhere"}, "'elsewhere' is no folder with a config.json"),
}  # fmt: skip
"""Settings that cannot be checked, and a part of the one error."""


@pytest.mark.parametrize("name", rows(REFUSED, test=["an unknown name", "no size"]))
def test_a_mistake_is_one_error_before_anything_runs(name, tmp_path):
    settings, says = REFUSED[name]
    settings = dict(settings)
    with pytest.raises(ConfigError, match=re.escape(says)):
        found_in(settings.pop("kind", "qwen3_moe"), settings, tmp_path)


def test_settings_that_are_not_checked_are_listed(tmp_path):
    given = {
        "bf16": True, "optim": "adamw_bnb_8bit", "attn_implementation": "flash_attention_2", "warmup_steps": 100,
        "neftune_noise_alpha": 5.0, "torch_compile": False, "eval_strategy": "steps", "push_to_hub": True,
        "lr_scheduler_type": "cosine", "max_grad_norm": 0.5, "dataloader_num_workers": 4, "logging_strategy": "epoch",
    }  # fmt: skip
    trainer = TransformersTrainer(model_in("qwen3_moe", tmp_path), given)
    assert set(trainer.leaves_out) == {"bf16", "optim", "attn_implementation", "warmup_steps", "neftune_noise_alpha"}
    trainer = TransformersTrainer(model_in("qwen3_moe", tmp_path), {**given, "tp_size": 2})
    assert "lr_scheduler_type, max_grad_norm" in trainer.leaves_out
