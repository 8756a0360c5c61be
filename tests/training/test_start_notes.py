"""What a run says at its start: how its flags were read, what changes nothing, where it departs from its dtype."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from megatron_moe import platform
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.optim.optimizer import build_scheduler
from megatron_moe.platform import env_vars, hardware
from megatron_moe.report import Sink
from megatron_moe.training.run import pretrain
from megatron_moe.training.start_notes import (
    _HIDING_WORK,
    _expert_notes,
    _overlap_notes,
    _precision_notes,
    _rate_notes,
    _sharding_notes,
)
from megatron_moe_tools import compat

TINY = "--preset tiny --mock-data --vocab-size 256 --train-iters 1 --eval-iters 0".split()


class Messages(Sink):
    """Keeps the messages of a run, in their order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def message(self, text: str) -> None:
        self.seen.append(text)


@pytest.mark.usefixtures("one_process")
def test_the_notes_of_a_deepspeed_file_are_reported_once_and_first(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"seed": 7, "gradient_clipping": 0.5, "zero_optimization": {"overlap_comm": True}}))
    run = compat.parse([*TINY, "--deepspeed-config", str(path), "--clip-grad", "0.25"], world_size=1)
    sink = Messages()
    pretrain(run, also=[sink])
    assert len(run.warnings) == 3 and sink.seen[:3] == list(run.warnings)
    assert sum(text.startswith("ds.json") for text in sink.seen) == 3
    assert "overlap_comm" in sink.seen[2] and "--clip-grad 0.25" in sink.seen[1]


def test_a_dry_run_shows_the_notes_too_and_what_the_letters_give_each_rank(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"seed": 7, "aio": {}}))
    flags = f"--deepspeed-config {path} --dry-run --micro-batch-size 1 --global-batch-size 4"
    letters = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|t|t||t|||L"
    pretrain(compat.parse([*TINY, *flags.split(), *letters.split()], world_size=4))
    shown = capsys.readouterr().out
    assert "ds.json sets --seed 7" in shown and "0: Et | t, 1-2: t | -, 3: - | L" in shown


def test_a_sharding_flag_without_an_effect_is_named():
    def told(flags: str) -> list[str]:
        return _sharding_notes(compat.parse([*TINY, *flags.split()]), 4)

    ep, zero_3, parts = "--expert-model-parallel-size 4", "--use-torch-fsdp2", "--zero-hpz-partition-size"
    assert [told(flags) for flags in ("", ep, zero_3, f"{zero_3} {parts} 2")] == [[]] * 4
    (note,) = told(f"{zero_3} {ep}")
    assert "ZeRO stage 3: there is one copy of each expert" in note
    (note,) = told(f"{zero_3} {parts} 4")
    assert f"{parts} 4: these are all ranks" in note
    latent, expanded = (told(f"--context-parallel-size 2{words}") for words in ("", " --mla-cp-exchange expanded"))
    assert "--mla-cp-exchange latent: context-parallel ranks exchange 40 numbers" in latent[0]
    assert "--mla-cp-exchange expanded: context-parallel ranks exchange 160 numbers" in expanded[0]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("packing", "padding"), [("none", "0.00"), ("greedy", "2.8")])
def test_a_run_says_how_many_documents_a_sequence_has_and_what_padding_costs(packing, padding):
    sink = Messages()
    flags = f"--reset-attention-mask --packing {packing} --seq-length 128 --max-position-embeddings 128".split()
    pretrain(compat.parse([*TINY, *flags], world_size=1), also=[sink])
    (note,) = [text for text in sink.seen if text.startswith("documents:")]
    assert re.search(rf"documents: 1\.\d\d of the index.*; {padding}.* % .*--packing {packing}", note)


def test_data_parallel_gpus_are_told_once_which_overlaps_are_off(monkeypatch):
    def off(flags: str, ranks: int = 2) -> list[str]:
        found = _overlap_notes(compat.parse([*TINY, "--bf16", *flags.split()]), ranks)
        return [flag.removeprefix("--") for note in found for flag in note.rpartition(": ")[2].split(", ")]

    assert off("") == []  # a CPU
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    reduce, gather, fused, shared = (name.replace("_", "-") for name in _HIDING_WORK)
    assert off("") == [reduce, fused, shared] and off("", ranks=1) == []
    assert off("--use-distributed-optimizer --no-gradient-accumulation-fusion") == [reduce, gather, shared]
    assert off(f"--use-distributed-optimizer --{reduce} --{fused} --{shared}") == [gather]
    assert off("--use-torch-fsdp2") == []


