"""A step of any layout is read by any other, every bit of it; the run goes on there as it would have gone on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import reshard_cases as cases
from tests.helpers.rows import rows

pytestmark = pytest.mark.engine

SHORT = {"train_iters": 3, "global_batch_size": 4}
# (TP, PP, EP) of each stop; two stops beside each other are a pair, twelve in all. The last is the first.
CHAINS = {
    "fp32": [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 1, 4), (1, 1, 1)],
    "bf16, distributed": [(2, 1, 2), (1, 2, 2), (1, 1, 1), (2, 2, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2)],
}


@pytest.mark.parametrize("mode", rows(CHAINS, test=["bf16, distributed"]))
def test_state_travels_through_layouts_unchanged_and_goes_on_as_it_would_have(gloo, tmp_path, mode):
    flags: dict[str, Any] = {**cases.MODES[mode], **SHORT, "data_path": (cases.corpus(tmp_path),)}
    first, *others = CHAINS[mode]
    ranks, sizes = cases.LAYOUTS[first]
    source = tmp_path / "0"
    gloo.run(ranks, cases.trained, flags={**flags, **sizes, "save_interval": 2, "save": str(source)})
    saved, recorded = source / "iter_0000002", cases.state_of(source / "iter_0000003")["records"][-1]
    known = cases.tensors(saved)
    assert any(value.any() for key, value in known.items() if key.endswith("expert_bias"))
    wrong = []
    for number, stop in enumerate(others, start=1):
        ranks, sizes = cases.LAYOUTS[stop]
        target = tmp_path / str(number)
        here = {**flags, **sizes, "load": str(tmp_path / str(number - 1)), "ckpt_step": 2, "save": str(target)}
        record = gloo.run(ranks, cases.moved, flags=here)[0][-1]
        wrong += [f"{stop}: {what}" for what in cases.compared(saved, target / "iter_0000002", known)]
        told = cases.next_step_differs(recorded, record, to_the_bit=stop == first, fp32=mode == "fp32")
        wrong += [f"{stop}: next step: {what}" for what in told]
    assert wrong == []


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
THIRDS = {
    **cases.layout(global_batch_size=6),
    "num_experts": 4,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
}
FURTHER = {"num_layers": 4, "moe_layer_freq": 1, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}


def padded_to(multiple: int, tp: int = 1) -> dict[str, Any]:
    return cases.layout(tp=tp, make_vocab_size_divisible_by=multiple, ema_decay=0.9)


# Mode -> of each stop ZeRO's stage, the ranks and the layout; two stops beside each other are a pair.
STAGES: dict[str, list[tuple[int, int, dict[str, Any]]]] = {
    "bf16": [
        (3, 4, cases.layout(ep=2)),
        (2, 4, cases.layout(tp=2)),
        (0, 2, cases.layout(pp=2)),
        (3, 1, cases.layout()),
        (1, 4, cases.layout(tp=2, ep=2)),
        (2, 2, cases.layout()),
        (3, 4, cases.layout(ep=2)),
    ],
    "fp16": [
        # three ranks: shards that are not equal, and on the last rank no part of a router or of an expert
        (2, 3, THIRDS),
        (1, 3, THIRDS),
        (3, 3, THIRDS),
        (2, 3, THIRDS),
    ],
    "fp32": [(3, 2, cases.layout()), (1, 2, cases.layout(ep=2)), (2, 4, cases.layout(ep=4)), (3, 2, cases.layout())],
    # tables of 250, 256 and 252 rows
    "fp32, padding": [
        (0, 1, padded_to(1)),
        (3, 2, padded_to(64)),
        (2, 2, padded_to(3, tp=2)),
        (0, 1, padded_to(1)),
    ],
    "fp32, letters": [
        (1, 4, cases.layout(pp=4, pipeline_model_parallel_layout="Ett|tt|m|L", **FURTHER)),
        (0, 1, cases.layout(**FURTHER)),
        (1, 2, cases.layout(pp=2, pipeline_model_parallel_layout="E|ttt|t|mL", **FURTHER)),
        (0, 2, cases.layout(pp=2, **FURTHER)),
        (1, 4, cases.layout(pp=4, pipeline_model_parallel_layout="Ett|tt|m|L", **FURTHER)),
    ],
}


@pytest.mark.parametrize("mode", rows(STAGES, test=["bf16"]))
def test_state_travels_through_the_stages_unchanged_and_goes_on_as_it_would_have(gloo, tmp_path, mode):
    scale = {"initial_loss_scale": 256.0, "loss_scale_window": 2} if mode == "fp16" else {}
    fp32 = mode.startswith("fp32")
    flags = {} if fp32 else {mode: True, "keep_fp32": ("router",)}
    flags |= {**SHORT, **scale, "data_path": (cases.corpus(tmp_path),)}
    (stage, ranks, sizes), *others = STAGES[mode]
    first = {**flags, **sizes, "data_parallel_sharding_strategy": STRATEGIES[stage]}
    gloo.run(ranks, cases.trained, flags={**first, "save_interval": 2, "save": str(tmp_path / "0")})
    saved, recorded = (
        tmp_path / "0" / "iter_0000002",
        cases.state_of(tmp_path / "0" / "iter_0000003")["records"][-1],
    )
    known = cases.tensors(saved)
    wrong = []
    for number, (stage, ranks, sizes) in enumerate(others, start=1):
        target = tmp_path / str(number)
        here = {**flags, **sizes, "data_parallel_sharding_strategy": STRATEGIES[stage], "ckpt_step": 2}
        here |= {"load": str(tmp_path / str(number - 1)), "save": str(target)}
        record = gloo.run(ranks, cases.moved, flags=here)[0][-1]
        wrong += [f"{number}: {what}" for what in cases.compared(saved, target / "iter_0000002", known)]
        told = cases.next_step_differs(recorded, record, to_the_bit=number == len(others), fp32=fp32)
        wrong += [f"{number}: next step: {what}" for what in told]
    assert wrong == []


# Of each stop the dtype, ZeRO's stage, the ranks and the layout; the last is the first.
DTYPES: list[tuple[dict[str, Any], int, int, dict[str, Any]]] = [
    ({"bf16": True, "keep_fp32": ("norms",)}, 3, 2, cases.layout()),
    ({"fp16": True, "keep_fp32": ("router",)}, 2, 4, cases.layout(ep=2)),
    ({}, 0, 1, cases.layout()),
    ({"bf16": True}, 1, 2, cases.layout(tp=2)),
    ({}, 3, 2, cases.layout(ep=2)),
    ({"fp16": True}, 0, 2, cases.layout(pp=2)),
    ({"bf16": True, "keep_fp32": ("norms",)}, 3, 2, cases.layout()),
]
SCALE = {"initial_loss_scale": 256.0, "loss_scale_window": 2}


def is_kept(key: str, dtype: dict[str, Any]) -> bool:
    (what,) = dtype.get("keep_fp32", ("nothing",))
    return not dtype or key.endswith({"norms": "norm.weight", "router": "router.weight"}.get(what, "/"))


def test_state_travels_through_dtypes_and_stages_with_its_main_weights_unchanged(gloo, tmp_path):
    flags: dict[str, Any] = {**SHORT, "data_path": (cases.corpus(tmp_path),)}
    (dtype, stage, ranks, sizes), *others = DTYPES
    first = {**flags, **dtype, **sizes, "data_parallel_sharding_strategy": STRATEGIES[stage], "save_interval": 2}
    gloo.run(ranks, cases.trained, flags={**first, "save": str(tmp_path / "0")})
    step, recorded = (
        tmp_path / "0" / "iter_0000002",
        cases.state_of(tmp_path / "0" / "iter_0000003")["records"][-1],
    )
    original = cases.tensors(step)
    kept, mains = cases.without_weights(original), cases.main_weights(original)
    assert any(value.any() for key, value in kept.items() if key.endswith("expert_bias"))
    wrong = []
    for number, (dtype, stage, ranks, sizes) in enumerate(others, start=1):
        target = tmp_path / str(number)
        here = {**flags, **dtype, **sizes, "data_parallel_sharding_strategy": STRATEGIES[stage], "ckpt_step": 2}
        here |= {"load": str(tmp_path / str(number - 1)), "save": str(target), **(SCALE if "fp16" in dtype else {})}
        record = gloo.run(ranks, cases.moved, flags=here)[0][-1]
        found = cases.tensors(target / "iter_0000002")
        wrong += [f"{number}: {key}" for key in cases.differing(kept, cases.without_weights(found))]
        wrong += [f"{number}: main weight {key}" for key in cases.differing(mains, cases.main_weights(found))]
        half = torch.bfloat16 if "bf16" in dtype else torch.float16
        weights = {key: main.to(torch.float32 if is_kept(key, dtype) else half) for key, main in mains.items()}
        wrong += [f"{number}: weight {key}" for key in cases.differing(weights, {key: found[key] for key in mains})]
        last = number == len(others)
        told = cases.next_step_differs(recorded, record, to_the_bit=last, fp32=False)
        wrong += [f"{number}: next step: {what}" for what in told]
    assert wrong == []


DENSE_FIRST = {"moe_layer_freq": "[0,1]"}
CROSSINGS = {
    # dtype, distributed before, model, pipeline stages after
    "fp32, whole to distributed": ({}, False, {}, 1),
    "fp16, distributed to whole, a first stage without experts": ({"fp16": True}, True, DENSE_FIRST, 1),
    "fp32, distributed to whole, a first stage without experts that stays": ({}, True, DENSE_FIRST, 2),
}


@pytest.mark.parametrize("name", CROSSINGS)
def test_each_kind_of_optimizer_reads_the_other_ones_state(gloo, tmp_path, name):
    dtype, distributed, model, stages = CROSSINGS[name]
    scale = {"initial_loss_scale": 256.0, "loss_scale_window": 2} if "fp16" in dtype else {}
    flags = {**dtype, **scale, **model, **SHORT, "data_path": (cases.corpus(tmp_path),)}
    source, target = tmp_path / "source", tmp_path / "target"
    before = {**flags, **cases.layout(pp=2), "use_distributed_optimizer": distributed, "save_interval": 2}
    gloo.run(2, cases.trained, flags={**before, "save": str(source)})
    after = {**flags, **cases.layout(pp=stages), "use_distributed_optimizer": not distributed, "load": str(source)}
    records = gloo.run(stages, cases.moved, flags={**after, "ckpt_step": 2, "save": str(target)})[0]
    assert cases.compared(source / "iter_0000002", target / "iter_0000002") == []
    recorded = cases.state_of(source / "iter_0000003")["records"][-1]
    assert cases.next_step_differs(recorded, records[-1], to_the_bit=False, fp32=not dtype) == []


def test_a_run_in_six_pieces_is_the_run_in_one(gloo, tmp_path):
    flags = {
        **cases.layout(ep=2),
        "data_path": (cases.corpus(tmp_path, documents=8),),  # less than the run takes: it is repeated
        "bf16": True,
        "use_distributed_optimizer": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,  # draws from the model-parallel streams
        "rampup_batch_size": (4, 2, 30),
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 3,
    }
    assert cases.incarnations(gloo, Path(tmp_path), 2, flags, [1, 3, 2, 1, 1, 2]) == []
    # what would change which samples those steps had seen is refused
    (message, _) = gloo.run(
        2, cases.message_of, flags={**flags, "seed": 5, "train_iters": 11, "load": f"{tmp_path}/pieces"}
    )
    assert "was trained on another order of samples" in message and "--seed: checkpoint 1234, this run 5" in message
