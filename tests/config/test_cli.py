"""The command line: one field is one flag, typed by its annotation; flags win over file, file over preset."""

import pytest

from megatron_moe.config import cli, schema
from megatron_moe.config.command_line import SCRIPT
from megatron_moe.config.fields import all_fields
from megatron_moe.config.presets import PRESETS
from tests.config.refused import refused


def typed(field) -> list[str]:
    """Words for a field that differ from its default where there is another choice."""
    if field.choices is not None:
        return [str(field.choices[-1])]
    return {int: ["7"], float: ["7.5"], str: ["text"]}[field.kinds[-1]]


def test_a_flag_sets_its_field_and_no_other():
    for name, field in all_fields().items():
        if field.is_bool:
            continue
        words = typed(field)
        expected = words[0] if field.kinds[-1] is str else field.kinds[-1](words[0])
        run = cli.parse([field.flag, *words])
        assert run == schema.replace(schema.Run(), **{name: (expected,) if field.repeated else expected}), name
        stored = getattr(getattr(run, field.section), name)
        assert type(stored[0] if field.repeated else stored) is field.kinds[-1], name


def test_a_boolean_has_a_flag_for_each_side():
    for name, field in all_fields().items():
        if not field.is_bool:
            continue
        assert cli.parse([field.flag]) == schema.replace(schema.Run(), **{name: True}), name
        assert cli.parse([field.negative_flag]) == schema.replace(schema.Run(), **{name: False}), name


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--load-optim", "no_load_optim", False),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("", "moe_router_norm_topk_prob", None),
        ("--moe-layer-freq 2", "moe_layer_freq", 2),
        ("--moe-layer-freq [0]+[1]*3", "moe_layer_freq", "[0]+[1]*3"),
        ("--data-path 0.5 a 0.5 b", "data_path", ("0.5", "a", "0.5", "b")),
        ("--rampup-batch-size 8 8 1000", "rampup_batch_size", (8, 8, 1000)),
        ("--preset tiny --q-lora-rank none", "q_lora_rank", None),
        ("--rampup-batch-size none", "rampup_batch_size", None),
        ("--position-embedding-type none", "position_embedding_type", "none"),
    ],
)
def test_words_of_a_flag_become_its_value(words, name, value):
    assert getattr(getattr(cli.parse(words.split()), all_fields()[name].section), name) == value


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("preset: demo\nnum_layers: 8\nhidden_size: 96\n")
    run = cli.parse(["--hidden-size", "128", "--config", str(path), "--preset", "tiny"])
    tiny = PRESETS["tiny"]
    assert (run.model.hidden_size, run.model.num_layers, run.model.seq_length) == (128, 8, tiny["seq_length"])
    assert run.moe.moe_router_group_score == schema.Run().moe.moe_router_group_score
    path.write_text("preset: demo\nbf16: false\nq_lora_rank: null\n")  # a preset's settings, back to the defaults
    run = cli.parse(["--config", str(path)])
    wanted = (False, None, PRESETS["demo"]["hidden_size"])
    assert (run.precision.bf16, run.model.q_lora_rank, run.model.hidden_size) == wanted


def help_text(capsys, *topic: str) -> str:
    with pytest.raises(SystemExit) as left:
        cli.parse(["--help", *topic])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_shows_every_flag_in_the_group_of_its_section_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    text = help_text(capsys, "all")
    group, found = "", {}
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            group = line[:-1]
        if line.startswith("  --"):
            found.setdefault(line.replace(",", " ").split()[0], group)
    for field in all_fields().values():
        assert found[field.flag] == field.section
    assert "--hidden-size" in text and "(default: 256)" in text


def test_help_is_printed_by_the_first_rank_only(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert help_text(capsys) != ""  # a variable that was left over: there is no other rank
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert help_text(capsys) == ""


def test_a_run_survives_flatten_and_build():
    run = cli.parse(["--preset", "demo", "--data-path", "1", "a", "--rampup-batch-size", "8", "8", "100"])
    assert schema.build(schema.flatten(run)) == run


def test_flags_of_megatrons_alone_are_unknown_here_and_the_message_says_who_reads_them():
    refused(lambda: cli.parse(["--use-mcore-models", "--moe-grouped-gemm"]), "--use-mcore-models", SCRIPT, lines=3)
    assert cli.parse(["--num-layers", "2", "--sequence-parallel"]).explicit == {"num_layers", "sequence_parallel"}
