"""megatron-moe trace: what a checkpoint computes, in the order of the tokens and under Hugging Face's names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_moe_tools.convert.parity import ReferenceResult, run_model
from megatron_moe_tools.models import load_model as opening
from megatron_moe_tools.models import trace as tracing
from megatron_moe_tools.trace import main
from tests.helpers import tiny_models
from tests.helpers.conversions import convert
from tests.helpers.rows import rows
from tests.helpers.trained_steps import trained

BATCH, LENGTH = 3, 10


def tokens_of(vocab_size: int = tiny_models.VOCABULARY) -> Tensor:
    return torch.randint(0, vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))


def traced(load: Path, folder: Path, *flags: str, tokens: Tensor | None = None) -> dict[str, Tensor]:
    """The tool's output; with its JSON of norms in `folder`."""
    save_file({"input_ids": tokens_of() if tokens is None else tokens}, folder / "tokens.safetensors")
    (folder / "tokens.txt").touch()
    words = ["--load", str(load), "--tokens", str(folder / "tokens.safetensors"), "--output", str(folder / "out")]
    assert main([*words, *flags]) == 0
    assert sorted(path.name for path in folder.glob(".*")) == []
    assert (folder / "out").stat().st_mode == (folder / "tokens.txt").stat().st_mode
    return load_file(folder / "out")


def refused(capsys: Any, load: Path, folder: Path, *flags: str) -> str:
    """The one message of the tool, which writes nothing."""
    save_file({"input_ids": tokens_of()}, folder / "tokens.safetensors")
    good = {"--load": load, "--tokens": folder / "tokens.safetensors", "--output": folder / "out"}
    words = [str(word) for flag, path in good.items() if flag not in flags for word in (flag, path)]
    assert main([*words, *flags]) == 2
    told: str = capsys.readouterr().err
    assert told.count("megatron-moe trace: error: ") == 1
    assert not (folder / "out").exists()
    return told


@pytest.fixture(scope="module")
def deepseek(folder: Path) -> Path:
    tiny_models.make("deepseek-v3", 8, folder / "hf")
    return folder / "hf"


def agrees(out: dict[str, Tensor], reference: ReferenceResult) -> None:
    assert out["logits"].dtype == torch.float32
    assert out["logits"].shape == reference.logits.shape
    assert float((out["logits"] - reference.logits).abs().max()) < 1e-4
    assert out["loss"].shape == ()
    assert float(out["loss"]) == pytest.approx(reference.loss, rel=1e-5)
    for layer, experts in reference.experts.items():
        chosen, probs = out[f"topk_idx.{layer}"], out[f"probs.{layer}"]
        assert chosen.dtype == torch.int64
        assert torch.equal(chosen.sort().values, experts.sort().values)
        wanted = torch.zeros_like(probs).scatter_(1, experts, reference.weights[layer])
        torch.testing.assert_close(probs, wanted, rtol=1e-4, atol=1e-6)
        assert torch.equal((probs != 0).sum(1), torch.full((BATCH * LENGTH,), experts.shape[1]))


def grad_norms(model: Any, tokens: Tensor) -> dict[str, float]:
    """The norms of transformers' gradients by the folder's names, to which it converts them back itself."""
    from transformers.core_model_loading import revert_weight_conversion

    logits = model(input_ids=tokens, use_cache=False).logits.float()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {
        name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in model.named_parameters()
    }
    reverted = revert_weight_conversion(model, gradients)
    return {name: float(torch.linalg.vector_norm(one, dtype=torch.float64)) for name, one in reverted.items()}


AT_ONCE = tracing.TOKENS_AT_ONCE
ONE_BY_ONE = ("deepseek-v3", LENGTH)  # sequences come back in their order
CASES = [(case, AT_ONCE) for case in ("deepseek-v2-grouped", "qwen2-moe", "qwen3-moe-tied", "glm4-moe")]


