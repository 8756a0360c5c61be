"""Public Megatron-LM scripts are taken with their values: each passes the rules, or is refused for a reason."""

import importlib.util
from dataclasses import dataclass

import pytest

from megatron_moe.config import rules
from megatron_moe.config.command_line import groups, parts
from megatron_moe.config.errors import ConfigError
from megatron_moe_tools import compat
from tests.compat.megatron_scripts import command, names

NUMBERS = [str(number) for number in range(len(names()[1]))]
PASS, PASS_AS_THEY_ARE = 71, 53
"""Scripts that pass, and those among them that say themselves how long the training is."""

REFUSED = {
    "a router whose choice is not used is not saved": ["0", "68"],
    "its architecture is in its checkpoint": ["2"],
    "Megatron-LM refuses experts with TP and without --sequence-parallel, too": ["3"],
    "one FP8 scale for a whole tensor": ["25", "26"],
    "routes that are replayed are files": ["46", "47"],
    "modules of other Python code": "54 55 56 57 58 59 60 61 62 64 65 66 67 87 88 90 93 96 99".split(),
    "linear attention": ["76"],
    "Megatron-LM refuses a softmax over one expert, too": ["80"],
}
"""Why scripts do not pass."""


@pytest.fixture(autouse=True)
def machine_with_everything(monkeypatch, tmp_path):
    """A machine of these scripts has Transformer Engine and DeepEP."""
    monkeypatch.chdir(tmp_path)
    found = importlib.util.find_spec
    there = importlib.util.spec_from_loader("there", None)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: there if name in ("transformer_engine", "deep_ep") else found(name, package),
    )


@dataclass(frozen=True)
class Checked:
    """A script as the rules see it: what the run reports at its start, or the error; and what was filled in."""

    notes: tuple[str, ...]
    error: str
    has_length: bool


def filled_in(words: list[str]) -> tuple[list[str], bool]:
    """Return a command with tokenizer, data and a length filled in where it has none; and whether it has a length."""
    flags = dict(parts(group) for group in groups(words))
    if flags.get("--tokenizer-type", ["Llama2Tokenizer"])[0] in ("TikTokenizer", "PretrainedFromHF"):
        del flags["--tokenizer-type"]
        flags.pop("--tokenizer-model", None)
    if not {"--tokenizer-type", "--vocab-file"} & flags.keys():
        flags |= {"--tokenizer-type": ["HuggingFaceTokenizer"], "--tokenizer-model": ["tokenizer"]}
    if not {"--data-path", "--train-data-path"} & flags.keys():
        flags["--data-path"] = ["data/text_document"]
    has_length = bool({"--train-iters", "--train-samples"} & flags.keys())
    if not has_length:
        flags["--train-iters"] = ["1000"]
    return [word for flag, values in flags.items() for word in (flag, *values)], has_length


def checked(name: str) -> Checked:
    """Return what `--dry-run` says of a script before it reads folders and data."""
    words, ranks = command(name)
    words, has_length = filled_in(words)
    try:
        run = compat.parse(words)
        rules.check(run, ranks)
    except ConfigError as error:
        return Checked((), str(error), has_length)
    return Checked(run.warnings, "", has_length)


def test_most_scripts_pass_with_their_values_and_say_what_differs():
    found = {number: checked(number) for number in NUMBERS}
    refused = {number: one.error for number, one in found.items() if one.error}
    assert sorted(refused) == sorted(number for numbers in REFUSED.values() for number in numbers), refused
    passing = [one for one in found.values() if not one.error]
    assert len(passing) >= PASS
    assert sum(one.has_length for one in passing) >= PASS_AS_THEY_ARE
    assert all(one.notes for one in passing)


def test_whole_argument_lists_pass_and_what_their_fp8_flags_become_is_reported():
    assert checked("qwen3_30b_a3b").error == ""
    said = "\n".join(checked("deepseek_v3_fp8").notes)
    for flag in ("--fp8-param-gather: NOT STORED", "--delay-wgrad-compute: left out", "--moe-router-padding-for-fp8"):
        assert flag in said
