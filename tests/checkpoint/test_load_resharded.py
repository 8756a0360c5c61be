"""A step of any layout is read by any other, every bit of it; the run goes on there as it would have gone on."""

from fnmatch import fnmatch
from typing import Any

import pytest
import torch

from tests.checkpoint import reshard_cases as cases
from tests.helpers.rows import rows
from tests.helpers.trained_steps import differing, main_weights, tensors

pytestmark = pytest.mark.engine

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SCALE = {"initial_loss_scale": 256.0, "loss_scale_window": 2}
# three ranks: shards that are not equal, and on the last rank no part of a router or of an expert
THIRDS = {"num_experts": 4, "moe_router_num_groups": None, "moe_router_group_topk": None, "global_batch_size": 6}
LETTERS = {"num_layers": 4, "moe_layer_freq": 1, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
DENSE_FIRST = {"moe_layer_freq": "[0,1]"}
# The first of two stages has no experts, and both hold the one table of the vocabulary.
PREDICTING = {**DENSE_FIRST, "mtp_num_layers": 2, "untie_embeddings_and_output_weights": False}
GROUPED = {
    **{"multi_latent_attention": False, "q_lora_rank": None, "kv_lora_rank": 512, "qk_head_dim": 128},
    **{"qk_pos_emb_head_dim": 64, "v_head_dim": 128, "group_query_attention": True, "num_query_groups": 2},
    "qk_layernorm": True,
}
# Weights of norms that are split over TP ranks
ACROSS = {**GROUPED, "qk_layernorm_across_heads": True, "reordered_norm": True}
# Weights of core attention: norms, which are not split, and sinks, which are
IN_CORE = {**GROUPED, "qk_layernorm_after_rotation": True, "softmax_type": "learnable"}
# The first parameter of the model is bf16 and the fp32 ones are spread among the others, so that no two orders agree.
KEPT = ("norms", "decoder.layers.1.mlp.experts", "*.mlp.router", "decoder.layers.0.self_attention")
KEYS_OF = {"norms": "*norm.weight", "router": "*router.weight", "*.mlp.router": "*router.weight"}


def stop(ranks: int, stage: int = 0, **flags: Any) -> tuple[int, dict[str, Any]]:
    """Ranks and flags of a stop: ZeRO's stage, sizes as `reshard_cases.layout` has them, and any others."""
    return ranks, {"data_parallel_sharding_strategy": STRATEGIES[stage], **cases.layout(**flags)}


def chain(*stops: tuple[int, int, int]) -> list[tuple[int, dict[str, Any]]]:
    return [cases.LAYOUTS[sizes] for sizes in stops]


# Flags of a whole journey, and its stops; two stops beside each other are a pair. The last one is the first, unless
# the journey is a crossing.
JOURNEYS: dict[str, tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]] = {
    "bf16": (
        {"bf16": True, "keep_fp32": KEPT, "ema_decay": 0.9},
        [stop(2, 3), stop(2, 2, tp=2, make_vocab_size_divisible_by=3), stop(2, 0, pp=2), stop(4, 3, ep=2), stop(2, 3)],
    ),
    "dtypes": (
        THIRDS,
        [
            stop(3, 3, bf16=True, keep_fp32=("norms",)),
            stop(2, 2, ep=2, fp16=True, keep_fp32=("router",), **SCALE),
            stop(1),
            stop(2, 1, tp=2, bf16=True),
            stop(2, 3, ep=2),
            stop(2, 0, pp=2, fp16=True, **SCALE),
            stop(3, 3, bf16=True, keep_fp32=("norms",)),
        ],
    ),
    # Crossings between kinds of optimizers, with a stage that has no experts.
    "fp16, distributed to whole": ({"fp16": True, **SCALE, **DENSE_FIRST}, [stop(2, 1, pp=2), stop(1)]),
    "fp32, predictions, distributed to whole and back": (
        PREDICTING,
        [
            stop(2, 1, pp=2, mtp_loss_scaling_factor=0.3),
            stop(2, 0, pp=2),  # whose weight of these losses is another, as in DeepSeek-V3's training
            stop(1, 1, mtp_loss_scaling_factor=0.3),
            stop(2, 1, pp=2, mtp_loss_scaling_factor=0.3),
        ],
    ),
    "fp32, norms of all heads": (ACROSS, [stop(2, 1, tp=2), stop(2, 3), stop(2, 2, tp=2), stop(2, 1, tp=2)]),
    "fp32, norms after the rotation": (IN_CORE, [stop(2, 1, tp=2), stop(2, 3), stop(2, 1, tp=2)]),
    "fp32, every layout": ({}, chain((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 1, 4), (1, 1, 1))),
    "bf16, every layout": (
        {**cases.MODES["bf16, distributed"], "keep_fp32": KEPT, "ema_decay": 0.9},
        chain((2, 1, 2), (1, 2, 2), (1, 1, 1), (2, 2, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2)),
    ),
    "fp16, thirds": (
        {"fp16": True, "keep_fp32": ("router",), **SCALE, **THIRDS},
        [stop(3, 2), stop(3, 1), stop(3, 3), stop(3, 2)],
    ),
    "fp32, letters": (
        LETTERS,
        [
            stop(4, 1, pp=4, pipeline_model_parallel_layout="Ett|tt|m|L"),
            stop(1),
            stop(2, 1, pp=2, pipeline_model_parallel_layout="E|ttt|t|mL"),
            stop(2, pp=2),
            stop(4, 1, pp=4, pipeline_model_parallel_layout="Ett|tt|m|L"),
        ],
    ),
}
TEST = ["bf16", "dtypes", "fp16, distributed to whole", "fp32, predictions, distributed to whole and back"]
TEST += ["fp32, norms after the rotation"]


