"""QK-clip: measured logits against whole score matrices, clipped weights against the formula, on every layout."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, LAYOUTS, SMALL, TINY, TP2, Saved, Trainer, whole
from tests.optim.layout_cases import FEW, require_close

# Flags of the tiny preset, which has latent attention, are taken back.
GROUPED: dict[str, Any] = {"multi_latent_attention": False, "qk_layernorm": False}
GROUPED |= dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_router_num_groups", "moe_router_group_topk"))
GROUPED |= {**PRESETS["tiny-gqa"], "moe_router_group_score": "top2", "moe_layer_freq": 1}
MODELS: dict[str, dict[str, Any]] = {
    "latent": {},
    "latent, no query latent": {"q_lora_rank": None, "mtp_num_layers": 1},
    "grouped": GROUPED,
    "grouped, biased": {**GROUPED, "add_qkv_bias": True, "num_query_groups": 1},
}
# The first step's rate is 0, unless told otherwise: what changes in it is clipped.
FLAGS: dict[str, Any] = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", "lr": 1e-2, "lr_warmup_iters": 1}
FLAGS |= {**SMALL, **FEW, "seq_length": 32, "make_vocab_size_divisible_by": 50, "moe_router_bias_update_rate": 0.0}
CLIP = {"qk_clip": True, "qk_clip_threshold": 0.02}
# Layout and model.
CUT = [
    *[(layout, "latent") for layout in ("DP2", "DP2, ZeRO 2", "EP2, distributed optimizer", "TP2")],
    *[(layout, "latent") for layout in ("DP2, ZeRO 3", "CP2", "PP2")],
    *[("DP2, distributed optimizer", "grouped, biased"), ("TP2", "grouped, biased")],
    ("recomputed", "grouped, biased"),
]
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def trainer_of(flags: dict[str, Any], model: str) -> Any:
    """A model of `MODELS`, with biases that are not zero."""
    from megatron_moe.model.fully_sharded import local
    from megatron_moe.optim.optimizer import named_main_params, owned_part

    trainer = Trainer({**MODELS[model], **FLAGS, **flags})
    tp, mains = trainer.groups.tp, dict(named_main_params(trainer.model, trainer.optimizer))
    for name, parameter in trainer.model[0].named_parameters():
        if name.endswith("linear_qkv.bias"):
            bias = torch.linspace(-0.3, 0.3, parameter.numel() * tp.size()).chunk(tp.size())[tp.rank()].contiguous()
            part = owned_part(trainer.optimizer, parameter).of(bias)
            if parameter in mains:
                mains[parameter].data.copy_(part)
            local(parameter).data.copy_(bias if local(parameter).shape == bias.shape else part)
    return trainer


def first_batch_again(trainer: Any) -> None:
    from megatron_moe.data.batches import batch_iterators

    trainer.batches = batch_iterators(trainer.dataset, trainer.run, pg_collection=trainer.groups)


def step_logits(trainer: Any) -> torch.Tensor:
    """What was measured of each head in the last step, [L, n] over all ranks."""
    from megatron_moe.optim.qk_clip import largest_attention_logits

    logits = largest_attention_logits(trainer.model, trainer.groups)
    assert logits is not None
    return logits


def weights(trainer: Any) -> Saved:
    """What this rank has of the model's weights."""
    return {key: pieces for key, pieces in trainer.tensors().items() if not key.startswith("optimizer.")}


def score_matrices(module: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The largest entry of each head's whole causal score matrix, [n], in fp64."""
    query, key = query.detach().double(), key.detach().double()
    key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
    scale = query.shape[-1] ** -0.5 if module.scale is None else module.scale
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).amax((0, 2, 3))


def measured_and_wanted(model: str) -> dict[str, Any]:
    """A step's logits, those of its score matrices, and what the step says of them."""
    from megatron_moe.model.attention import measured_attentions

    trainer = trainer_of({"log_max_attention_logit": True}, model)
    wanted: dict[int, torch.Tensor] = {}

    def see(module: Any, inputs: Any) -> None:
        found = score_matrices(module, *inputs[:2])
        wanted[module.layer_number] = found.maximum(wanted.get(module.layer_number, found))

    for attention in measured_attentions(trainer.model):
        attention.register_forward_pre_hook(see)
    result = trainer.step()
    assert sorted(wanted) == list(range(1, len(wanted) + 1))
    assert (result.max_attention_logit, result.clipped_heads) == (float(step_logits(trainer).max()), None)
    logits = torch.stack([wanted[number] for number in sorted(wanted)])
    return {"measured": step_logits(trainer), "wanted": logits, "weights": weights(trainer)}


