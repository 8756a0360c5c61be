"""A step as a model of lm-eval answers as transformers does with the same folder, on every layout."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer

from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.training.callback import Callback
from megatron_moe_tools import evaluate
from megatron_moe_tools.models.source import beginning_of_text, locate
from tests.helpers import tiny_models
from tests.helpers.rows import rows
from tests.helpers.tiny_tokenizers import published
from tests.tools import lm_eval_stand_in
from tests.tools.lm_eval_stand_in import request

POSITIONS, NEW = 48, 6
CONTEXTS = ["", "d", "def area_1(width, height):", "naïve é ", "<|bos|>def", "width " * 40]
WANTED = [" * height + 3", "é", "<|end|>", " height" * 20]
PAIRS = [(context, wanted) for context in CONTEXTS for wanted in WANTED]
PAIRS += [(context, letter) for context in ("d", "x") for letter in "abcdefghijklmnopqrstuvwxyz"]
TEXTS = ["x", "<|bos|>def area", "def area_3(width, height):\n    return width * height  # naïve\n" * 8]
UNTIL = {"until": ["w", ""], "max_gen_toks": NEW}
Answers = tuple[list[tuple[float, bool]], list[float], list[str]]


def asked(folder: str, flags: str) -> Answers | None:
    """What rank 0 of a case answers."""
    lm_eval_stand_in.install()
    from megatron_moe.data.tokenizer_choice import build_tokenizer
    from megatron_moe.training.evaluate import evaluation_mode
    from megatron_moe.training.run import pretrain
    from megatron_moe_tools.models.harness import RankScores, StepLM

    answers: list[Any] = []
    world = torch.distributed.get_world_size()
    source = locate(Path(folder))
    own = evaluate.parser().parse_args([folder, "--tasks", "x"])
    run = evaluate.run_of(source, own, ["--micro-batch-size", "8", *flags.split()], world)
    rules.check(run, world)
    tokenizer = build_tokenizer(run.data, run.model.vocab_size)

    class Asking(Callback):
        def before_training(self) -> None:
            scores = RankScores(self.trainer)
            with evaluation_mode(self.trainer.trained.model):
                if torch.distributed.get_rank():
                    return scores.serve()
                step = StepLM(scores, tokenizer, beginning_of_text(source, tokenizer))
                pairs = [request(*pair) for pair in PAIRS]
                texts = [request(text) for text in TEXTS]
                prompts = [request(context, UNTIL) for context in CONTEXTS]
                answers.extend((step.loglikelihood(pairs), step.loglikelihood_rolling(texts)))
                answers.append(step.generate_until(prompts))
                assert step.loglikelihood([request("def", "")]) == [(0.0, True)]
                for options, message in (({"temperature": 1}, "draws"), ({"max_gen_toks": POSITIONS}, "positions")):
                    with pytest.raises(ConfigError, match=message):
                        step.generate_until([request("x", options)])
                scores.close()

    pretrain(run, callbacks=[Asking()])
    return tuple(answers) if answers else None  # type: ignore[return-value]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    there: Path = tmp_path_factory.mktemp("asked") / "hf"
    case, settings = tiny_models.CASES["qwen3-moe"]
    smaller = {"qwen3-moe": (case, {**settings, "max_position_embeddings": POSITIONS, "vocab_size": 290})}
    with mock.patch.multiple(tiny_models, CASES=smaller, VOCABULARY=290):
        published("qwen3-moe", 3, there)
    return there


@pytest.fixture(scope="module")
def reference(folder) -> Answers:
    """The answers of transformers, asked token by token."""
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def score(ids: list[int], wanted: int) -> tuple[float, bool]:
        if wanted == 0:  # one token of both texts, all of which counts as context
            return 0.0, True
        kept = torch.tensor([ids[-(POSITIONS + 1) :]])
        with torch.no_grad():
            logs = model(kept[:, :-1]).logits[0].log_softmax(-1)[-wanted:]
        labels = kept[0, -wanted:]
        return float(logs.gather(1, labels[:, None]).sum()), bool((logs.argmax(-1) == labels).all())

    def encoded(text: str) -> list[int]:
        special = not text.startswith("<|bos|>")
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
        return ids

    pairs, rolled, texts = [], [], []
    for context, wanted in PAIRS:
        ids, first = encoded(context + wanted), encoded(context.rstrip())
        if not context:
            ids, first = [1, *tokenizer.encode(wanted, add_special_tokens=False)], [1]
        pairs.append(score(ids, len(ids) - len(first)))
    for text in TEXTS:
        ids, total = [1, *encoded(text)], 0.0
        for first in range(1, len(ids), POSITIONS):
            last = min(first + POSITIONS, len(ids))
            total += score(ids[max(last - POSITIONS - 1, 0) : last], last - first)[0]
        rolled.append(total)
    for context in CONTEXTS:
        prompt = torch.tensor([encoded(context)[-(POSITIONS - NEW) :]])
        new = model.generate(prompt, do_sample=False, max_new_tokens=NEW, eos_token_id=2, pad_token_id=0)
        texts.append(tokenizer.decode(new[0, prompt.shape[1] :], skip_special_tokens=True).split("w")[0])
    return pairs, rolled, texts


LAYOUTS = {
    "one process": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "VPP": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "CP2": (2, "--context-parallel-size 2"),
    "EP2": (2, "--expert-model-parallel-size 2"),
    "ZeRO 3": (2, "--data-parallel-sharding-strategy optim_grads_params"),
    "TP2, CP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
}


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=["one process", "TP2", "VPP", "EP2"]))
def test_answers_are_those_of_transformers(gloo, folder, reference, layout):
    ranks, flags = LAYOUTS[layout]
    (pairs, rolled, texts), *others = gloo.run(ranks, asked, folder=str(folder), flags=flags)
    assert others == [None] * (ranks - 1)
    assert [greedy for _, greedy in pairs] == [greedy for _, greedy in reference[0]]
    assert {True, False} == {greedy for _, greedy in pairs}
    assert [one for one, _ in pairs] == pytest.approx([one for one, _ in reference[0]], rel=1e-5)
    assert rolled == pytest.approx(reference[1], rel=1e-5)
    assert texts == reference[2] and any(texts)


def told(words: list[str]) -> int:
    lm_eval_stand_in.install()
    with mock.patch.object(evaluate, "require_rendezvous"):
        return evaluate.main(words)


def test_the_command_runs_tasks_on_all_ranks_and_writes_their_metrics(gloo, folder, tmp_path, capsys):
    output = tmp_path / "found.json"
    words = [str(folder), "--limit", "2", "--output", str(output), "--bf16", "--eval-in-fp32", "--tasks"]
    assert gloo.run(2, told, words=[*words, lm_eval_stand_in.TASK]) == [0, 0]
    found = json.loads(output.read_text())
    assert found["sets"] == {} and found["tasks"][lm_eval_stand_in.TASK]["sum,none"] < 0
    assert evaluate.table(found).splitlines()[-1].split()[:2] == ["two", "questions"]
    assert gloo.run(1, told, words=[*words, "another"]) == [2]
    assert evaluate.main([*words, "x"]) == 2 and "pip install lm_eval" in capsys.readouterr().err
