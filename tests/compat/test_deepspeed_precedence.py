"""What wins over a key of a DeepSpeed file, what follows from its batch sizes, and rules that name its keys."""

import pytest

from megatron_moe.config import rules, schema
from megatron_moe.config.presets import PRESETS
from megatron_moe_tools import compat
from tests.compat.deepspeed_files import ADAMW, BF16, FP16, changed, scheduler, zero
from tests.config.refused import refused


def test_the_file_wins_over_the_preset_and_flags_and_config_over_the_file(deepspeed, tmp_path):
    content = {**zero(stage=2), "gradient_clipping": 0.5, "seed": 7, "optimizer": {**ADAMW, "params": {"lr": 2e-4}}}
    yaml = tmp_path / "run.yaml"
    yaml.write_text("seed: 8\n")
    run = deepspeed(content, "--preset", "demo", "--config", str(yaml), "--clip-grad", "0.25")
    assert (run.optimizer.lr, run.training.seed, run.optimizer.clip_grad) == (2e-4, 8, 0.25)
    assert run.derived.zero_stage == 2 and run.optimizer.min_lr == PRESETS["demo"]["min_lr"]
    assert "ds.json: gradient_clipping 0.5 is overridden by --clip-grad 0.25" in run.warnings
    assert "ds.json: seed 7 is overridden by --seed 8" in run.warnings
    assert set(run.sources) == {"data_parallel_sharding_strategy", "lr"}


def test_a_flag_that_agrees_with_the_file_is_not_named(deepspeed):
    content = {"gradient_clipping": 0.5, **BF16, **zero(stage=3)}
    run = deepspeed(content, "--clip-grad", "0.5", "--bf16", "--use-torch-fsdp2")
    assert "overridden" not in "\n".join(run.warnings)


@pytest.mark.parametrize(
    ("content", "flags", "fields", "note"),
    [
        (FP16, ["--bf16"], {"bf16": True}, "fp16.enabled true is overridden by --bf16"),
        (BF16, ["--fp16"], {"fp16": True}, "bf16.enabled true is overridden by --fp16"),
        (BF16, ["--no-bf16"], {}, "bf16.enabled true is overridden by --no-bf16"),
        (zero(stage=1), ["--use-torch-fsdp2"], {"use_torch_fsdp2": True}, "stage 1 is overridden by --use-torch-fsdp2"),
        (zero(stage=0), ["--use-distributed-optimizer"], {"use_distributed_optimizer": True},
            "stage 0 is overridden by --use-distributed-optimizer"),
        (zero(zero_quantized_gradients=True), ["--zero-quantized-gradients", "int4"],
            {"zero_quantized_gradients": "int4"}, "true is overridden by --zero-quantized-gradients int4"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, ["--bf16", "--grad-reduce-in-bf16"],
            {"bf16": True, "grad_reduce_in_bf16": True}, '"fp32" is overridden by --grad-reduce-in-bf16'),
        (scheduler("WarmupLR", warmup_max_lr=1e-3, warmup_num_steps=5, warmup_type="linear"),
            ["--lr-warmup-fraction", "0.1"], {"lr_warmup_fraction": 0.1, "lr_decay_style": "constant"},
            "warmup_num_steps 5 is overridden by --lr-warmup-fraction 0.1"),
    ],
)  # fmt: skip
def test_a_flag_wins_over_a_key_that_says_the_opposite(deepspeed, content, flags, fields, note):
    run = deepspeed(content, *flags)
    assert changed(run) == fields
    assert any(note in line for line in run.warnings)


@pytest.mark.parametrize(("ours", "other"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_one_dtype_of_the_file_takes_the_place_of_a_presets(deepspeed, ours, other):
    run = deepspeed({ours: {"enabled": True}, other: {"enabled": "auto"}}, "--preset", "demo")
    assert getattr(run.precision, ours) and not getattr(run.precision, other)
    # the preset is bf16
    assert (
        run.warnings[0] == f"ds.json sets {'nothing that is not so already' if ours == 'bf16' else '--no-bf16 --fp16'}"
    )


def test_stage_zero_takes_the_place_of_a_presets_distributed_optimizer(deepspeed):
    run = deepspeed(zero(stage=0), "--preset", "demo", "--mock-data", "--vocab-size", "256")
    assert run.derived.zero_stage == 0 and not run.optimizer.use_distributed_optimizer
    rules.check(run, 2)


# ---- batch sizes

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("content", "flags", "expected"),
    [
        ({TRAIN: 64, MICRO: 4, STEPS: 4}, "", (4, 64)),
        ({TRAIN: 64, MICRO: 4}, "", (4, 64)),
        ({TRAIN: 64, STEPS: 2}, "", (8, 64)),
        ({TRAIN: 64}, "", (16, 64)),
        ({MICRO: 4, STEPS: 3}, "", (4, 48)),
        ({MICRO: 4}, "", (4, 16)),
        ({STEPS: 3}, "", (2, 24)),  # the preset's micro-batch
        ({TRAIN: "auto", MICRO: 4, STEPS: "auto"}, "", (4, 8)),  # the preset's global batch
        ({TRAIN: 64, MICRO: "auto", STEPS: "auto"}, "", (2, 64)),
        ({TRAIN: 64, MICRO: "auto", STEPS: 4}, "", (4, 64)),
        # a flag wins, and the accumulation follows
        ({TRAIN: 64, MICRO: 4, STEPS: 4}, "--micro-batch-size 2", (2, 64)),
        ({TRAIN: 64, MICRO: 4, STEPS: 4}, "--global-batch-size 32", (4, 32)),
        ({MICRO: 4, STEPS: 2}, "--micro-batch-size 2", (2, 16)),
        ({STEPS: 2}, "--global-batch-size 64", (8, 64)),
        ({TRAIN: 64}, "--global-batch-size 32", (2, 32)),
        # DP is what the layout leaves
        ({MICRO: 4, STEPS: 2}, "--pipeline-model-parallel-size 2", (4, 16)),
        ({TRAIN: 64, MICRO: 4, STEPS: 16}, "--context-parallel-size 4", (4, 64)),
        # a file that says nothing of batches
        ({}, "", (2, 8)),
        ({}, "--micro-batch-size 1", (1, 8)),
    ],
)
def test_batch_sizes_follow_from_those_that_are_given(deepspeed, content, flags, expected):
    run = deepspeed(content, "--preset", "tiny", *flags.split())
    assert (run.training.micro_batch_size, run.training.global_batch_size) == expected


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        ({TRAIN: 64, MICRO: 4, STEPS: 8}, [f"{STEPS} 8", "4 x 8 x DP 4 = 128", f"use {TRAIN} 128"]),
        ({TRAIN: 10, STEPS: 2}, [f"{TRAIN} 10", f"{STEPS} 2", "2 x DP 4 = 8", f"use {TRAIN} 8"]),
        ({TRAIN: 10}, [f"{TRAIN} 10", "DP 4", "8"]),
        ({TRAIN: 0}, [f"{TRAIN} 0", "at least 1"]),
        ({STEPS: -1}, [f"{STEPS} -1", "at least 1"]),
        ({MICRO: 1.5}, [f"{MICRO} 1.5", "whole number"]),
    ],
)
def test_batch_sizes_that_do_not_multiply_are_refused(deepspeed, content, fragments):
    refused(lambda: deepspeed(content, "--preset", "tiny"), "ds.json: ", *fragments)


