"""Keys of a DeepSpeed file: what each sets, what wins over it, and what is refused by name."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from megatron_moe.config.fields import all_fields
from megatron_moe_tools.compat.deepspeed import read, tables
from tests.compat.deepspeed_files import ADAMW, BF16, FP16, changed, scheduler, zero
from tests.config.refused import refused


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


# ---- the tables


def test_every_key_is_in_one_table_and_sets_fields_that_exist():
    keys = tables()
    everything = [*keys.taken, *keys.refused, *keys.reasons]
    assert len(everything) == len(set(everything))
    fields: set[str] = set()
    for taken in keys.taken.values():
        fields.update(taken.sets.split())
        for settings in taken.means.values():
            fields |= settings.keys()
    for table in (*keys.defaults.values(), *keys.rivals.values(), keys.implied, *keys.implied["bf16"].values()):
        fields |= table.keys()
    assert fields <= all_fields().keys()


def together(keys: Iterable[str], value: Any) -> dict[str, Any]:
    """A file in which every key has this value."""
    content: dict[str, Any] = {}
    for key in keys:
        *above, name = key.split(".")
        mapping = content
        for part in above:
            mapping = mapping.setdefault(part, {})
        mapping[name] = value
    return content


def test_auto_and_null_are_as_if_the_key_were_not_there(deepspeed):
    assert changed(deepspeed(together(tables().taken, None))) == {}
    content = together(tables().taken, "auto")
    assert changed(deepspeed(content)) == {}
    content["optimizer"]["type"] = "AdamW"
    assert changed(deepspeed(content)) == {}


def test_a_key_without_a_meaning_is_named_with_its_reason(deepspeed):
    run = deepspeed(together(tables().reasons, True))
    assert changed(run) == {}
    said = dict(
        note.removeprefix("ds.json: ").split(": no meaning here: ") for note in run.warnings if "no meaning" in note
    )
    named = {key: reason for keys, reason in said.items() for key in keys.split(", ")}
    assert named == tables().reasons


def test_a_key_that_asks_for_something_else_is_refused_with_what_works(deepspeed):
    for key, rule in tables().refused.items():
        asking: Any = {"enabled": True} if rule.switched else {False: True, True: False}.get(rule.harmless[0], 7)
        content = nested(key, asking)
        refused(lambda content=content: deepspeed(content), f"ds.json: {key} {json.dumps(asking)}: ", rule.works)
        harmless = {"enabled": False, "level": 3} if rule.switched else rule.harmless[0]
        assert changed(deepspeed(nested(key, harmless))) == {}, key


# ---- taken


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (zero(stage=0), {"data_parallel_sharding_strategy": "no_shard"}),
        (zero(stage=1), {"data_parallel_sharding_strategy": "optim"}),
        (zero(stage=2), {"data_parallel_sharding_strategy": "optim_grads"}),
        (zero(stage=3), {"data_parallel_sharding_strategy": "optim_grads_params"}),
        ({"zero_optimization": True}, {"data_parallel_sharding_strategy": "optim"}),
        (zero(zero_quantized_weights=True), {"zero_quantized_weights": True}),
        (zero(zero_quantized_gradients=True), {"zero_quantized_gradients": "int8"}),
        (zero(zero_quantized_gradients=False), {}),
        (zero(zero_hpz_partition_size=8), {"zero_hpz_partition_size": 8}),
        (zero(zero_hpz_partition_size=1), {}),
        (zero(offload_optimizer={"device": "cpu"}), {"optimizer_cpu_offload": True}),
        (zero(offload_param={"device": "cpu"}), {"optimizer_cpu_offload": True}),
        (zero(offload_optimizer={"device": "none"}, offload_param={"device": "none"}), {}),
        (zero(cpu_offload=True), {"optimizer_cpu_offload": True}),
        (zero(cpu_offload=False), {}),
        (BF16, {"bf16": True}),
        ({"bfloat16": {"enabled": "True"}}, {"bf16": True}),
        (FP16, {"fp16": True}),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"fp16": True, "loss_scale": 128.0}),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, {"fp16": True}),
        ({"fp16": {"enabled": True, "loss_scale": 8, "hysteresis": 4}}, {"fp16": True, "loss_scale": 8.0}),
        ({"fp16": {"enabled": True, "initial_scale_power": 5}}, {"fp16": True, "initial_loss_scale": 32.0}),
        ({"fp16": {"enabled": True, "loss_scale_window": 1e2}}, {"fp16": True, "loss_scale_window": 100}),
        ({"fp16": {"enabled": True, "hysteresis": 4}}, {"fp16": True, "hysteresis": 4}),
        ({"fp16": {"enabled": True, "min_loss_scale": 0.5}}, {"fp16": True, "min_loss_scale": 0.5}),
        ({"fp16": {"enabled": True, "hysteresis": 1, "consecutive_hysteresis": True}}, {"fp16": True, "hysteresis": 1}),
        ({"fp16": {"enabled": False, "initial_scale_power": 5, "hysteresis": 7}}, {}),
        ({"gradient_clipping": 0.3}, {"clip_grad": 0.3}),
        ({"seed": 42}, {"seed": 42}),
        ({"steps_per_print": 2000}, {"log_interval": 2000}),
        ({"wall_clock_breakdown": True}, {"timing_log_level": 1}),
        ({"tensorboard": {"enabled": True, "output_path": "logs"}}, {"tensorboard_dir": "logs/DeepSpeedJobName"}),
        ({"tensorboard": {"enabled": False, "output_path": "logs", "job_name": "x"}}, {}),
        ({"wandb": {"enabled": True, "project": "p", "team": "t"}}, {"wandb_project": "p"}),
        ({"optimizer": {"type": "adamw", "params": {"lr": 2e-4}}}, {"lr": 2e-4}),
        ({"optimizer": {"type": "Adam", "params": {"eps": 1e-6}}}, {"adam_eps": 1e-6}),
        ({"optimizer": {**ADAMW, "params": {"betas": [0.8, 0.9]}}}, {"adam_beta1": 0.8, "adam_beta2": 0.9}),
        ({"optimizer": {**ADAMW, "params": {"weight_decay": 0}}}, {"weight_decay": 0.0}),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {"weight_decay": 0.0}),
        ({"optimizer": {**ADAMW, "params": {"adam_w_mode": False, "weight_decay": 0.1}}}, {"weight_decay": 0.1}),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"accumulate_allreduce_grads_in_fp32": True}),
        ({**BF16, "communication_data_type": "bfp16"}, {"bf16": True, "grad_reduce_in_bf16": True}),
        ({**FP16, "data_types": {"grad_accum_dtype": "fp16"}},
         {"fp16": True, "accumulate_allreduce_grads_in_fp32": False}),
        (scheduler("WarmupLR", warmup_min_lr=1e-5, warmup_max_lr=1e-4, warmup_num_steps=7, warmup_type="linear"),
         {"lr_decay_style": "constant", "lr_warmup_init": 1e-5, "lr": 1e-4, "lr_warmup_iters": 7}),
        (scheduler("WarmupDecayLR", warmup_max_lr=1e-4, warmup_num_steps=1, warmup_type="linear", total_num_steps=9),
         {"lr_decay_style": "linear", "lr": 1e-4, "lr_warmup_iters": 2, "lr_decay_iters": 9}),
        (scheduler("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=1e-4, cycle_first_step_size=5, cycle_momentum=False),
         {"lr_decay_style": "linear", "lr_warmup_init": 1e-5, "min_lr": 1e-5, "lr": 1e-4, "lr_warmup_iters": 5,
          "lr_decay_iters": 10}),
        (scheduler("WarmupDecayLR", warmup_max_lr="auto", warmup_num_steps="auto", total_num_steps="auto"),
         {"lr_decay_style": "linear"}),
    ],
)  # fmt: skip
def test_a_key_sets_its_field_and_no_other(deepspeed, content, expected):
    assert changed(deepspeed(content)) == expected


def test_the_schedules_rate_is_the_peak_and_the_optimizers_is_named(deepspeed):
    warmup = scheduler("WarmupLR", warmup_max_lr=1e-4, warmup_type="linear")
    run = deepspeed({**warmup, "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}})
    assert (run.optimizer.lr, run.optimizer.lr_warmup_iters) == (1e-4, 1000)
    assert any("optimizer.params.lr 3e-05 is not used: warmup_max_lr 0.0001" in note for note in run.warnings)
    without = deepspeed({**scheduler("WarmupLR", warmup_type="linear"), "optimizer": {**ADAMW, "params": {"lr": 3e-5}}})
    assert without.optimizer.lr == 3e-5
    for steps in (10, "auto"):  # what is left out is DeepSpeed's logarithm
        run = deepspeed(scheduler("WarmupLR", warmup_num_steps=steps))
        assert any("linear here (DeepSpeed's default is logarithmic)" in note for note in run.warnings)


def test_a_dtype_that_nobody_decides_is_fp32_and_said(deepspeed):
    content = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    assert any('bf16.enabled and fp16.enabled "auto": no flag names' in note for note in deepspeed(content).warnings)
    assert not any("no flag names" in note for note in deepspeed(content, "--bf16").warnings)


def test_a_parameter_that_is_left_out_is_named_where_the_defaults_differ(deepspeed):
    notes = "\n".join(
        deepspeed({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": "auto"}}}).warnings
    )
    assert "--adam-beta2 0.999, here --adam-beta2 0.95" in notes and "scheduler.type" in notes
    assert "--clip-grad 0.0, here --clip-grad 1.0" in notes
    assert "leaves out optimizer.params.weight_decay" not in notes and "beta1" not in notes
    assert "clip" not in "\n".join(deepspeed({"gradient_clipping": "auto"}).warnings)
    assert "clip" not in "\n".join(deepspeed({}, "--clip-grad", "2").warnings)


# ---- refused


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        ({**FP16, **BF16}, ["fp16.enabled true", "bf16.enabled true", "one dtype"]),
        (zero(stage=4), ["zero_optimization.stage 4", "0, 1, 2, 3"]),
        (zero(stage="three"), ["zero_optimization.stage", '"three"', "whole number", '"auto"']),
        (zero(stage=True), ["zero_optimization.stage true", "whole number"]),
        (zero(zero_quantized_weights="int8"), ["zero_quantized_weights", '"int8"', "true or false"]),
        (zero(offload_optimizer={"device": "nvme"}), ["offload_optimizer.device", "nvme", "--optimizer-cpu-offload"]),
        (zero(offload_optimizer={"device": "disk"}), ["offload_optimizer.device", '"disk"', '"cpu", "none"']),
        (zero(offload_optimizer=True), ["zero_optimization.offload_optimizer true", '{"offload_optimizer": {...}}']),
        ({"fp16": {"enabled": True, "initial_scale_power": 200}}, ["initial_scale_power 200", "at most 127"]),
        ({"fp16": {"enabled": True, "consecutive_hysteresis": True}}, ["consecutive_hysteresis true", "use false"]),
        ({"gradient_clipping": "often"}, ["gradient_clipping", '"often"', "a number"]),
        ({"communication_data_type": "int8"}, ["communication_data_type", '"int8"', "fp32, bf16, fp16"]),
        ({"communication_data_type": "fp16"}, ["communication_data_type", '"fp16"', "float32", '"fp32"']),
        (
            {**BF16, "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}},
            ["grad_accum_dtype", "communication_data_type", "one dtype"],
        ),
        ({"optimizer": {"type": "Lamb"}}, ["optimizer.type", '"Lamb"', "AdamW"]),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 1}}}, ["OneBitAdam", "one bit", "AdamW"]),
        ({"optimizer": {"type": "MyOptimizer"}}, ["MyOptimizer", "AdamW"]),
        ({"optimizer": {"params": {"lr": 1e-3}}}, ["optimizer.params.lr", "type"]),
        ({"optimizer": {**ADAMW, "params": {"betas": [0.9]}}}, ["betas [0.9]", "two numbers"]),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            ["adam_w_mode false", "weight_decay of 0.1", "L2", "use true"],
        ),
        (scheduler("WarmupLR", warmup_num_steps=10, warmup_type="log"), ['warmup_type "log"', '"linear"']),
        (scheduler("WarmupLR", warmup_num_steps=0, warmup_type="linear"), ["warmup_num_steps 0", "at least 1"]),
        (scheduler("WarmupLR", total_num_steps=5, warmup_type="linear"), ["total_num_steps 5", "WarmupLR has no such"]),
        (scheduler("WarmupDecayLR", warmup_type="linear"), ["scheduler.type", "total_num_steps"]),
        (scheduler("WarmupCosineLR", cos_min_ratio=0.1), ["WarmupCosineLR", "one step", "--lr-decay-style cosine"]),
        (scheduler("LRRangeTest", lr_range_test_min_lr=0.1), ["LRRangeTest", "--lr-warmup-iters"]),
        (scheduler("WarmupLr"), ['"WarmupLr"', "did you mean WarmupLR?"]),
        (scheduler("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=1e-3), ["cycle_momentum", "use false"]),
        (scheduler("OneCycle", cycle_momentum=False, cycle_max_lr=1e-3), ["scheduler.type", "needs cycle_min_lr"]),
        (scheduler("OneCycle", cycle_momentum=False, cycle_first_stair_count=3), ["first_stair_count 3", "use 0"]),
        (scheduler("OneCycle", cycle_momentum=False, decay_lr_rate=0.1, decay_step_size=9), ["decay_lr_rate 0.1"]),
        ({"scheduler": {"params": {"warmup_min_lr": 0}}}, ["warmup_min_lr", "type"]),
        ({"compression_training": {"weight_quantization": {"shared": {"enabled": True}}}}, ["compression_training"]),
        # ---- files that cannot be read
        ({"gradient_cliping": 1}, ["gradient_cliping: unknown key", "did you mean gradient_clipping?"]),
        (zero(stagee=3), ["zero_optimization.stagee: unknown key", "did you mean zero_optimization.stage?"]),
        ({"stage": 3}, ["stage: unknown key", "did you mean zero_optimization.stage?"]),
        ({"optimizer": {"type": "Adam", "adam_w_mode": True}}, ["did you mean optimizer.params.adam_w_mode?"]),
        ({"qqq": 3}, ["qqq: unknown key", "remove it"]),
        ({"": 3}, ["unknown key"]),
        ('{"seed": 1, "seed": 2}', ["key seed is given twice"]),
        ('{"bf16": {"enabled": true}, "bfloat16": {"enabled": true}}', ["key bf16.enabled is given twice"]),
        ("[1]", ["holds no mapping"]),
        ("{seed: 1}", ["not JSON", "double quotes"]),
        ("", ["not JSON"]),
    ],
)
def test_a_file_is_refused_with_key_value_and_what_works(deepspeed, content, fragments):
    refused(lambda: deepspeed(content), "ds.json: ", *fragments)


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    refused(lambda: read(str(tmp_path / "binary.json")), "binary.json: is not text")


def test_comments_and_trailing_commas_are_read_as_deepspeed_reads_them(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        '\ufeff// one\n{ # two\n "_why": 1, "//": "x", /* three\n */ "tensorboard": {"enabled": true,'
        ' "output_path": "http://a#b /* c */", "job_name": "x,}"},}'
    )
    values = read(str(path)).values
    assert values["tensorboard.output_path"] == "http://a#b /* c */" and values["tensorboard.job_name"] == "x,}"
