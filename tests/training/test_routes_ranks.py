"""Runs that record routes and replay them: on the same layout to the bit, and on others as one rank does."""

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_moe.config.presets import PRESETS
from tests.helpers.gloo_pool import CaseFailed
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, PP2, TP2, ZERO_2, ZERO_3
from tests.helpers.trained_steps import SMALL, TINY, lines

FLAGS = {
    **TINY,
    **SMALL,
    "num_layers": 4,
    "moe_layer_freq": "[0,1,1,1]",
    "moe_router_topk": 3,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "mtp_num_layers": 1,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "make_vocab_size_divisible_by": 192,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.01,),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**FULL, "recompute_method": "block"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
VPP2 = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}
CP2 = {"context_parallel_size": 2}
OVERLAP = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    # documents apart, of which some end in padding
    "documents": {"program_data": True, "reset_attention_mask": True, "moe_seq_aux_loss_per": "document"},
    # passes that count ahead what the global batch chooses, and choices that are dropped
    "global": {
        "micro_batch_size": 1,
        "moe_router_load_balancing_type": ("global_aux_loss",),
        "moe_expert_capacity_factor": 1.0,
        "mtp_num_layers": None,
    },
}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "DP2": ("plain", 2, {}),
    "micro-batches of 1": ("plain", 1, {"micro_batch_size": 1}),
    "TP2": ("plain", 2, TP2),
    "CP2": ("plain", 2, CP2),
    "EP2, sharded optimizer": ("plain", 2, {**EP2, **DISTRIBUTED}),
    "PP2": ("plain", 2, PP2),
    "VPP2, all recomputed": ("plain", 2, {**VPP2, **FULL, "micro_batch_size": 1}),
    "all recomputed": ("plain", 1, FULL),
    "experts recomputed": ("plain", 1, SELECTIVE),
    "ZeRO 2": ("plain", 2, ZERO_2),
    "ZeRO 3, experts recomputed": ("plain", 2, {**ZERO_3, **SELECTIVE}),
    "TP2, PP2, all recomputed": ("plain", 4, {**TP2, **PP2, **FULL}),
    "CP2, TP2, EP2, overlapped": ("plain", 4, {**CP2, **TP2, **EP2, **OVERLAP}),
    "CP2, PP2, recomputed": ("plain", 4, {**CP2, **PP2, **SELECTIVE}),
    "documents, some recomputed": ("documents", 1, BLOCK),
    "documents, CP2, PP2": ("documents", 4, {**CP2, **PP2}),
    "documents, TP2, all recomputed": ("documents", 2, {**TP2, **FULL}),
    "global, EP2": ("global", 2, EP2),
    "global, TP2, PP2": ("global", 4, {**TP2, **PP2}),
}


