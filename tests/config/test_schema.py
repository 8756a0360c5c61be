"""What follows from a run's settings: layouts, patterns, sizes and counts, checked against published figures."""

import shlex

import pytest

from megatron_moe.config import cli, rules, schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.presets import PRESETS
from megatron_moe.model.build import build_model
from megatron_moe.parallel import groups


def run_of(flags: str) -> schema.Run:
    return cli.parse(shlex.split(flags))


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("deepseek-v3", 37.55), ("deepseek-v2-lite", 2.66), ("mixtral-8x7b", 12.88), ("qwen3-30b-a3b", 3.35)],
)
def test_of_a_published_models_preset_as_many_parameters_as_published_are_active(preset, billions):
    run = run_of(f"--preset {preset}")
    assert round(run.derived.active_parameter_count(run.model.vocab_size) / 1e9, 2) == billions


def test_flops_per_token_match_the_published_ratios():
    # (TFLOP/s per GPU) / (tokens/s per GPU) of NVIDIA's published runs is 23.0 to 23.1 GFLOP.
    run = run_of("--preset qwen3-30b-a3b")
    assert run.derived.flops_per_token(run.model.vocab_size) / 1e9 == pytest.approx(23.08, abs=0.01)
    # Published with one multi-token-prediction depth.
    run = run_of("--preset deepseek-v3 --mtp-num-layers 1")
    assert run.derived.flops_per_token(run.model.vocab_size) / 1e9 == pytest.approx(260.64, abs=0.05)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_passes_the_rules_and_holds_only_what_differs_and_nothing_of_place_or_layout(preset):
    rules.check(run_of(f"--preset {preset} --mock-data --vocab-size 151936 --train-iters 500"), 1)
    here = {"data", "checkpoint", "faults", "logging", "parallel"}
    assert not {name for name in PRESETS[preset] if schema.fields_by_name()[name][0] in here}
    assert schema.build(schema.flatten(run_of(f"--preset {preset}"))) == schema.build(PRESETS[preset])


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--num-layers 4", [0, 0, 0, 0]),
        ("--num-layers 4 --num-experts 8", [1, 1, 1, 1]),
        ("--num-layers 5 --num-experts 8 --moe-layer-freq 2", [1, 0, 1, 0, 1]),
        ("--num-layers 4 --num-experts 8 --moe-layer-freq '[0]+[1]*3'", [0, 1, 1, 1]),
        ("--num-layers 4 --num-experts 8 --moe-layer-freq '([0]+[1])*2'", [0, 1, 0, 1]),
    ],
)
def test_the_layer_pattern_follows_frequency_or_expression(flags, pattern):
    assert run_of(flags).derived.moe_layer_pattern == tuple(pattern)


@pytest.mark.parametrize("expression", ["[1]*3", "[2]*4", "[1.0]*4", "print(1)", "[1]*-1", "[1]*99999999999", "[1]+"])
def test_a_wrong_layer_expression_is_refused_and_never_run(expression):
    run = schema.replace(schema.Run(), num_experts=8, moe_layer_freq=expression)
    with pytest.raises(ConfigError, match="--moe-layer-freq"):
        _ = run.derived.moe_layer_pattern


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(1, 1, 128), (128, 1, 128), (129, 1, 256), (129, 4, 512)])
def test_the_vocabulary_is_padded_for_tensor_parallel(vocab, tp, padded):
    assert run_of(f"--tensor-model-parallel-size {tp}").derived.padded_vocab_size(vocab) == padded


@pytest.mark.parametrize(("vocab", "tp"), [(129, 1), (130, 2)])
def test_a_table_of_a_given_size_has_that_many_rows(vocab, tp):
    run = run_of(f"--tensor-model-parallel-size {tp} --padded-vocab-size 130 --make-vocab-size-divisible-by 64")
    assert run.derived.padded_vocab_size(vocab) == 130
    for wrong in ({"padded_vocab_size": vocab - 1}, {"tensor_model_parallel_size": 4}):
        with pytest.raises(ConfigError, match="--padded-vocab-size"):
            schema.replace(run, **wrong).derived.padded_vocab_size(vocab)


def test_one_virtual_stage_is_none():
    flags = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage"
    assert run_of(f"{flags} 1").derived.virtual_pipeline_size == 2
    assert run_of(f"{flags} 2").derived.virtual_pipeline_size is None
    assert run_of("").derived.virtual_pipeline_size is None


@pytest.mark.parametrize(
    ("flags", "normalised"),
    [
        ("--moe-router-score-function sigmoid", True),
        ("--moe-router-score-function sigmoid --moe-router-topk 1", False),
        ("--moe-router-score-function softmax", True),
        ("--moe-router-score-function softmax --moe-router-pre-softmax", False),
        ("--moe-router-pre-softmax --moe-router-norm-topk-prob", True),
        ("--moe-router-score-function sigmoid --no-moe-router-norm-topk-prob", False),
    ],
)
def test_open_normalisation_follows_megatrons_rule(flags, normalised):
    assert run_of(flags).derived.norm_topk_prob is normalised


def test_training_in_sequences_is_whole_steps_and_its_schedule_counts_sequences():
    run = run_of("--preset tiny --train-samples 167 --lr-warmup-iters 0 --lr-warmup-samples 20 --global-batch-size 8")
    assert (run.training.train_iters, run.derived.lr_decay_length, run.derived.lr_warmup_length) == (20, 167, 20)
    with pytest.raises(ConfigError, match=r"--train-samples 167, --train-iters 5"):
        run_of("--train-samples 167 --train-iters 5 --global-batch-size 8")


# ---- the counted parameters are those of the model that is built

DENSE = "--num-layers 2 --hidden-size 32"
FLAGS = [
    "--preset tiny",
    "--preset tiny --q-lora-rank none --moe-shared-expert-gate",
    "--preset tiny-gqa",
    "--preset tiny-gqa --qk-layernorm --add-qkv-bias --no-untie-embeddings-and-output-weights",
    f"{DENSE} --add-bias-linear",
    "--preset tiny --mtp-num-layers 2",
    f"{DENSE} --mtp-num-layers 1",
    f"{DENSE} --no-swiglu --kv-channels 16",
]


@pytest.mark.engine
def test_parameters_are_counted_as_they_are_built(one_process):
    pg_collection = groups.initialize(cli.parse([]))
    for flags in FLAGS:
        run = run_of(flags)
        chunks = build_model(run, pg_collection, 256, wrap=False)
        built = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        assert run.derived.parameter_count(256) == built, flags


@pytest.mark.parametrize("flags", FLAGS)
def test_active_parameters_leave_out_the_experts_not_chosen(flags):
    run = run_of(flags)
    idle = run.derived.parameter_count(256) - run.derived.active_parameter_count(256)
    one_expert = 3 * run.model.hidden_size * run.derived.moe_ffn_hidden_size
    idle_experts = (run.moe.num_experts or run.moe.moe_router_topk) - run.moe.moe_router_topk
    pattern = run.derived.moe_layer_pattern
    moe_layers = sum(pattern) + pattern[-1] * (run.model.mtp_num_layers or 0)
    assert idle == moe_layers * idle_experts * one_expert
