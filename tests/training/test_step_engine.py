"""One list of Megatron-LM's arguments trains megatron-core's own GPTModel and ours to the same losses."""

import re
import shlex
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.engine

STEPS, BATCH, SEQUENCE, VOCABULARY = 6, 4, 24, 200

# No rows of padding: there the two differ on purpose (docs/start/from_megatron.md).
_SHARED = f"""--make-vocab-size-divisible-by 8
--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --vocab-size {VOCABULARY} --num-layers 2 --hidden-size 32
--num-attention-heads 4 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2
--global-batch-size {BATCH} --train-iters {STEPS} --moe-grouped-gemm --moe-router-dtype fp32
"""
LISTS = {
    "mixtral": f"""{_SHARED}
--ffn-hidden-size 48 --group-query-attention --num-query-groups 2 --rotary-base 1000000 --init-method-std 0.01
--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--moe-token-dispatcher-type alltoall --lr 1e-3 --lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 3
--lr-decay-iters 16 --weight-decay 0.1 --clip-grad 1.0
""",
    # Without its auxiliary loss, for which the engine chooses other experts than it sends tokens to (defect E11).
    "deepseek-v3": f"""{_SHARED}
--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4
--v-head-dim 10 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --norm-epsilon 1e-6
--num-experts 8 --moe-layer-freq ([0]*1+[1]*1) --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16
--moe-router-topk 2 --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0
--lr 2e-3 --lr-decay-style cosine --min-lr 2e-4 --adam-beta2 0.95 --weight-decay 0.1
""",
    # What is left open has Megatron-LM's default: the width of the dense layer, the epsilon, the linear decay.
    "open": f"""{_SHARED} --num-experts 4 --moe-layer-freq ([1]*1+[0]*1) --moe-ffn-hidden-size 16 --lr 2e-3
--moe-router-pre-softmax --moe-z-loss-coeff 1e-3 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-3
""",
}


def both(words: list[str]) -> dict[str, Any]:
    """Build and train both models on one rank, from the engine's first weights."""
    from megatron_moe.config import rules
    from megatron_moe.model.build import build_model
    from megatron_moe.optim.optimizer import build_optimizer, build_scheduler
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.groups import seed_everything
    from megatron_moe.training.step import connect, train_step
    from megatron_moe_tools import compat
    from tests.numbers.reference_megatron import EngineTrainer

    run = compat.parse([*words, "--mock-data", "--defaults", "megatron"])
    rules.check(run, 1)
    pg = groups.initialize(run)
    seed_everything(run)
    engine = EngineTrainer(words, pg)
    model = build_model(run, pg, VOCABULARY)
    theirs, ours = engine.model.module, model[0].module
    found: dict[str, Any] = {
        "parameters": [sum(p.numel() for p in one.parameters()) for one in (theirs, ours)],
        "deviations": [deviations(named_weights(one)) for one in (theirs, ours)],
    }
    given, taken = named_weights(theirs), named_weights(ours)
    assert given.keys() == taken.keys()
    with torch.no_grad():
        for name, weight in taken.items():
            weight.copy_(given[name])
    optimizer = build_optimizer(run, model, pg)
    scheduler = build_scheduler(run, optimizer)
    connect(model, optimizer)
    found["settings"] = [optimizer_settings(engine.model, engine.optimizer), optimizer_settings(model[0], optimizer)]
    found["steps"] = []
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
        size = run.training.micro_batch_size
        alike = {"loss_mask": torch.ones(size, SEQUENCE), "position_ids": torch.arange(SEQUENCE).expand(size, SEQUENCE)}
        micro_batches = [
            {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous(), **alike}
            for rows in tokens.split(size)
        ]
        sizes = {"num_micro_batches": len(micro_batches), "micro_batch_size": size, "seq_length": SEQUENCE}
        result = train_step(model, optimizer, scheduler, [iter(micro_batches)], **sizes, pg_collection=pg)
        found["steps"].append((engine.step(tokens), (result.loss, result.grad_norm, result.learning_rate)))
    found["biases"] = [
        [buffer.tolist() for name, buffer in one.named_buffers() if name.endswith("expert_bias")]
        for one in (theirs, ours)
    ]
    return found


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return every weight under the engine's name; of experts one entry each."""
    weights = dict(model.named_parameters())
    for name in [name for name in weights if name.endswith(("experts.weight1", "experts.weight2"))]:
        for index, expert in enumerate(weights.pop(name)):
            weights[f"{name[:-7]}local_experts.{index}.linear_fc{name[-1]}.weight"] = expert.flatten(0, -2)
    return weights


def deviations(weights: dict[str, Tensor]) -> dict[str, tuple[float, float, int]]:
    """Return class of weights -> mean, standard deviation, number; layers and experts are one class."""
    classes: dict[str, list[Tensor]] = {}
    for name, weight in weights.items():
        classes.setdefault(re.sub(r"\d+", "N", name), []).append(weight.detach().flatten())
    joined = {name: torch.cat(parts).double() for name, parts in classes.items()}
    return {name: (float(w.mean()), float(w.std(correction=0)), w.numel()) for name, w in joined.items()}


def optimizer_settings(model: Any, optimizer: Any) -> dict[str, tuple[float, ...]]:
    """Return weight -> its group's settings of Adam."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = re.sub(r"\.local_experts\.\d+\.linear_fc|\.weight(?=[12]$)", ".", names[id(parameter)])
            decay = group["weight_decay"] * group["wd_mult"]
            own = (*group["betas"], group["eps"], decay, group["max_lr"], group["min_lr"])
            found[name.removesuffix(".weight")] = own
    return found


@pytest.mark.parametrize("model", LISTS)
def test_both_have_the_same_weights_settings_losses_and_biases(gloo: Any, model: str) -> None:
    (found,) = gloo.run(1, both, words=shlex.split(LISTS[model]))
    for alike in ("parameters", "settings"):
        theirs, ours = found[alike]
        assert theirs == ours
    require_same_spread(*found["deviations"])
    theirs, ours = (list(zip(*steps)) for steps in zip(*found["steps"]))
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5, rel=0), "losses"
    assert ours[1] == pytest.approx(theirs[1], rel=1e-3), "gradient norms"
    assert ours[2] == pytest.approx(theirs[2]), "rates"
    theirs, ours = found["biases"]
    assert ours == [pytest.approx(bias, abs=1e-7) for bias in theirs]


def require_same_spread(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """The first weights of each class have the same mean and deviation."""
    assert theirs.keys() == ours.keys()
    for name, (mean, deviation, number) in theirs.items():
        if deviation == 0:
            assert ours[name][:2] == (mean, 0), name
            continue
        # The ratio of two estimates of one deviation has a deviation of 1 / sqrt(number).
        assert abs(ours[name][1] / deviation - 1) < 5 / number**0.5, name
        assert abs(ours[name][0] - mean) < 7 * deviation / number**0.5, name