@pytest.mark.parametrize(
    ("case", "at_once"),
    rows([*CASES, ONE_BY_ONE], test=[("qwen3-moe-tied", AT_ONCE), ("glm4-moe", AT_ONCE), ONE_BY_ONE]),
)
def test_a_hugging_face_folder_gives_what_transformers_computes(case, at_once, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tracing, "TOKENS_AT_ONCE", at_once)
    model = tiny_models.make(case, 8, tmp_path / "hf")
    reference, wanted = run_model(model, tokens_of()), grad_norms(model, tokens_of())
    out = traced(tmp_path / "hf", tmp_path, "--routing", "--grad-norms", str(tmp_path / "norms.json"))
    agrees(out, reference)
    assert set(out) == {"logits", "loss"} | {
        f"{name}.{layer}" for name in ("topk_idx", "probs") for layer in reference.experts
    }
    norms = json.loads((tmp_path / "norms.json").read_text())
    assert norms == pytest.approx(wanted, rel=1e-4, abs=1e-9)


def test_a_native_step_gives_the_very_numbers_of_the_folder_it_was_made_of(deepseek: Path, tmp_path: Path) -> None:
    root = tmp_path / "native"
    convert("hf", "native", deepseek, root)
    one = traced(deepseek, tmp_path, "--routing", tokens=tokens_of().int())
    for load, flags in ((root, ("--ckpt-step", "0")), (root / "iter_0000000", ())):
        two = traced(load, tmp_path, "--routing", *flags)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.engine
def test_prediction_further_ahead_is_what_transformers_layers_compute(tmp_path: Path) -> None:
    """transformers has none: its fifth layer, with the norms and the product around it written out here."""
    import transformers

    content = {**tiny_models.CASES["deepseek-v3"][1], "num_hidden_layers": 5}
    model: Any = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**content))
    tiny_models.fill(model, 2)
    model.eval().save_pretrained(tmp_path / "hf")
    fifth = load_file(tmp_path / "hf" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"num_hidden_layers": 4}
    config.pop("layer_types", None)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    tiny_models.add_prediction_layers(tmp_path / "hf", 4)
    last = "model.layers.4."
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors |= {name: value for name, value in fifth.items() if name.startswith(last)}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})

    tokens = tokens_of()
    block, model.model.layers = model.model.layers[4], model.model.layers[:4]
    reference = run_model(model, tokens)

    def norm(values: Tensor, weight: Tensor) -> Tensor:
        return values * (values.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    with torch.no_grad():
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        ahead = model.model.embed_tokens(torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1))
        both = [norm(ahead, tensors[f"{last}enorm.weight"]), norm(hidden, tensors[f"{last}hnorm.weight"])]
        merged = torch.cat(both, dim=-1) @ tensors[f"{last}eh_proj.weight"].t()
        angles = model.model.rotary_emb(merged, torch.arange(LENGTH).unsqueeze(0))
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
        merged = block(merged, attention_mask=mask, position_embeddings=angles)
        merged = merged[0] if isinstance(merged, tuple) else merged
        further = model.lm_head(norm(merged, tensors[f"{last}shared_head.norm.weight"]))

    out = traced(tmp_path / "hf", tmp_path, "--routing", "--grad-norms", str(tmp_path / "norms.json"))
    agrees(out, reference)
    assert out["mtp_logits"].shape == (1, BATCH, LENGTH, tiny_models.VOCABULARY)
    assert float((out["mtp_logits"][0] - further).abs().max()) < 1e-4
    assert {"topk_idx.4", "probs.4"} <= out.keys()  # the layer of the prediction, as its tensors are numbered
    norms = json.loads((tmp_path / "norms.json").read_text())
    assert norms[f"{last}eh_proj.weight"] == 0.0  # the loss is the main one
    assert norms.keys() == {
        name for name in tensors if not name.endswith(("bias", "4.embed_tokens.weight", "shared_head.head.weight"))
    }