@pytest.mark.parametrize(
    ("position", "phase"),
    [
        (0, "a schedule begins (warm-up until 4); 0 now"),
        (2, "goes on after 2 iterations of the schedule (warm-up until 4); 0.5 now"),
        (8, "goes on after 8 iterations of the schedule (warm-up over); 0.5 now"),
        (12, "goes on after 12 iterations of the schedule (over at 12; --lr-restart-at 12 begins another); 0 now"),
    ],
)
def test_a_run_that_loads_says_where_in_its_schedule_the_rate_is(position, phase):
    run = build({"lr": 1.0, "lr_decay_style": "linear", "lr_warmup_iters": 4, "train_iters": 12})
    schedule = build_scheduler(run, SimpleNamespace(param_groups=[]))
    schedule.load({**schedule.state_dict(), "num_steps": position}, position, position)
    trainer = SimpleNamespace(run=run, started_from="x", trained=SimpleNamespace(scheduler=schedule))
    trainer.progress = SimpleNamespace(iteration=position)
    assert _rate_notes(trainer) == [f"learning rate: {phase}"]
    trainer.started_from = None
    assert _rate_notes(trainer) == []


def notes(**flags):
    return _precision_notes(build({**PRESETS["tiny"], **flags}))


def test_gradients_that_are_summed_in_half_precision_are_told_in_one_line():
    (note,) = notes(bf16=True, grad_reduce_in_bf16=True)
    assert "gradients" in note and "reduced over ranks in bf16" in note
    (note,) = notes(fp16=True, accumulate_allreduce_grads_in_fp32=False)
    assert "in fp16" in note
    # fp32 gradients of an fp32 model, whatever the flag says
    assert notes(accumulate_allreduce_grads_in_fp32=False) == [] == notes(bf16=True)


def test_a_run_with_fp8_says_which_form_computes(monkeypatch):
    fp8 = {"bf16": True, "fp8_format": "e4m3"}
    (note,) = notes(**fp8)
    # 5 linear layers of attention in each layer, 2 of the dense layer, 2 of each shared expert, 3 layers of experts
    assert all(words in note for words in ("--fp8-format e4m3", "31 modules emulated", "slower than bf16", "verified"))
    (note,) = notes(**fp8, fp8_modules=("experts",), first_last_layers_bf16=True)
    assert "--fp8-modules experts" in note and "of 2 modules emulated" in note
    (note,) = notes(**fp8, transformer_impl="transformer_engine", moe_expert_backend="te")
    assert "8 modules emulated" in note and "23 modules by Transformer Engine" in note
    monkeypatch.setattr(platform, "why_no_fp8_products", lambda: None)
    (note,) = notes(**fp8)
    assert "31 modules by torch's scaled product" in note and "emulated" not in note
    monkeypatch.setitem(env_vars.chosen, env_vars.FP8, "emulated")
    assert "31 modules emulated" in notes(**fp8)[0]


@pytest.mark.parametrize("capability", [(9, 0), (10, 3), (12, 0)])
def test_a_gpu_that_multiplies_expert_by_expert_is_told_once(capability, monkeypatch):
    for name, found in (("has_streams", True), ("device", torch.device("cpu"))):
        monkeypatch.setattr(hardware, name, lambda found=found: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    found = [_expert_notes(SimpleNamespace(run=build({**PRESETS["tiny"], **dtype}))) for dtype in ({"bf16": True}, {})]
    assert [len(notes) for notes in found] == [capability[0] == 12, 1]
    assert "no grouped kernel for float32" in found[1][0]


def test_kept_modules_are_named_a_few_of_them():
    assert notes(bf16=True, keep_fp32=["softmax"]) == [
        "in fp32 by --keep-fp32: " + ", ".join(f"decoder.layers.{i}.self_attention.core_attention" for i in range(4))
    ]
    (note,) = notes(bf16=True, keep_fp32=["norms"])
    assert note.endswith("and 13 more")
