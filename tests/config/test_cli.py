"""The command line: one field is one flag, typed by its annotation; flags win over file, file over preset."""

from __future__ import annotations

import pytest

from megatron_moe.config import cli, schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.rules import ignored
from megatron_moe.config.run_flags import TIKTOKEN_FIELDS


def message_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        cli.parse(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def typed(field) -> list[str]:
    """Words for a field that differ from its default where there is another choice."""
    if field.choices is not None:
        return [str(field.choices[-1])]
    return {int: ["7"], float: ["7.5"], str: ["text"]}[field.kinds[-1]]


# Flags that are left out where they are not read (test_rules_ignored.py), with what reads them.
READ_WITH = {
    **dict.fromkeys(ignored.YARN_FIELDS, "--multi-latent-attention --rope-type yarn"),
    **dict.fromkeys(ignored.LOADING, "--load somewhere"),
    **dict.fromkeys(ignored.SAVING, "--save somewhere"),
    **dict.fromkeys(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        "--pipeline-model-parallel-size 2",
    ),
    "num_query_groups": "--group-query-attention",
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), "--multi-latent-attention"
    ),
    "mtp_loss_scaling_factor": "--mtp-num-layers 1",
    **dict.fromkeys(("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), "--fp16"),
    "first_last_layers_bf16": "--fp8-format e4m3",
    **dict.fromkeys(
        ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), "--first-last-layers-bf16 --fp8-format e4m3"
    ),
    **dict.fromkeys(("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"), "--lr-decay-style WSD"),
    **dict.fromkeys(("recompute_method", "recompute_num_layers"), "--recompute-granularity full"),
    "recompute_modules": "--recompute-granularity selective",
    "offload_modules": "--fine-grained-activation-offloading",
    "decoupled_min_lr": "--decoupled-lr 1",
    "sequence_parallel": "--tensor-model-parallel-size 2",
    **dict.fromkeys(TIKTOKEN_FIELDS, "--tokenizer-type TikTokenizer"),
    "attention_backend": "--transformer-impl transformer_engine",
    **dict.fromkeys(ignored.READ_WITH["manual_gc"], "--manual-gc"),
    **dict.fromkeys(ignored.READ_WITH["profile"], "--profile"),
    **dict.fromkeys((*ignored.READ_WITH["tensorboard_dir"], *ignored.SCALARS), "--tensorboard-dir somewhere"),
    **dict.fromkeys(ignored.READ_WITH["qk_clip"], "--qk-clip"),
    **dict.fromkeys(ignored.READ_WITH["wandb_project"], "--wandb-project mine"),
}


def test_no_flags_give_the_defaults():
    assert cli.parse([]) == schema.Run()


@pytest.mark.parametrize("name", [name for name, field in all_fields().items() if not field.is_bool])
def test_a_flag_sets_its_field_and_no_other(name):
    field = all_fields()[name]
    words = typed(field)
    expected = words[0] if field.kinds[-1] is str else field.kinds[-1](words[0])
    readers = READ_WITH.get(name, "").split()
    run = cli.parse([field.flag, *words, *readers])
    assert run == schema.replace(cli.parse(readers), **{name: (expected,) if field.repeated else expected})
    stored = getattr(getattr(run, field.section), name)
    assert type(stored[0] if field.repeated else stored) is field.kinds[-1]


NEVER_READ = {"fp8_param_gather"}
"""Switches that the command line leaves out whatever else is set."""


@pytest.mark.parametrize(
    "name", [name for name, field in all_fields().items() if field.is_bool and name not in NEVER_READ]
)
def test_a_boolean_has_a_flag_for_each_side(name):
    field = all_fields()[name]
    readers = READ_WITH.get(name, "").split()
    on, off = ([*readers, flag] for flag in (field.flag, field.negative_flag))
    assert cli.parse(on) == schema.replace(cli.parse(readers), **{name: True})
    assert cli.parse(off) == schema.replace(cli.parse(readers), **{name: False})


def test_a_boolean_named_for_its_absence_is_undone_without_a_double_no():
    assert cli.parse(["--load-optim"]).checkpoint.no_load_optim is False


def test_megatrons_spelling_of_the_bias_flag_is_known():
    assert cli.parse(["--disable-bias-linear"]).model.add_bias_linear is False


def test_an_open_boolean_stays_open():
    assert cli.parse([]).moe.moe_router_norm_topk_prob is None