class Samples:
    """Samples of several documents, the last ones with padding behind them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Any]:
        ids = torch.randint(0, 256, (17,), generator=torch.Generator().manual_seed(number))
        ends, documents = [3 + number % 5, 9, 16 - 3 * (number % 2)], torch.full((16,), -1)
        for begin, end in zip([0, *ends], ends):
            documents[begin:end] = begin
        mask = (documents >= 0).long()
        return {"tokens": ids[:-1], "labels": ids[1:], "documents": documents, "loss_mask": mask}


def run(folder: Path, name: str, model: str, **flags: Any) -> dict[str, Any]:
    """A run of a model, which writes its metrics there."""
    from megatron_moe.config.schema import build
    from megatron_moe.training.program import ProgramParts
    from megatron_moe.training.run import pretrain

    changes = {**MODELS[model], "metrics_file": str(folder / f"{name}.jsonl"), **flags}
    if model == "documents":
        changes = {**changes, "mock_data": False, "tokenizer_type": None, "vocab_size": 256}
        return pretrain(build({**FLAGS, **changes}), parts=ProgramParts(data=Samples()))
    return pretrain(build({**FLAGS, **changes}))


def routes_of(folder: Path, model: str) -> dict[tuple[int, int], numpy.ndarray]:
    """Sample and layer -> the routes [S, K] in the files of a folder, 255 where none is recorded."""
    from megatron_moe.config.schema import build
    from megatron_moe.training.route_files import RouteShape, read_part

    found = {}
    for file in folder.rglob("*.safetensors"):
        part = read_part(file, RouteShape.from_run(build({**FLAGS, **MODELS[model]})))
        routes = numpy.where(part.recorded[:, :, None, None], part.routes, 255)
        for row, sample in enumerate(part.samples.tolist()):
            for column, layer in enumerate(part.layers.tolist()):
                assert (sample, layer) not in found
                found[sample, layer] = routes[row, :, column]
    return found


@pytest.fixture(scope="module")
def recorded(once, folder):
    """Returns for a model the folder with its routes, the metrics of its run, and of a replay with other weights."""

    def make(model: str) -> Path:
        routes = str(folder / model / "routes")
        (folder / model).mkdir(exist_ok=True)
        flags = {"folder": folder / model, "model": model}
        once(1, run, **flags, name="recorded", moe_routing_trace_path=routes)
        once(1, run, **flags, name="replayed", init_method_std=0.05, moe_enable_routing_replay=routes)
        return folder / model

    return make


@pytest.mark.parametrize("model", rows(MODELS, test=["plain", "documents"]))
def test_a_replay_on_the_same_layout_is_the_recorded_run_to_the_bit(gloo, recorded, tmp_path, model):
    there = recorded(model)
    gloo.run(1, run, folder=tmp_path, name="plain", model=model)
    gloo.run(1, run, folder=tmp_path, name="again", model=model, moe_enable_routing_replay=str(there / "routes"))
    steps = [lines(path) for path in (there / "recorded.jsonl", tmp_path / "plain.jsonl", tmp_path / "again.jsonl")]
    for wanted, *others in zip(*steps, strict=True):
        for key in ("loss", "mtp_losses", "grad_norm", "tokens_per_expert", "expert_bias_hash", "aux_losses"):
            assert [step.get(key) for step in others] == [wanted.get(key)] * 2, key


@pytest.mark.parametrize(
    "layout", rows(LAYOUTS, test=["TP2", "VPP2, all recomputed", "documents, some recomputed", "documents, CP2, PP2"])
)
def test_every_layout_replays_the_recorded_choice_of_other_weights(gloo, recorded, tmp_path, layout):
    model, ranks, flags = LAYOUTS[layout]
    there = recorded(model)
    both = {"moe_enable_routing_replay": str(there / "routes"), "moe_routing_trace_path": str(tmp_path / "routes")}
    gloo.run(ranks, run, folder=tmp_path, name="mine", model=model, init_method_std=0.05, **both, **flags)
    replayed, recorded_steps = lines(there / "replayed.jsonl"), lines(there / "recorded.jsonl")
    for mine, wanted, own in zip(lines(tmp_path / "mine.jsonl"), replayed, recorded_steps, strict=True):
        dropped = MODELS[model].get("moe_expert_capacity_factor") is not None  # by weights, which are others
        counts = mine["tokens_per_expert"]
        assert counts == (wanted if dropped else own)["tokens_per_expert"] and mine["loss"] != own["loss"]
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1.6e-7)
        assert mine.get("mtp_losses") == pytest.approx(wanted.get("mtp_losses"), rel=1.6e-7)
        assert mine["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        assert mine["aux_losses"] == pytest.approx(wanted["aux_losses"], rel=1e-5)
    routes, wanted = routes_of(tmp_path / "routes", model), routes_of(there / "routes", model)
    for (sample, _), of_sample in wanted.items():
        assert (of_sample == 255).any() == (model == "documents" and sample % 2 == 1)  # where it has padding
    assert routes.keys() == wanted.keys() and all(numpy.array_equal(routes[key], wanted[key]) for key in wanted)


def test_a_resumed_run_records_again_what_follows_its_checkpoint(gloo, tmp_path):
    def traced() -> dict[str, bytes]:
        files = (tmp_path / "routes").rglob("*.safetensors")
        return {str(file.relative_to(tmp_path)): file.read_bytes() for file in files}

    flags: dict[str, Any] = {"save": str(tmp_path / "saved"), "moe_routing_trace_path": str(tmp_path / "routes")}
    flags |= {"folder": tmp_path, "name": "steps", "model": "plain", "eval_iters": 1, "train_iters": 2}
    gloo.run(1, run, **flags, save_interval=1)
    whole = traced()
    assert sorted(whole) == [f"routes/step-0000000{step}/rank-00000.safetensors" for step in (1, 2)]
    (tmp_path / "routes/step-00000002/rank-00007.safetensors").write_bytes(b"of another layout")
    gloo.run(1, run, **{**flags, "save": None}, load=flags["save"], ckpt_step=1)
    assert traced() == whole
    gloo.run(1, run, **{**flags, "save": None, "train_iters": 1})
    assert len(traced()) == 1 and len(list((tmp_path / "routes.previous").rglob("*.safetensors"))) == 2


def test_a_run_says_how_many_choices_the_gates_would_make_too_and_lets_them_make_what_is_missing(
    gloo, recorded, tmp_path
):
    shutil.copytree(recorded("plain") / "routes" / "step-00000001", tmp_path / "routes")
    flags = {"folder": tmp_path, "model": "plain", "moe_enable_routing_replay": str(tmp_path / "routes")}
    with pytest.raises(CaseFailed, match="layer 2 of sample 8 is not recorded, nothing of it is"):
        gloo.run(1, run, name="short", **flags)
    gloo.run(1, run, name="live", moe_routing_replay_missing="live", **flags)
    for mine, wanted in zip(lines(tmp_path / "live.jsonl"), lines(recorded("plain") / "recorded.jsonl"), strict=True):
        assert mine["loss"] == wanted["loss"]
    (said,) = [line["text"] for line in lines(tmp_path / "live.events.jsonl") if "the gates would" in line["text"]]
    least = "in layer 2, where they agree least, 100.0% (by chance 37.5%)"
    assert said == f"of the replayed choices the gates would make 100.0%; {least}"


def test_a_route_is_at_the_position_of_its_token(gloo, tmp_path):
    flags = {"moe_router_force_load_balancing": True, "micro_batch_size": 1, "train_iters": 1}  # chooses by position
    losses = {"moe_router_load_balancing_type": ("none",), "moe_aux_loss_coeff": (0.0,)}
    trace = {"moe_routing_trace_path": str(tmp_path / "routes")}
    gloo.run(2, run, folder=tmp_path, name="forced", model="plain", **CP2, **trace, **flags, **losses)
    experts, topk = PRESETS["tiny"]["num_experts"], FLAGS["moe_router_topk"]
    found = routes_of(tmp_path / "routes", "plain")
    assert len(found) == 8 * 4
    for routes in found.values():
        assert routes.flatten().tolist() == [choice % experts for choice in range(16 * topk)]
