"""Each of Megatron-LM's flags has one answer, and a command line with them becomes one with ours."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe_tools import compat
from megatron_moe_tools.compat.megatron_flags import ANSWERS, Answer, row_for, table, translate
from tests.compat.megatron_scripts import names
from tests.config.refused import refused

ROOT = Path(__file__).resolve().parents[2]
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OTHER_PROGRAMS = {"--max-restarts", "--trace", "--no-load", "--upcycle"}
"""Flags of torchrun and of our tools that a reason names."""


@cache
def own() -> dict[str, str]:
    """Return our flags with their fields."""
    return {option: action.dest for action in compat.parser()._actions for option in action.option_strings}


def rows() -> list[Answer]:
    return [row for rows in table().values() for row in rows]


# ---- the table


def test_the_table_and_our_flags_cover_megatrons_and_do_not_overlap():
    known = set(names()[0])
    answered = {flag for flag, rows in table().items() if rows[0].answer != "unknown"}
    assert len(known) == 915
    assert known - answered - set(own()) == set()
    assert answered - known == set()
    # A flag of ours has rows for Megatron-LM's other values alone; any other has a row for all that is left.
    for flag, found in table().items():
        assert all(row.values for row in found[:-1]), flag
        assert bool(found[-1].values) == (flag in own()), flag


def test_a_row_says_what_its_answer_needs():
    for row in rows():
        assert row.answer in ANSWERS and row.answer != "taken"
        assert bool(row.target) == (row.answer == "alias") or row.answer == "unknown", row
        assert row.reason or (row.answer == "unknown" and row.target), row
        assert re.fullmatch(r"\d|[*+]", row.takes) or row.answer == "unknown", row
        assert len({other.takes for other in table()[row.flag]}) == 1
        if row.flag in own():  # a value of ours has no row of its own
            assert not set(row.values) & set(map(str, all_fields()[own()[row.flag]].choices or ())), row


def test_what_takes_a_flags_place_is_a_flag_of_ours():
    for row in (row for row in rows() if row.target):
        words = row.in_place(["attn" if "modules" in row.target else "7"])
        if row.answer == "unknown" and words[0] in ("torchrun", "CUDA_VISIBLE_DEVICES"):
            continue  # a flag of a launcher, or the environment
        assert words[0] in own(), row
        if row.answer == "alias":
            assert translate(words, own()).argv == words
            compat.parse(words)


def test_flags_that_a_reason_names_exist():
    named = {flag for row in rows() for flag in FLAG.findall(row.reason)}
    assert named - set(own()) - set(table()) - OTHER_PROGRAMS == set()


# ---- a command line


def test_what_is_always_so_is_one_line_and_what_is_ignored_one_a_reason():
    tags = "--app-tag-run-name a --app-tag-run-version=1"
    run = compat.parse(f"--use-mcore-models --no-rope-fusion --local_rank=1 {tags} --te-rng-tracker --lr 1".split())
    always, logger, graphs, defaults = run.warnings
    assert always == "always so here: --use-mcore-models, --no-rope-fusion, --local-rank 1"
    assert "--app-tag-run-name a, --app-tag-run-version 1:" in logger
    assert "--te-rng-tracker:" in graphs and "--defaults megatron" in defaults
    assert run == compat.parse(["--lr", "1"])


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("--moe-grouped-gemm", "--moe-expert-backend grouped_mm"),
        ("--no-check-for-nan-in-loss-and-grad", "--on-nan skip"),
        ("--yarn-beta-fast=16", "--beta-fast 16"),
        ("--yarn-beta-slow -1", "--beta-slow -1"),
        ("--recompute-activations", "--recompute-granularity selective"),
        ("--tokenizer-type Llama2Tokenizer", "--tokenizer-type SentencePieceTokenizer"),
        ("--cp-comm-type p2p a2a", "--cp-comm-type all_gather"),
        ("--spec local", "--transformer-impl local"),
        ("--attention-backend local", "--transformer-impl local"),
        (
            "--spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_with_transformer_engine_spec",
            "--transformer-impl transformer_engine",
        ),
        ("--persistent-save-interval 5", "--save-interval 5"),
    ],
)
def test_an_alias_is_what_it_stands_for(typed, ours):
    others = "--preset tiny --rope-type yarn --save steps".split()
    run = compat.parse([*typed.split(), *others])
    assert run == compat.parse([*ours.split(), *others])
    (note,) = run.warnings
    assert note.startswith(f"{typed.replace('=', ' ')} is {ours} here")


@pytest.mark.parametrize(("typed", "factor"), [("", "8"), (" --rope-scaling-factor 32", "32")])
def test_llama3_scaling_reads_its_factor_from_another_flag(typed, factor):
    run = compat.parse(f"--preset tiny-gqa --save steps --use-rope-scaling{typed}".split())
    ours = f"--rope-type llama3 --rotary-scaling-factor {factor} --original-max-position-embeddings 8192"
    assert run == compat.parse(f"--preset tiny-gqa --save steps {ours}".split())
    (note,) = run.warnings
    assert note.startswith("--use-rope-scaling is --rope-type llama3")
    latent = f"--multi-latent-attention --save steps --use-rope-scaling{typed}"
    assert compat.parse(latent.split()) == compat.parse("--multi-latent-attention --save steps".split())


def test_a_mistake_in_an_alias_names_what_was_typed():
    run = compat.parse("--preset tiny --mock-data --vocab-size 100 --main-grads-dtype bf16".split())
    with pytest.raises(ConfigError, match=r"--grad-reduce-in-bf16 \(--main-grads-dtype bf16\), --no-bf16"):
        rules.check(run, 1)


def test_the_value_decides_where_megatron_has_several():
    answers = {
        "--ckpt-format": {"torch_dist": "always", "torch": "ignored"},
        "--attention-backend": {"local": "alias"},
        "--spec": {"local": "alias", "mine.specs": "refused"},
        "--exp-avg-dtype": {"fp16": "refused"},
        "--main-grads-dtype": {"fp32": "always", "bf16": "alias", "fp16": "refused"},
        "--exit-signal": {"SIGTERM": "always", "15": "always", "2": "refused"},
        "--optimizer-offload-fraction": {"1.0": "always", "0.5": "refused"},
        "--rotary-seq-len-interpolation-factor": {"1": "always", "4": "alias"},
        "--position-embedding-type": {"yarn": "refused", "mrope": "refused"},
        "--normalization": {"LayerNorm": "refused"},
        "--optimizer": {"dist_muon": "alias", "lion": "refused"},
        "--muon-tp-mode": {"duplicated": "always", "distributed": "always", "blockwise": "refused"},
        "--muon-scalar-optimizer": {"adam": "always", "lion": "refused"},
        "--muon-fp32-matmul-prec": {"low": "alias", "high": "refused"},
        "--muon-coefficient-type": {"polar_express": "refused"},
    }
    assert {flag: {value: row_for(flag, [value]).answer for value in by} for flag, by in answers.items()} == answers
    assert row_for("--optimizer", ["muon"]) is None and row_for("--normalization", ["RMSNorm"]) is None


def test_a_switch_that_is_ignored_is_so_when_it_is_off():
    (note, _) = compat.parse("--rl-partial-rollouts --no-rl-skip-bos-token --lr 1".split()).warnings
    assert "--rl-partial-rollouts, --no-rl-skip-bos-token" in note
    assert row_for("--no-sft", []) is None and row_for("--no-langrl-env-config", ["a"]) is None


def test_all_errors_of_a_command_come_at_once():
    words = "--init-method-xavier-uniform --tp 2 --use-mcore-models yes --num-layerz 4 --sft".split()
    said = refused(lambda: compat.parse(words), lines=6).splitlines()
    assert said[0].startswith("5 flags")
    fragments = ["--init-method-std", "--tensor-model-parallel-size", "takes 0", "--num-layers?", "--sft:"]
    assert all(fragment in line for fragment, line in zip(fragments, said[1:]))
    assert "did you mean" not in refused(lambda: compat.parse(["--moe-frobnicate"]))  # which is far from all


def test_words_of_our_own_flags_are_left_as_they_are():
    argv = ["--data-path", "0.5", "a b", "--lr=-1e-3", "--min-lr", "-1", "--moe-layer-freq", "[0]+[1]*3", "-x", "y"]
    found = translate(argv, own())
    assert found.argv == argv and not found.problems and not found.notes


# ---- the page


def counts() -> Counter[str]:
    """Return how many of Megatron-LM's flags have each answer."""
    found: Counter[str] = Counter()
    for flag in names()[0]:
        answers = {row.answer for row in table().get(flag, ())}
        found["taken" if flag in own() else answers.pop() if len(answers) == 1 else "by value"] += 1
    return found


def test_the_page_has_the_counts_of_the_table():
    page = (ROOT / "docs" / "start" / "from_megatron.md").read_text()
    shown = dict(re.findall(r"^\| ([a-z ]+) \| (\d+) \|", page, re.MULTILINE))
    assert {answer: int(count) for answer, count in shown.items()} == dict(counts())
