"""--load-hf and --use-checkpoint-args give a run its architecture, as a preset would; contradictions are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.config.schema import Run, build, flatten
from megatron_moe.hf.config import filled_in
from megatron_moe_tools import compat
from tests.config.refused import refused
from tests.helpers import tiny_models
from tests.helpers.plain_steps import write_step


def folder(path: Path, case: str) -> Path:
    """config.json of a tiny model beside one tensor: no more is read of it."""
    tiny_models.config(case).save_pretrained(path)
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**said, "architectures": None}))
    save_file({"model.norm.weight": torch.ones(64)}, path / "model.safetensors")
    return path


def message_of(*argv: str) -> str:
    return refused(lambda: compat.parse(argv, filled_in))


def test_a_folder_gives_architecture_and_vocabulary_and_nothing_else(tmp_path):
    run = compat.parse(["--load-hf", str(folder(tmp_path, "deepseek-v3")), "--seq-length", "32"], filled_in)
    assert (run.model.num_layers, run.model.vocab_size, run.moe.num_experts) == (4, tiny_models.VOCABULARY, 16)
    assert run.model.multi_latent_attention and run.moe.moe_router_enable_expert_bias
    assert run.model.max_position_embeddings == 2560 and run.model.mtp_num_layers is None
    own = {"load_hf", "max_position_embeddings", "moe_router_dtype", *architecture_keys()}
    assert {name for name, value in flatten(run).items() if value != flatten(Run())[name]} <= own | {"seq_length"}
    assert run.model.seq_length == 32
    # a setting that may differ is the user's
    run = compat.parse(["--load-hf", str(tmp_path), "--max-position-embeddings", "512"], filled_in)
    assert run.model.max_position_embeddings == 512


def test_a_file_contradicts_as_a_flag_does(tmp_path):
    where = str(folder(tmp_path / "model", "mixtral"))
    (tmp_path / "run.yaml").write_text("hidden_size: 128\nlr: 1e-4\n")
    assert "--hidden-size 128" in message_of("--config", str(tmp_path / "run.yaml"), "--load-hf", where)


@pytest.mark.parametrize(
    "flags",
    ["--num-layers 4 --hidden-size 64", "--moe-layer-freq [1,1,1,1]", "--kv-channels 16", "--num-query-groups 2",
     "--group-query-attention"],
)  # fmt: skip
def test_the_same_in_other_words_is_no_contradiction(tmp_path, flags):
    where = str(folder(tmp_path, "mixtral"))
    plain = compat.parse(["--load-hf", where], filled_in)
    assert compat.parse(["--load-hf", where, *flags.split()], filled_in) == plain


def test_a_step_gives_its_architecture_and_no_more(tmp_path):
    saved = build({"num_layers": 3, "hidden_size": 96, "vocab_size": 77, "num_experts": 4, "lr": 0.5, "bf16": True})
    write_step(tmp_path, 5, config=flatten(saved))
    run = compat.parse(["--load", str(tmp_path), "--use-checkpoint-args"], filled_in)
    assert (run.model.num_layers, run.model.hidden_size, run.model.vocab_size) == (3, 96, 77)
    assert run.moe.num_experts == 4
    assert run.optimizer.lr == Run().optimizer.lr and not run.precision.bf16
    said = message_of("--load", str(tmp_path), "--use-checkpoint-args", "--num-layers", "4")
    assert "--num-layers 4" in said and "there: 3" in said and "iter_0000005" in said


def test_a_run_that_has_saved_goes_on_without_the_folder_that_it_was_imported_from(tmp_path):
    root = tmp_path / "run"
    argv = ["--load-hf", str(folder(tmp_path / "hf", "mixtral")), "--load", str(root), "--save", str(root)]
    first = compat.parse(argv, filled_in)
    write_step(root, 5, config=flatten(first))
    (tmp_path / "hf").rename(tmp_path / "gone")
    assert flatten(compat.parse(argv, filled_in)) == flatten(first)
    said = message_of(*argv, "--hidden-size", "96")
    assert "--hidden-size 96 (there: 64)" in said and "iter_0000005" in said


def test_a_pretrained_checkpoint_is_loaded_until_the_run_has_a_step_of_its_own(tmp_path):
    pretrained, root = tmp_path / "pretrained", tmp_path / "run"
    write_step(pretrained, 7, config=flatten(build({"num_layers": 3, "vocab_size": 77})))
    argv = ["--pretrained-checkpoint", str(pretrained), "--load", str(root), "--save", str(root)]
    first = compat.parse(argv, filled_in).checkpoint
    assert (first.load, first.finetune, first.save) == (str(pretrained), True, str(root))
    assert compat.parse([*argv, "--use-checkpoint-args"], filled_in).model.num_layers == 3
    write_step(root, 5, config=flatten(Run()))
    resumed = compat.parse(argv, filled_in).checkpoint
    assert (resumed.load, resumed.finetune) == (str(root), False)
    alone = compat.parse(argv[:2], filled_in).checkpoint
    assert (alone.load, alone.finetune) == (str(pretrained), True)
    # the defaults of the architecture stay open, and weights come from one folder
    assert any("--norm-epsilon" in note for note in compat.parse([*argv[:2], "--use-mcore-models"], filled_in).warnings)
    said = message_of(*argv[:2], "--load-hf", str(folder(tmp_path / "hf", "mixtral")))
    assert f"--pretrained-checkpoint {pretrained}" in said and "--load-hf" in said