def test_the_layer_frequency_is_a_number_or_an_expression():
    assert cli.parse(["--moe-layer-freq", "2"]).moe.moe_layer_freq == 2
    assert cli.parse(["--moe-layer-freq", "[0]+[1]*3"]).moe.moe_layer_freq == "[0]+[1]*3"


def test_a_repeated_flag_takes_all_its_words():
    assert cli.parse(["--data-path", "0.5", "a", "0.5", "b"]).data.data_path == ("0.5", "a", "0.5", "b")
    assert cli.parse(["--rampup-batch-size", "8", "8", "1000"]).training.rampup_batch_size == (8, 8, 1000)


def test_none_unsets_what_a_preset_set():
    assert cli.parse(["--preset", "tiny", "--q-lora-rank", "none"]).model.q_lora_rank is None
    assert cli.parse(["--rampup-batch-size", "none"]).training.rampup_batch_size is None
    assert cli.parse(["--position-embedding-type", "none"]).model.position_embedding_type == "none"


@pytest.mark.parametrize(
    ("argv", "fragments"),
    [
        (["--moe-router-tpok", "2"], ["--moe-router-tpok", "did you mean --moe-router-topk?"]),
        (["--moe_router_topk", "2"], ["--moe_router_topk", "did you mean --moe-router-topk?"]),
        (["--moe-router-tpok=2"], ["--moe-router-tpok", "did you mean --moe-router-topk?"]),
        (["--num-layer", "2"], ["--num-layer ", "did you mean --num-layers?"]),
        (["--zzzz"], ["--zzzz", "--help"]),
        (["4"], ["'4'"]),
        (["--num-layers", "four"], ["--num-layers", "four", "whole number"]),
        (["--num-layers", "4.0"], ["--num-layers", "4.0", "whole number"]),
        (["--num-layers"], ["--num-layers: needs a value"]),
        (["--num-layers", "none"], ["--num-layers", "none"]),
        (["--lr", "fast"], ["--lr", "fast", "not a number"]),
        (["--moe-router-dtype", "bf16"], ["--moe-router-dtype", "bf16", "fp32, fp64"]),
        (["--moe-router-score-function", "sigmoyd"], ["sigmoyd", "did you mean sigmoid?"]),
        (["--moe-router-load-balancing-type", "aux_loss", "foo"], ["--moe-router-load-balancing-type", "foo"]),
        (["--bf16=yes"], ["--bf16", "yes"]),
        (["--rampup-batch-size", "8", "none"], ["--rampup-batch-size", "none"]),
        (["--preset", "demmo"], ["--preset demmo", "did you mean demo?"]),
    ],
)
def test_a_wrong_word_is_refused_with_flag_and_value(argv, fragments):
    message = message_of(*argv)
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize("flag", ["--num-experts", "--preset", "--lr", "--data-path"])
def test_no_flag_may_be_shortened(flag):
    assert f"unknown flag {flag[:-1]} " in message_of(flag[:-1], "4")


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_layers: 8\nhidden_size: 96\n")
    run = cli.parse(["--hidden-size", "128", "--config", str(path), "--preset", "tiny"])
    tiny = PRESETS["tiny"]
    assert (run.model.hidden_size, run.model.num_layers, run.model.seq_length) == (128, 8, tiny["seq_length"])
    assert run.moe.moe_router_group_score == schema.Run().moe.moe_router_group_score


def test_a_file_can_set_back_a_preset_to_its_default(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("bf16: false\nq_lora_rank: null\n")
    run = cli.parse(["--preset", "demo", "--config", str(path)])
    assert (run.precision.bf16, run.model.q_lora_rank) == (False, None)


def help_text(capsys, *topic: str) -> str:
    with pytest.raises(SystemExit) as left:
        cli.parse(["--help", *topic])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_shows_every_flag_in_the_group_of_its_section_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    text = help_text(capsys, "all")
    lines = text.splitlines()
    group = None
    found: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith(" ") and line.endswith(":"):
            group = line[:-1]
        for word in line.replace(",", " ").split():
            if word.startswith("--") and line.startswith("  --"):
                found.setdefault(word, group)
    for field in all_fields().values():
        assert found[field.flag] == field.section
    assert "--hidden-size" in text and "(default: 256)" in text


def test_help_is_printed_by_the_first_rank_only(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert help_text(capsys) == ""


def test_a_run_survives_flatten_and_build():
    run = cli.parse(["--preset", "demo", "--data-path", "1", "a", "--rampup-batch-size", "8", "8", "100"])
    assert schema.build(schema.flatten(run)) == run