def test_an_overridden_accumulation_is_named_with_the_product(deepspeed):
    run = deepspeed({TRAIN: 64, MICRO: 4, STEPS: 4}, "--micro-batch-size", "2")
    assert f"ds.json: {STEPS} 4 is overridden by --micro-batch-size 2: 2 x 4 x DP 4 = 32, not 64" in run.warnings


def test_without_a_number_of_ranks_the_sizes_are_taken_as_they_are(deepspeed):
    run = deepspeed({TRAIN: 64, MICRO: 4, STEPS: 3}, world=None)
    assert (run.training.micro_batch_size, run.training.global_batch_size) == (4, 64)


def test_a_layout_that_does_not_fit_is_refused_by_the_rule_for_it(deepspeed):
    run = deepspeed({TRAIN: 64, MICRO: 4, STEPS: 3}, "--preset", "tiny", "--pipeline-model-parallel-size", "4", world=6)
    refused(lambda: rules.check(run, 6), "world size 6", "no --data-path", lines=3)


# ---- rules


@pytest.mark.parametrize(
    ("content", "flags", "rule"),
    [
        (zero(stage=0, zero_quantized_weights=True), "", "--zero-quantized-weights (zero_optimization.zero_quantized"),
        (zero(stage=1, zero_quantized_gradients=True), "", "this is stage 1"),
        (zero(stage=2, zero_hpz_partition_size=2), "", "--zero-hpz-partition-size 2 (zero_optimization.zero_hpz"),
        (zero(stage=3, zero_hpz_partition_size=3), "", "--zero-hpz-partition-size 3 (zero_optimization.zero_hpz"),
        (zero(stage=3, offload_optimizer={"device": "cpu"}), "--tensor-model-parallel-size 2 --sequence-parallel",
            "(zero_optimization.offload_optimizer.device in ds"),
        (zero(stage=3), "--pipeline-model-parallel-size 2", "optim_grads_params (zero_optimization.stage in ds.json)"),
        (zero(stage=3), "--ddp-bucket-size 1000 --overlap-grad-reduce",
            "optim_grads_params (zero_optimization.stage in ds.json)"),
        ({TRAIN: 10, MICRO: 4}, "", "--global-batch-size 10 (train_batch_size in ds.json)"),
        ({"gradient_clipping": -1}, "", "--clip-grad -1.0 (gradient_clipping in ds.json): must be"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "", "(fp16.min_loss_scale in ds.json): must be"),
        ({**BF16, "communication_data_type": "bf16", **zero(stage=2)}, "",
            "--grad-reduce-in-bf16 (communication_data_type in ds.json)"),
    ],
)  # fmt: skip
def test_a_rule_that_refuses_a_value_of_the_file_names_its_key(deepspeed, content, flags, rule):
    run = deepspeed(content, "--preset", "tiny", "--mock-data", "--vocab-size", "256", *flags.split())
    refused(lambda: rules.check(run, 4), rule)


def test_a_changed_setting_no_longer_comes_from_the_file(deepspeed):
    run = deepspeed({"gradient_clipping": 0.5, "seed": 3})
    other = schema.replace(run, seed=4)
    assert other.sources == {"clip_grad": "gradient_clipping in ds.json"} and other.warnings == run.warnings


# ---- the flag


@pytest.mark.parametrize(
    "words",
    [
        "--deepspeed-config FILE",
        "--deepspeed_config FILE",
        "--deepspeed-config=FILE",
        "--deepspeed FILE",
        "--deepspeed --deepspeed_config FILE",
        "--deepspeed FILE --deepspeed-config FILE",
    ],
)
def test_other_programs_spellings_of_the_flag_are_known(tmp_path, words):
    path = tmp_path / "ds.json"
    path.write_text('{"seed": 7}')
    assert compat.parse(words.replace("FILE", str(path)).split()).training.seed == 7


def test_two_files_are_refused():
    words = ["--deepspeed", "a.json", "--deepspeed-config", "b.json"]
    refused(lambda: compat.parse(words), "a.json", "b.json", "two files")