def after_a_step(flags: dict[str, Any], model: str) -> dict[str, Any]:
    """The state after a step, and what is measured of the same batch in it and in the next one."""
    trainer = trainer_of(flags, model)
    found: dict[str, Any] = {"clipped": trainer.step().clipped_heads, "logits": step_logits(trainer)}
    found |= {"weights": weights(trainer), "moments": trainer.state()["moments"]}
    first_batch_again(trainer)
    trainer.step()
    return {**found, "next": step_logits(trainer)}


def clipped_by_the_formula(run: Any, name: str, weight: torch.Tensor, eta: torch.Tensor, alpha: float) -> torch.Tensor:
    """A weight after QK-clip, by the paper's words; `eta` is that of each head, in fp64."""
    parts = weight.double().unflatten(0, (len(eta), -1)).clone()
    kept, sizes = name.split(".")[-2], run.model
    for head, factor in enumerate(eta):
        if kept in ("linear_q_proj", "linear_q_up_proj"):
            parts[head, : sizes.qk_head_dim] *= factor**alpha
            parts[head, sizes.qk_head_dim :] *= factor
        elif kept == "linear_kv_up_proj":
            parts[head, : sizes.qk_head_dim] *= factor ** (1 - alpha)
        elif kept == "linear_qkv":
            width = run.derived.head_size
            parts[head, : -2 * width] *= factor**alpha
            parts[head, -2 * width : -width] *= factor ** (1 - alpha)
    return parts.flatten(0, 1)


