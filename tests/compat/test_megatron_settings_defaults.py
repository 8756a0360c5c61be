"""Megatron-LM's defaults: the table is right, `--defaults megatron` takes them, and a run names those it leaves."""

import dataclasses
import shlex
from typing import Any

import pytest
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_moe.config import rules
from megatron_moe.config.fields import all_fields
from megatron_moe.config.schema import Run, flatten
from megatron_moe_tools import compat
from megatron_moe_tools.compat.megatron_settings import DEFAULTS
from tests.config.refused import refused

MODEL = (
    "--num-layers 2 --hidden-size 96 --num-attention-heads 4 --seq-length 64 --lr 1e-4 --train-iters 9"
    " --position-embedding-type rope --normalization RMSNorm --mock-data --vocab-size 100"
)
EXPERTS = f"{MODEL} --swiglu --disable-bias-linear --num-experts 8"
MEGATRON = "--defaults megatron"


def parse(command: str) -> Run:
    run = compat.parse(shlex.split(command))
    rules.check(run, 2 if "-parallel-size 2" in command else 1)
    return run


def changed(command: str, extra: str = MEGATRON) -> dict[str, Any]:
    """Return the fields that flags change in the run of a command."""
    before, after = flatten(parse(command)), flatten(parse(f"{command} {extra}"))
    return {name: value for name, value in after.items() if value != before[name]}


# ---- the table


ENGINE_NAMES = {"norm_epsilon": "layernorm_epsilon", "swiglu": "gated_linear_unit", "num_experts": "num_moe_experts"}
# Where the engine's classes and Megatron-LM's command line have unlike defaults, and that is so here too.
UNSET = (
    "num_layers hidden_size num_attention_heads q_lora_rank data_parallel_sharding_strategy moe_deepep_num_sms"
    " moe_hybridep_num_sms moe_enable_routing_replay gradient_accumulation_fusion offload_modules cuda_graph_modules"
)
OFF = ("multi_latent_attention", "attention_softmax_in_fp32", "accumulate_allreduce_grads_in_fp32")
COMMAND_LINE: dict[str, Any] = {
    **dict.fromkeys(UNSET.split()),
    **dict.fromkeys(OFF, False),
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), "fp32"),
    "rotary_scaling_factor": 1.0,
    "min_lr": 0.0,
    "kv_lora_rank": 32,
    "cp_comm_type": "p2p",
    "attention_backend": "auto",
}


@pytest.mark.engine
def test_the_table_has_each_default_of_the_engine_that_is_another_one_here():
    table = {default.field: default for default in DEFAULTS if default.where != "a dense model"}
    found = 0
    for config in (TransformerConfig, MLATransformerConfig, OptimizerConfig):
        engine = {field.name: field.default for field in dataclasses.fields(config)}
        for name, field in all_fields().items():
            theirs = engine.get(ENGINE_NAMES.get(name, name), field.default)
            theirs = COMMAND_LINE.get(name, theirs)
            if name == "fp8_recipe" and theirs is None:  # the optimizer's, which asks for none without FP8
                continue
            if field.default not in (theirs, (theirs,)):
                assert table[name].value in (theirs, [theirs]), name
                found += 1
    assert found > 20


def test_each_field_of_the_table_is_a_field_and_another_value():
    for default in DEFAULTS:
        field = all_fields()[default.field]
        assert default.answer in ("taken", "to give", "kept")
        assert default.value != field.default or default.answer == "to give"
        if default.answer == "taken" and field.choices is not None:
            assert default.value in (*field.choices, *([choice] for choice in field.choices))
        assert default.reason or default.answer == "taken", default


# ---- what is taken


def test_what_a_command_leaves_open_becomes_megatrons():
    always = (
        "--norm-epsilon 1e-5 --attention-dropout 0.1 --hidden-dropout 0.1 --lr-decay-style linear --adam-beta2 0.999"
        " --eval-iters 100 --num-workers 2 --log-interval 100 --on-nan stop"
    )
    assert parse(f"{EXPERTS} {MEGATRON}") == parse(f"{EXPERTS} {always} --ffn-hidden-size 256")
    assert parse(f"{MODEL} {MEGATRON}") == parse(f"{MODEL} {always} --no-swiglu --add-bias-linear")


GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 2"