@pytest.mark.parametrize("name", rows(JOURNEYS, test=TEST))
def test_state_travels_unchanged_and_goes_on_as_it_would_have(gloo, tmp_path, name):
    flags, ((ranks, here), *others) = JOURNEYS[name]
    flags = {"global_batch_size": 4, **flags, "train_iters": 3, "data_path": (cases.corpus(tmp_path),)}
    first = {**flags, **here}
    gloo.run(ranks, cases.trained, flags={**first, "save_interval": 2, "save": str(tmp_path / "0")})
    step, recorded = tmp_path / "0/iter_0000002", cases.state_of(tmp_path / "0/iter_0000003")["records"][-1]
    state = tensors(step)
    biases = [value for key, value in state.items() if key.endswith("expert_bias")]
    assert {bias.dtype for bias in biases} == {torch.float32} and any(bias.any() for bias in biases)
    wrong = wrong_dtypes(state, first)
    for number, (ranks, there) in enumerate(others, start=1):
        there = {**flags, **there}
        places = {"load": str(tmp_path / str(number - 1)), "save": str(tmp_path / str(number))}
        record = gloo.run(ranks, cases.moved, flags={**there, **places, "ckpt_step": 2})[0][-1]
        copy = tmp_path / str(number) / "iter_0000002"
        found = tensors(copy)
        wrong += [f"{number}: {what}" for what in wrong_dtypes(found, there)]
        wrong += [f"{number}: {key}" for key in differing(without_weights(state), without_weights(found))]
        wrong += [f"{number}: main weight {key}" for key in differing(main_weights(state), main_weights(found))]
        if precision(there) == precision(first):
            wrong += [f"{number}: {what}" for what in cases.compared(step, copy, state)]
        fp32 = precision(first) == precision(there) == (False, False, ())
        told = cases.next_step_differs(recorded, record, to_the_bit=there == first, fp32=fp32)
        wrong += [f"{number}: next step: {what}" for what in told]
    assert wrong == []


def precision(flags: dict[str, Any]) -> tuple[bool, bool, tuple[str, ...]]:
    return flags.get("bf16", False), flags.get("fp16", False), flags.get("keep_fp32", ())


def without_weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a step that are no weights: moments, averages, and the state that is fp32 in every run."""
    weights = {*main_weights(state), *(key for key in state if key.startswith("optimizer.state.param."))}
    return {key: value for key, value in state.items() if key not in weights}


def wrong_dtypes(state: dict[str, torch.Tensor], flags: dict[str, Any]) -> list[str]:
    """Weights of another dtype than the flags say, or that are not their main weights, rounded once."""
    bf16, fp16, keep = precision(flags)
    half = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    kept = [KEYS_OF.get(name, f"{name}.*") for name in keep]
    weights = {
        key: main.to(torch.float32 if any(fnmatch(key, pattern) for pattern in kept) else half)
        for key, main in main_weights(state).items()
    }
    return [f"weight {key}" for key in differing(weights, {key: state[key] for key in weights})]


def test_a_run_in_pieces_is_the_run_in_one(gloo, tmp_path):
    flags = {
        **cases.layout(ep=2),
        **cases.MODES["bf16, distributed"],
        "data_path": (cases.corpus(tmp_path, documents=2),),  # less than the run takes: it is repeated
        "keep_fp32": KEPT,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,  # draws from the model-parallel streams
        "rampup_batch_size": (4, 2, 8),
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 2,
    }
    assert cases.incarnations(gloo, tmp_path, 2, flags, [1, 2, 1]) == []
    # what would change which samples those steps had seen is refused
    changed = {"seed": 5, "train_iters": 5, "load": f"{tmp_path}/pieces"}
    for message in gloo.run(2, cases.refusal, flags={**flags, **changed}):
        assert "was trained on another order of samples" in message
        assert "--seed: checkpoint 1234, this run 5" in message
