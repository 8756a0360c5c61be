"""megatron-moe trace --experts, --picture: the experts of texts and how alike they are, against plain loops."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_moe.data.tokenizers import HuggingFaceTokenizer
from megatron_moe_tools.models import experts as seeing
from megatron_moe_tools.models import trace as tracing
from megatron_moe_tools.trace import main
from tests.helpers import tiny_models
from tests.helpers.conversions import convert
from tests.helpers.tiny_tokenizers import TEXTS, published

EXPERTS, K = 16, 4
WEIGHTS = "model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
LAYERS = {1: "layer 1", 2: "layer 2", 3: "layer 3", 4: "MTP depth 1"}
LONG, SHORT = "".join(TEXTS[:4]), "width:\n# naïve"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, a depth of multi-token prediction, and experts 2, 5 and 7 of layer 3 alike."""
    folder: Path = tmp_path_factory.mktemp("made") / "hf"
    published("deepseek-v3", 3, folder)
    tiny_models.add_prediction_layers(folder, 4)
    tensors = load_file(folder / "model.safetensors")
    for matrix, expert in itertools.product(("gate", "up", "down"), (5, 7)):
        name = WEIGHTS.format(layer=3, expert=2, matrix=matrix)
        tensors[name.replace("experts.2.", f"experts.{expert}.")] = expert * tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_cosines_are_those_of_each_two_experts_weights(hf, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(seeing, "_COLUMNS", 100)
    convert("hf", "native", hf, tmp_path / "native")
    capsys.readouterr()
    tensors = load_file(hf / "model.safetensors")
    for load in (hf, tmp_path / "native"):
        assert main(["--load", str(load), "--experts", str(tmp_path / "out")]) == 0
        told = capsys.readouterr().out.splitlines()
        assert told[1:] == ["layer 3: duplicate experts, cosine > 0.999: 2, 5, 7"] and "cosine 1.000" in told[0]
        out = load_file(tmp_path / "out")
        assert set(out) == {f"cosine.{layer}" for layer in LAYERS}
        for layer, matrices in itertools.product(LAYERS, [("gate", "up", "down")]):
            vectors = [
                torch.cat([tensors[WEIGHTS.format(layer=layer, expert=e, matrix=m)].flatten() for m in matrices])
                for e in range(EXPERTS)
            ]
            for one, other in itertools.product(range(EXPERTS), repeat=2):
                wanted = torch.cosine_similarity(vectors[one].double(), vectors[other].double(), dim=0)
                assert float(out[f"cosine.{layer}"][one, other]) == pytest.approx(float(wanted), abs=1e-5)


def test_texts_are_counted_token_by_token_and_shown(hf, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(tracing, "TOKENS_AT_ONCE", 64)
    monkeypatch.setattr(seeing, "MAX_TOKENS_SHOWN", 60)
    (tmp_path / "long").write_text(LONG)
    files = {name: tmp_path / name for name in ("output", "experts", "picture")}
    words = ["--load", str(hf), "--text-file", str(tmp_path / "long"), "--text", SHORT, "--routing"]
    assert main([*words, *itertools.chain(*((f"--{name}", str(path)) for name, path in files.items()))]) == 0
    told = capsys.readouterr().out
    out, found = load_file(files["output"]), load_file(files["experts"])

    # Padding is not seen: the short text alone has the same logits.
    ids, lengths = out["input_ids"], out["lengths"].tolist()
    tokenizer = HuggingFaceTokenizer(hf)
    long, short = ([tokenizer.bos, *tokenizer.tokenize(text)] for text in (LONG, SHORT))
    assert [token for row, length in zip(ids[:-1].tolist(), lengths) for token in row[:length]] == long
    assert ids[-1, : lengths[-1]].tolist() == short and len(lengths) > 2 and max(lengths) <= 64
    save_file({"input_ids": torch.tensor([short])}, tmp_path / "tokens")
    assert main(["--load", str(hf), "--tokens", str(tmp_path / "tokens"), "--output", str(tmp_path / "alone")]) == 0
    alone = load_file(tmp_path / "alone")
    torch.testing.assert_close(out["logits"][-1:, : lengths[-1]], alone["logits"], rtol=0, atol=1e-5)
    losses = torch.nn.functional.cross_entropy(out["logits"][:, :-1].mT, ids[:, 1:], reduction="none")
    kept = torch.cat([row[: length - 1] for row, length in zip(losses, lengths)])
    assert float(out["loss"]) == pytest.approx(float(kept.mean()), rel=1e-5)

    (data,) = re.findall(r'id="data">(.*?)</script>', files["picture"].read_text(), re.DOTALL)
    page: dict[str, Any] = json.loads(data)
    assert "".join(page["pieces"][str(token)] for token in page["ids"]).endswith(f"<{tokenizer.bos}>{SHORT}")
    assert page["ids"] == long[:30] + short and page["textOf"] == [0] * 30 + [1] * len(short)
    for number, (layer, name) in enumerate(LAYERS.items()):
        counts, pairs = torch.zeros(2, EXPERTS), torch.zeros(EXPERTS, EXPERTS)
        kinds, choices = Counter[tuple[int, int]](), Counter[int]()
        for row, length in enumerate(lengths):
            for at in range(length - (layer == 4)):  # a depth has nothing to predict from at the last token
                for one in (chosen := out[f"topk_idx.{layer}"].view(len(ids), -1, K)[row, at].tolist()):
                    counts[int(row == len(ids) - 1), one] += 1
                    kinds[int(ids[row, at]), one] += 1
                    choices[int(ids[row, at])] += 1
                    for other in set(chosen) - {one}:
                        pairs[one, other] += 1
        assert torch.equal(found[f"tokens_per_expert.{layer}"], counts.long())
        loads = counts.sum(0)
        expected = torch.tensor([[float(a * b) * (i != j) for j, b in enumerate(loads)] for i, a in enumerate(loads)])
        wanted = torch.nan_to_num(pairs / (expected * (pairs.sum() / expected.sum())))
        torch.testing.assert_close(found[f"coactivation.{layer}"], wanted, rtol=1e-5, atol=1e-6)
        shown = page["layers"][number]
        assert shown["name"] == name and shown["counts"] == counts.long().tolist()
        for expert, typical in enumerate(shown["typical"]):
            share = float(loads[expert] / loads.sum())
            more = {token: kinds[token, expert] - count * share for token, count in choices.items()}
            best = sorted((value for value in more.values() if value > 1e-4), reverse=True)[: len(typical)]
            assert [more[token] for token, _, _ in typical] == pytest.approx(best, abs=1e-4)
            assert all(row[1:] == [kinds[row[0], expert], choices[row[0]] / K] for row in typical)
        dead = (loads == 0).nonzero().flatten().tolist()
        assert (f"{name}: {len(dead)} of {EXPERTS} experts dead" in told) == bool(dead)
    assert shown["experts"][-1] == [-1] * K and shown["experts"][29] == out["topk_idx.4"][29].tolist()


def test_dead_experts_are_named(hf, tmp_path, capsys) -> None:
    flags = ["--load", str(hf), "--text", "def", "--picture", str(tmp_path / "page.html")]
    assert main(flags) == 0  # few tokens leave most experts without one
    told = capsys.readouterr().out
    assert all(f"{name}: " in told for name in LAYERS.values()) and "experts dead (no token; an even share is" in told