@pytest.mark.parametrize(
    ("flags", "taken"),
    [
        ("--multi-latent-attention", {"kv_lora_rank": 32, "rope_type": "yarn"}),
        (GROUPS, {"moe_router_group_score": "megatron"}),
        (f"{GROUPS} --moe-router-topk 4 --moe-router-score-function sigmoid", {}),
        ("--fp16", {"initial_loss_scale": 2.0**32, "accumulate_allreduce_grads_in_fp32": False}),
        ("--fp16 --loss-scale 8", {"accumulate_allreduce_grads_in_fp32": False}),
        ("--bf16", {}),
        ("--expert-model-parallel-size 2", {"moe_token_dispatcher_type": "allgather"}),
        (
            "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
            {"moe_global_aux_loss_counts": "running"},
        ),
    ],
)
def test_a_default_is_taken_where_it_makes_a_difference(flags, taken):
    assert changed(f"{EXPERTS} {flags}") == {**changed(EXPERTS), **taken}


def test_a_coefficient_without_a_kind_of_loss_is_megatrons():
    run = parse(f"{EXPERTS} --moe-aux-loss-coeff 0.1 {MEGATRON}")
    assert run.moe.moe_router_load_balancing_type == ("aux_loss",)


def test_a_note_says_what_is_taken_and_what_is_kept():
    taken, kept = parse(f"{EXPERTS} --bf16 {MEGATRON}").warnings
    assert "--norm-epsilon 1e-05" in taken and "--ffn-hidden-size 256" in taken
    assert "--moe-router-dtype fp32" in kept and "--transformer-impl local" in kept


def test_flags_and_files_and_presets_win_over_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("adam_beta2: 0.5\nlr_decay_style: cosine\n")
    run = parse(f"{EXPERTS} {MEGATRON} --config {file} --adam-beta2 0.6")
    assert (run.optimizer.adam_beta2, run.optimizer.lr_decay_style, run.model.norm_epsilon) == (0.6, "cosine", 1e-5)
    # A preset contains what differs from our defaults: what it leaves out of its sections is decided too.
    preset = changed("--preset tiny --mock-data --vocab-size 100")
    assert preset == {"num_workers": 2, "log_interval": 100, "on_nan": "stop"}
    assert parse(f"--preset tiny --mock-data --vocab-size 100 {MEGATRON} --adam-beta2 0.6").optimizer.adam_beta2 == 0.6


def test_the_architecture_of_a_folder_wins_over_defaults():
    def filled_in(given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "num_layers": 3}

    run = compat.parse(shlex.split(f"--mock-data --lr 1 {MEGATRON}"), filled_in)
    assert (run.model.normalization, run.model.norm_epsilon, run.optimizer.adam_beta2) == ("RMSNorm", 1e-6, 0.999)


def test_defaults_that_are_not_here_are_asked_for_all_at_once():
    texts = ["--normalization (LayerNorm there)", "--normalization RMSNorm", "--swiglu"]
    command = shlex.split(f"--num-layers 2 --num-experts 4 {MEGATRON}")
    said = refused(lambda: compat.parse(command), *texts, "--lr:", "--hidden-size", lines=8)
    assert "--num-layers" not in said and "--fp8-recipe" not in said


def test_defaults_of_two_programs_are_refused():
    command = shlex.split(f"{EXPERTS} {MEGATRON} --deepspeed-config x.json")
    refused(lambda: compat.parse(command), "--defaults", "--deepspeed-config")


# ---- what is left


def test_a_command_of_megatrons_is_told_which_defaults_are_others():
    _, line = parse(f"{EXPERTS} --use-mcore-models").warnings
    assert "--norm-epsilon 1e-06 (1e-05)" in line and "--adam-beta2 0.95 (0.999)" in line and MEGATRON in line
    assert "--ffn-hidden-size 4 x hidden-size" in line
    for same in ("--num-workers", "--log-interval", "--kv-lora-rank", "--normalization", "--transformer-impl"):
        assert same not in line


@pytest.mark.parametrize(
    "command",
    [EXPERTS, f"{EXPERTS} --use-mcore-models --defaults ours", "--preset tiny --use-mcore-models --mock-data"],
)
def test_others_are_not_told(command):
    assert not any("--defaults" in note for note in compat.parse(shlex.split(command)).warnings)