def test_a_model_trained_here_at_another_layout_is_traced_with_its_real_vocabulary(gloo: Any, tmp_path: Path) -> None:
    flags = {"num_layers": 2, "moe_layer_freq": "[0,1]", "mtp_num_layers": 1, "seq_length": 16, "bf16": True}
    flags |= {"tensor_model_parallel_size": 2, "sequence_parallel": True, "train_iters": 1}
    flags |= {"use_distributed_optimizer": True, "save": str(tmp_path / "run")}
    gloo.run(2, trained, flags=flags)
    norms, loaded, streamed = tmp_path / "norms.json", tmp_path / "loaded", tmp_path / "streamed"
    words = ["--routing", "--grad-norms", str(norms), "--experts", str(loaded)]
    out = traced(tmp_path / "run", tmp_path, *words, tokens=tokens_of(257))
    assert out["logits"].shape == (BATCH, LENGTH, 257)  # the bytes and the end of a document
    assert out["mtp_logits"].shape == (1, BATCH, LENGTH, 257)
    assert torch.isfinite(out["logits"]).all()
    assert 4.5 < float(out["loss"]) < 6.5
    losses = torch.nn.functional.cross_entropy(out["logits"][:, :-1].flatten(0, 1), tokens_of(257)[:, 1:].flatten())
    assert float(out["loss"]) == pytest.approx(float(losses), rel=1e-6)
    names = json.loads(norms.read_text())
    assert names["model.layers.1.mlp.experts.3.gate_proj.weight"] > 0
    assert "model.layers.2.eh_proj.weight" in names
    # Experts are compared layer by layer as they are stored, here in halves and in bf16.
    assert main(["--load", str(tmp_path / "run"), "--experts", str(streamed)]) == 0
    for name, cosines in load_file(streamed).items():
        torch.testing.assert_close(cosines, load_file(loaded)[name], rtol=0, atol=1e-6)
        assert cosines.shape == (8, 8) and name in ("cosine.1", "cosine.2")


# ---- bad input


def given(**tensors: Tensor) -> Callable[[Path, Path], list[str]]:
    """Other tensors in the file of tokens."""

    def flags(hf: Path, at: Path) -> list[str]:
        save_file(tensors, at / "tokens.safetensors")
        return ["--tokens", str(at / "tokens.safetensors")]

    return flags


BAD: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "a step of a folder that has none": (lambda hf, at: ["--ckpt-step", "3"], "has no steps"),
    "a family for a folder that says it": (lambda hf, at: ["--family", "mixtral"], "whose config.json says which"),
    "another name": (given(ids=tokens_of()), "holds ids, and no input_ids"),
    "floats": (given(input_ids=tokens_of().float()), "is float32; token ids are"),
    "too long": (given(input_ids=torch.zeros(1, 2561, dtype=torch.int64)), "sequences of 2561 tokens; "),
    "a padding id": (given(input_ids=tokens_of().fill_(131)), "token id 131 is outside"),
    "no folder for the output": (lambda hf, at: ["--output", str(at / "a" / "b")], "its folder does not exist"),
    "tokens in a picture without a tokenizer": (
        lambda hf, at: ["--picture", str(at / "page.html")],
        "shows the text of the tokens; --load",
    ),
    "an output that is a folder": (lambda hf, at: ["--output", str(at)], "is a folder; name a file in it"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_message(name: str, deepseek: Path, tmp_path: Path, capsys: Any) -> None:
    make, message = BAD[name]
    other = tmp_path / "other"
    other.mkdir()
    assert message in refused(capsys, deepseek, tmp_path, *make(deepseek, other))


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(deepseek, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(opening.platform, "available_memory_bytes", lambda: 10**6)
    monkeypatch.setattr(opening, "build_model", lambda *_, **__: pytest.fail("was built"))
    assert "parameters, at 4 bytes each, take" in refused(capsys, deepseek, tmp_path)
