"""megatron-moe plan: a table for people, JSON for programs, and refusals that name layouts nearby."""

import json
import logging
import re

import pytest

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.hf.config import config_of
from megatron_moe.hf.families import FAMILIES
from megatron_moe_tools.plan import cli
from megatron_moe_tools.plan import plan as planning

TINY = "--preset tiny-gqa --vocab-size 1000 --bf16 --use-distributed-optimizer"


def test_text_and_json_agree(tmp_path, capsys, recwarn):
    path = tmp_path / "plan.json"
    words = f"{TINY} --world-size 2 --expert-model-parallel-size 2 --json {path}"
    assert cli.main(words.split()) == 0
    text, plan = capsys.readouterr().out, json.loads(path.read_text())
    # Not of files that something else left open, which are told wherever they are found.
    warned = [one for one in recwarn if "megatron" in one.filename and one.category is not ResourceWarning]
    assert [str(one.message) for one in warned] == []
    assert {"total_params", "active_params", "max_memory_gib", "ranks"} <= set(plan)
    assert f"{plan['total_params']:,}" in text
    assert not re.search(r"largest rank 0\.00 |0\.00 s a step", text)  # what is small is not nothing
    assert [rank["ranks"] for rank in plan["ranks"]] == [[0, 1]]
    assert {"weights", "gradients", "optimizer", "activations", "peak"} <= set(plan["ranks"][0]["memory"])
    assert list(plan["recomputation"]) == ["none", "selective: core_attn", "selective: core_attn moe", "full"]
    assert plan["recomputation"]["full"] < plan["recomputation"]["none"] == plan["max_memory_gib"]
    assert plan["imbalances"]["2"] > plan["imbalances"]["1"]
    fits = [row["fits"] for row in plan["alternatives"]]
    assert fits == sorted(fits, reverse=True)
    for words in ("nearest legal layouts", "sent by a rank per step", "pipeline bubble", "wrote "):
        assert words in text


def test_speed_is_that_of_a_peak_that_somebody_gave_or_a_gpus_and_counts_muon(tmp_path, capsys):
    def speed(flags):
        path = tmp_path / "plan.json"
        assert cli.main(f"{TINY} --world-size 2 --alternatives 0 --json {path} {flags}".split()) == 0
        return json.loads(path.read_text()), capsys.readouterr().out

    gpu, text = speed("")
    assert f"989 TFLOP/s: {gpu['tokens_per_second']:,.0f} tokens/s" in text
    tokens = gpu["global_batch_size"] * PRESETS["tiny-gqa"]["seq_length"]
    assert gpu["tokens_per_second"] * gpu["seconds_per_step"] == pytest.approx(tokens)
    unknown, text = speed("--device cpu")
    assert unknown["tokens_per_second"] is unknown["seconds_per_step"] is None
    assert "tokens/s" not in text and "--peak-tflops" in text
    cpu, _ = speed("--device cpu --peak-tflops 1")
    assert cpu["seconds_per_step"] == pytest.approx(989 * gpu["seconds_per_step"])
    apart, _ = speed("--reset-attention-mask --mean-document-length 8")
    assert apart["seconds_per_step"] < gpu["seconds_per_step"]
    assert cli.main(f"{TINY} --world-size 2 --mean-document-length 8".split()) == 2
    assert "add --reset-attention-mask" in capsys.readouterr().err
    muon, text = speed("--optimizer muon")
    assert muon["seconds_per_step"] * (1 - muon["muon_share"]) == pytest.approx(gpu["seconds_per_step"])
    assert 0 < muon["muon_share"] < 1 and f"Muon's iteration {muon['muon_share']:.1%}" in text
    assert gpu["muon_share"] == 0


def test_a_config_json_is_planned_without_weights(tmp_path, capsys):
    layers = {"num_layers": 2, "moe_layer_freq": "[0,1]", "mtp_num_layers": 1}
    run = build({**PRESETS["tiny"], **layers, "vocab_size": 1000})
    folder, plan = tmp_path / "model", tmp_path / "plan.json"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(run, FAMILIES["deepseek-v3"], "bfloat16")))
    flags = f"--load-hf {folder} --bf16 --seq-length 64 --world-size 2 --alternatives 0 --json {plan}"
    flags += " --context-parallel-size 2"
    assert cli.main(flags.split()) == 0
    assert re.search(r"\nlatent, as here +40 .*\nexpanded +160 ", capsys.readouterr().out)
    parameters = run.derived.parameter_count(run.derived.padded_vocab_size(1000))
    assert json.loads(plan.read_text())["total_params"] == parameters
    (folder / "model.safetensors").write_text("half a download")
    assert cli.main(flags.split()) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_parts_that_need_values_are_planned_by_ours_which_is_said(capsys):
    ours = f"{TINY} --world-size 1 --alternatives 0 --train-iters none"  # no length of a run is wanted
    assert cli.main(ours.split()) == 0
    plan = capsys.readouterr().out
    te = "--transformer-impl transformer_engine --moe-expert-backend te --no-attention-softmax-in-fp32"
    for flags, instead in (
        (te, "planned with --transformer-impl local --moe-expert-backend grouped_mm:"),
        ("--moe-expert-backend loop", "planned with --moe-expert-backend grouped_mm:"),
        ("--cuda-graph-impl local", "--cuda-graph-impl local: the memory that graphs of attn, moe keep is not counted"),
    ):
        assert cli.main(f"{ours} {flags}".split()) == 0
        said, _, planned = capsys.readouterr().out.partition("\n")
        assert said.startswith(instead) and planned == plan


def test_the_answer_comes_before_the_comparisons_and_progress_goes_to_stderr(monkeypatch, capsys):
    seen = []

    def ranked(*_):
        seen.extend(capsys.readouterr())
        return []

    monkeypatch.setattr(planning, "ranked", ranked)
    assert cli.main(f"{TINY} --world-size 2 --pipeline-model-parallel-size 2".split()) == 0
    out, err = seen
    for words in ("of 80: fits", "sent by a rank per step", "pipeline bubble"):
        assert words in out
    assert "largest rank, GiB" not in out
    assert "stage 1 of 2" in err
    assert "largest rank, GiB" in capsys.readouterr().out
    assert logging.getLogger("megatron_moe_tools.plan").handlers == []