@pytest.mark.parametrize(("model", "alpha"), list(zip(MODELS, [0.5, 0.2, 0.2, 0.5])))
def test_clipped_weights_have_logits_at_the_threshold_and_are_those_of_the_formula(gloo, model, alpha):
    (measurement,) = gloo.run(1, measured_and_wanted, model=model)
    measured = measurement["measured"]
    torch.testing.assert_close(measured.double(), measurement["wanted"], rtol=1e-5, atol=1e-7)
    threshold, before = float(measured[0].median()), measured.double()  # half of the first layer's heads exceed it
    clip = {"qk_clip": True, "qk_clip_threshold": threshold, "qk_clip_alpha": alpha}
    (found,) = gloo.run(1, after_a_step, flags=clip, model=model)
    run = build({**TINY, **MODELS[model], **FLAGS, "qk_clip_alpha": alpha})
    groups = before.shape[1] if run.model.multi_latent_attention else run.model.num_query_groups
    eta = (threshold / before.unflatten(1, (groups, -1)).amax(2)).clamp(max=1.0)
    of_heads = eta.repeat_interleave(before.shape[1] // groups, 1)
    # The inputs of the first layer are the same; those of later ones follow from it.
    torch.testing.assert_close(found["next"][0].double(), (of_heads * before)[0], rtol=1e-5, atol=0)
    assert float(found["next"][0].max()) == pytest.approx(threshold, rel=1e-5)
    assert found["clipped"] == int((before > threshold).sum()) > 0
    changed = compare_clipped(run, eta, [measurement["weights"]], [found["weights"]])
    assert changed == (2 if run.model.multi_latent_attention else 1)


def compare_clipped(run: Run, eta: torch.Tensor, before: list[Saved], after: list[Saved], rtol: float = 1e-6) -> int:
    """Compare all ranks' weights with those before QK-clip; return how many kinds of them it has changed."""
    plain, clipped = (whole([([], saved) for saved in ranks]) for ranks in (before, after))
    changed = set()
    for name, weight in plain.items():
        wanted, kind = weight, name.split(".")[-2]
        if kind in ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_qkv"):
            layer = run.model.num_layers if name.startswith("mtp.") else int(name.split(".")[2])
            wanted = clipped_by_the_formula(run, name, weight, eta[layer], run.optimizer.qk_clip_alpha).to(weight.dtype)
            changed |= set() if torch.equal(wanted, weight) else {kind}
        torch.testing.assert_close(clipped[name], wanted, rtol=rtol, atol=0, msg=name)
    return len(changed)


UPDATED = {
    "latent, DP2": ("latent", {"bf16": True, "lr_warmup_iters": 0, **DISTRIBUTED}),
    "grouped, TP2": ("grouped", {"bf16": True, "lr_warmup_iters": 0, **DISTRIBUTED, **TP2}),
}


@pytest.mark.parametrize("case", rows(UPDATED, test=["grouped, TP2"]))
def test_updated_weights_are_clipped_and_momenta_are_not(gloo: Any, case: str) -> None:
    model, flags = UPDATED[case]
    every = gloo.run(2, after_a_step, flags={**flags, "log_max_attention_logit": True}, model=model)
    plain, threshold = every[0], float(every[0]["logits"].median())
    clip = {**flags, "qk_clip": True, "qk_clip_threshold": threshold}
    others = gloo.run(2, after_a_step, flags=clip, model=model)
    run = build({**TINY, **MODELS[model], **FLAGS})
    groups = run.model.num_attention_heads if run.model.multi_latent_attention else run.model.num_query_groups
    eta = (threshold / plain["logits"].double().unflatten(1, (groups, -1)).amax(2)).clamp(max=1.0)
    before, after = ([found["weights"] for found in ranks_found] for ranks_found in (every, others))
    # The model's weights are rounded once, from clipped main weights.
    assert compare_clipped(run, eta, before, after, rtol=2**-7) > 0
    assert [found["moments"] for found in others] == [found["moments"] for found in every]


def trained(flags: dict[str, Any], model: str) -> tuple[list[Any], Saved]:
    """What three steps say, and the weights after them."""
    trainer = trainer_of({**CLIP, **flags}, model)
    said = []
    for _ in range(3):
        result = trainer.step()
        said.append((result.max_attention_logit, result.clipped_heads, result.loss, step_logits(trainer)))
    return said, weights(trainer)


@pytest.mark.parametrize(("layout", "model"), rows(CUT, test=CUT[4:9]))
def test_a_layout_clips_as_one_rank_does(gloo: Any, once: Any, layout: str, model: str) -> None:
    ranks, changes = (1, RECOMPUTED) if layout == "recomputed" else LAYOUTS[layout]
    groups = None if model == "latent" else 2
    one = once(1, trained, flags={"num_query_groups": groups}, model=model)
    many = gloo.run(ranks, trained, flags={**changes, "num_query_groups": groups}, model=model)
    for said, _ in many:
        for got, wanted in zip(said, one[0][0], strict=True):
            torch.testing.assert_close(got[3], wanted[3], rtol=1e-3, atol=1e-5)
            assert got[0] == pytest.approx(wanted[0], rel=1e-3) and wanted[1] > 0
            assert got[1] == wanted[1] and got[2] == pytest.approx(wanted[2], rel=1e-5)
    require_close(one, many)


def spoiled(flags: dict[str, Any]) -> dict[str, Any]:
    """What a step changes that the last rank spoils, with large logits, and the logits of the next one."""
    trainer = trainer_of(flags, "latent")
    hooks: list[Any] = []
    if dist.get_rank() == dist.get_world_size() - 1:
        core = trainer.model[0].module.decoder.layers[0].self_attention.core_attention
        hooks = [
            trainer.model[0].register_forward_hook(lambda _module, _inputs, losses: losses * float("nan")),
            core.register_forward_pre_hook(lambda _module, inputs: (1000 * inputs[0], *inputs[1:])),
        ]
    before = trainer.state()
    bad = trainer.step()
    after = trainer.state()
    for hook in hooks:
        hook.remove()
    first_batch_again(trainer)
    good = trainer.step()
    return {
        "steps": [(step.committed, step.max_attention_logit, step.clipped_heads) for step in (bad, good)],
        "changed": [name for name in before if before[name] != after[name]],
        "next": step_logits(trainer),
    }


def test_a_step_that_is_not_applied_clips_nothing_and_is_forgotten(gloo: Any) -> None:
    flags = {**CLIP, **DISTRIBUTED}
    wanted = gloo.run(2, after_a_step, flags=flags, model="latent")[0]["logits"]
    for found in gloo.run(2, spoiled, flags=flags):
        (bad, largest, none), (good, logit, clipped) = found["steps"]
        assert (bad, none, good) == (False, None, True) and largest > 100 * logit and clipped > 0
        assert found["changed"] == []
        torch.testing.assert_close(found["next"], wanted, rtol=0, atol=0)
