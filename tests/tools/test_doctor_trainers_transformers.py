"""The doctor on transformers: published bugs of the installed release are found, sound settings have no finding."""

import json

import pytest
import yaml

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
}  # fmt: skip


def found_in(kind, settings, folder, *names):
    """The checks that fail for a model and a run's settings, with all that was found."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **KINDS[kind]}))
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
}  # fmt: skip
"""Of transformers 5.23: settings of a Qwen3-MoE, the check that finds it, and a part of what it says."""


@pytest.mark.parametrize("name", rows(FAULTS, test=list(FAULTS)[:3]))
def test_a_fault_of_the_installed_release_is_found(name, tmp_path, capsys):
    settings, check, says = FAULTS[name]
    wrong, found = found_in("qwen3_moe", settings, tmp_path, check, "later-tokens")
    assert wrong == {check}, capsys.readouterr().out
    assert says in "\n".join([found[check]["first"], *found[check]["causes"]])
