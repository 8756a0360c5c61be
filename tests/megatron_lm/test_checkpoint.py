"""megatron-moe convert from and to Megatron-LM: the engine's own checkpoints, read and written to the bit."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_moe_tools import trace
from megatron_moe_tools.convert.cli import main
from tests.helpers.conversions import convert, unequal, words
from tests.helpers.rows import rows
from tests.helpers.trained_steps import tensors
from tests.megatron_lm import engine_checkpoints as megatron

pytestmark = pytest.mark.engine


def logits_of(step: Path, folder: Path) -> Tensor:
    """What our model computes from a native step, in fp32, for the engine's tokens."""
    save_file({"input_ids": megatron.TOKENS}, folder / "tokens.safetensors")
    files = ["--tokens", str(folder / "tokens.safetensors"), "--output", str(folder / "out")]
    assert trace.main(["--load", str(step), *files]) == 0
    return load_file(folder / "out")["logits"]


@pytest.fixture(scope="module", params=megatron.LISTS)
def saved(gloo: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint that the engine wrote, and the native step that it becomes."""
    folder = tmp_path_factory.mktemp(request.param)
    (found,) = gloo.run(1, megatron.written, name=request.param, folder=str(folder / "theirs"))
    certificate = convert("megatron", "native", folder / "theirs", folder / "ours")
    step = folder / "ours" / f"iter_{megatron.STEPS:07d}"
    return {**found, "name": request.param, "folder": folder, "certificate": certificate, "step": step}


def test_the_engines_checkpoint_computes_the_same_here(saved, tmp_path):
    torch.testing.assert_close(logits_of(saved["step"], tmp_path), saved["logits"], rtol=0, atol=1e-5)


def test_every_element_is_moved_to_the_bit_and_listed(saved):
    ours, state = tensors(saved["step"]), saved["state"]
    for key, value in state.items():
        prefix, found, rest = key.partition("local_experts.")
        if found:
            number, product = rest.split(".")[:2]
            mine = ours[f"{prefix}weight{product[-1]}"][int(number)].reshape(value.shape)
        else:
            mine = ours[key]
        assert torch.equal(mine, value) and mine.dtype == value.dtype, key
    table = saved["certificate"]["tensors"]
    moved = sum(torch.Size(entry["shape"]).numel() for row in table for entry in row["megatron"])
    assert moved == sum(value.numel() for value in ours.values())
    dropped = {name for name in saved["certificate"]["dropped"] if "_extra_state" not in name}
    assert {name.split("/")[0] for name in dropped} - {"common_state"} == {"rng_state", "opt_param_scheduler"}


def test_a_run_goes_on_with_the_optimizer_of_the_engine(saved, gloo, tmp_path):
    ours = tensors(saved["step"])
    for key, value in saved["exp_avg"].items():
        if "local_experts" not in key:
            assert torch.equal(ours[f"optimizer.state.exp_avg.{key}"], value), key
    gloo.run(1, megatron.continued, name=saved["name"], folder=str(saved["step"].parent), save=str(tmp_path))
    step = tmp_path / f"iter_{megatron.STEPS + 1:07d}"
    state = json.loads((step / "state.json").read_text())
    record = state["records"][-1]
    assert (record["iteration"], state["consumed_samples"]) == (megatron.STEPS + 1, (megatron.STEPS + 1) * 4)
    assert float.fromhex(record["learning_rate_hex"]) == saved["steps"][megatron.STEPS][2]
    # The moments that were loaded are what this step's began from.
    after, key = tensors(step), "optimizer.state.exp_avg_sq.decoder.final_layernorm.weight"
    assert bool((after[key] >= 0.998 * ours[key]).all())


def test_the_engine_loads_what_is_exported(saved, gloo):
    back = saved["folder"] / "back"
    certificate = convert("native", "megatron", saved["step"].parent, back, "--no-optim", "--transformer-impl", "local")
    assert (back / "latest_checkpointed_iteration.txt").read_text() == "release"
    (logits,) = gloo.run(1, megatron.loaded, name=saved["name"], folder=str(back / "release"))
    torch.testing.assert_close(logits, saved["logits"], rtol=0, atol=1e-6)
    assert {key.split(".")[0] for key in certificate["dropped"]} == {"optimizer"}
    again = saved["folder"] / "again"
    convert("megatron", "native", back, again)
    assert unequal(tensors(again / "iter_0000000"), weights(tensors(saved["step"]))) == []


@pytest.mark.parametrize(
    ("saved", "ranks"), rows(itertools.product(megatron.LISTS, (1, 2)), test=[("deepseek", 2)]), indirect=["saved"]
)
def test_the_engine_goes_on_with_an_exported_optimizer(saved, gloo, ranks):
    back = saved["folder"] / f"for {ranks}"
    flags = ["--transformer-impl", "local", "--expert-model-parallel-size", str(ranks)]
    certificate = convert("native", "megatron", saved["step"].parent, back, *flags)
    assert certificate["dropped"] == []
    assert (back / "latest_checkpointed_iteration.txt").read_text() == str(megatron.STEPS)
    step = back / f"iter_{megatron.STEPS:07d}"
    for found in gloo.run(ranks, megatron.went_on, name=saved["name"], folder=str(step), expert_ranks=ranks):
        for step_there, meant in zip(found, saved["steps"][megatron.STEPS :], strict=True):
            assert step_there == pytest.approx(meant, rel=1e-5)
    again = saved["folder"] / f"once more, {ranks}"
    convert("megatron", "native", back, again)
    assert unequal(tensors(again / step.name), tensors(saved["step"])) == []


def weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if not key.startswith("optimizer.")}


# ---- the format `torch`, as several ranks write it


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank, experts by name": {},
    "TP2, one matrix": {"tp": 2, "experts": "weights"},
    "PP2, EP2, Transformer Engine": {"pp": 2, "ep": 2, "experts": "grouped", "fused": True},
    "TP2, PP2, EP4": {"tp": 2, "pp": 2, "ep": 4},
}


def fused_names(state: dict[str, Tensor], latent: bool) -> dict[str, str]:
    """Our names of norms -> those of Transformer Engine's layers, which compute them within the next product."""
    renamed = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"}
    if latent:
        renamed = {f"{short}_layernorm.weight": f"linear_{short}_up_proj.layer_norm_weight" for short in ("q", "kv")}
    return {key: key.replace(old, new) for key in state for old, new in renamed.items() if old in key}


@pytest.mark.parametrize(
    ("saved", "layout"),
    rows(
        itertools.product(megatron.LISTS, LAYOUTS),
        test=[
            ("mixtral", "one rank, experts by name"),
            ("mixtral", "TP2, one matrix"),
            ("deepseek", "PP2, EP2, Transformer Engine"),
            ("deepseek", "TP2, PP2, EP4"),
        ],
    ),
    indirect=["saved"],
)
def test_files_of_all_ranks_are_joined_to_the_bit(saved, layout, tmp_path):
    options = dict(LAYOUTS[layout])
    if options.pop("fused", False):
        options["names"] = fused_names(saved["state"], saved["name"] == "deepseek")
    theirs = megatron.legacy(tmp_path / "theirs", saved["state"], saved["args"], **options)
    certificate = convert("megatron", "native", theirs, tmp_path / "ours")
    assert unequal(tensors(tmp_path / "ours" / "iter_0000000"), weights(tensors(saved["step"]))) == []
    assert len(certificate["source"]["files"]) == len(list(theirs.glob("iter_*/mp_rank_*")))


@pytest.mark.parametrize("saved", ["mixtral"], indirect=True)
def test_a_rank_that_disagrees_with_another_is_refused(saved, tmp_path, capsys):
    theirs = megatron.legacy(tmp_path / "theirs", saved["state"], saved["args"], tp=2)
    file = theirs / "iter_0000005" / "mp_rank_01" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.layers.1.mlp.router.weight"][0, 0] += 1
    torch.save(content, file)
    assert main(words("megatron", "native", theirs, tmp_path / "ours")) == 2
    message = capsys.readouterr().err
    assert not (tmp_path / "ours").exists() and not list(tmp_path.glob(".*.converting"))
    assert "mp_rank_01: decoder.layers.1.mlp.router.weight" in message and "differs" in message


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("layout", "other"), [("tp", "01"), ("ep", "00_001"), ("pp", "00_001")])
@pytest.mark.parametrize("saved", ["mixtral"], indirect=True)
def test_files_that_were_exchanged_or_copied_between_ranks_are_refused(saved, layout, other, known, tmp_path, capsys):
    theirs = megatron.legacy(tmp_path / "theirs", saved["state"], saved["args"], **{layout: 2})
    files = [file for name in ("00", "00_000", other) for file in theirs.glob(f"*/mp_rank_{name}/*")]
    contents = [torch.load(file, weights_only=False) for file in files]
    for content in () if known else contents:
        content["args"].rank = 0  # a tool wrote all files
    said = []
    for exchanged in (contents[::-1], contents[:1] * 2):
        for file, content in zip(files, exchanged, strict=True):
            torch.save(content, file)
        status = main(words("megatron", "native", theirs, tmp_path / f"ours {len(said)}"))
        said.append((status, capsys.readouterr().err))
    (first, exchanged), (second, copied) = said
    assert second == 2 and first == (0 if layout != "pp" and not known else 2)
    if layout == "pp":
        assert "is not of PP rank" in exchanged and "is not of PP rank" in copied
    else:
        assert " equals mp_rank_00" in copied
        assert ("was written by rank 1, which is" if known else "do not say which rank wrote each") in exchanged
