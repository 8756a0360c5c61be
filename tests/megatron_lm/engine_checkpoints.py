"""Checkpoints as Megatron-LM composes them, written and read by the installed engine on the rank of a case."""

import argparse
import itertools
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY, SEQUENCE, STEPS, BATCH = 200, 16, 2, 4
_SHARED = f"""--make-vocab-size-divisible-by 8 --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}
--vocab-size {VOCABULARY} --num-layers 2 --hidden-size 32 --num-attention-heads 4 --position-embedding-type rope
--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --micro-batch-size 2 --global-batch-size {BATCH} --train-iters 8 --moe-router-dtype fp32
--norm-epsilon 1e-6 --lr 1e-3 --lr-decay-style constant --weight-decay 0.1
"""
LISTS = {
    "mixtral": f"""{_SHARED}
--ffn-hidden-size 48 --group-query-attention --num-query-groups 2 --num-experts 4 --moe-router-topk 2
""",
    "deepseek": f"""{_SHARED}
--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4
--v-head-dim 10 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --ffn-hidden-size 64
--num-experts 8 --moe-layer-freq ([0]*1+[1]*1) --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16
--moe-router-topk 2 --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss
""",
}
"""Grouped-query attention, whose layers the engine stores in one tensor; latent attention, with layers one by one."""
TOKENS = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(7))


def batch(step: int) -> Tensor:
    """Return the tokens of a step, [global batch, S + 1]."""
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))


def engine_of(name: str, *, distributed: bool = False, expert_ranks: int = 1) -> Any:
    """Return the engine's model, optimizer and schedule, with norms and expert biases that are far from their first."""
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.groups import seed_everything
    from megatron_moe_tools import compat
    from tests.numbers.reference_megatron import EngineTrainer

    words = [*shlex.split(LISTS[name]), "--expert-model-parallel-size", str(expert_ranks)]
    run = compat.parse([*words, "--mock-data", "--defaults", "megatron"])
    pg_collection = groups.initialize(run)
    seed_everything(run)
    engine = EngineTrainer(words, pg_collection, distributed=distributed)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, value in engine.model.module.state_dict().items():
            if value is not None and (key.endswith("norm.weight") or key.endswith("expert_bias")):
                value.add_(0.2 * torch.randn(value.shape, generator=generator))
    return engine


def logits_of(model: torch.nn.Module) -> Tensor:
    """Return what the engine's model computes for TOKENS, [B, S, V] of the real vocabulary."""
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    model.eval()
    with torch.no_grad():
        found = model(TOKENS, torch.arange(SEQUENCE).expand_as(TOKENS), future)
    model.train()
    return found[..., :VOCABULARY]


def written(name: str, folder: str) -> dict[str, Any]:
    """Train the engine's model, save it as `torch_dist` with its optimizer, and say what it computes before and after.

    The state of the model, which is all of one rank's, is what `legacy` cuts.
    """
    engine = engine_of(name)
    steps = [engine.step(batch(step)) for step in range(STEPS)]
    model = engine.model.module
    chained = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    states = chained[0].optimizer.state
    found = {
        "args": engine.args,
        "logits": logits_of(model),
        "state": {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, Tensor)},
        "exp_avg": {
            key: states[weight]["exp_avg"].clone() for key, weight in model.named_parameters() if weight in states
        },
    }
    _save(engine, Path(folder))
    return {**found, "steps": steps + [engine.step(batch(step)) for step in (STEPS, STEPS + 1)]}


def _save(engine: Any, root: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.transformer.enums import AttnBackend

    step = root / f"iter_{STEPS:07d}"
    step.mkdir(parents=True)
    # What Megatron-LM adds to the arguments before it saves, an enumeration among it.
    layout = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    added = {"consumed_train_samples": STEPS * BATCH, "attention_backend": AttnBackend.auto, "window_size": None}
    args = {**vars(engine.args), **added, **dict.fromkeys(layout, 1), "apply_layernorm_1p": False}
    state = {
        "args": argparse.Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": STEPS,
        "model": engine.model.module.sharded_state_dict(),
        "rng_state": ShardedObject("rng_state", [{"torch": torch.get_rng_state()}], (1, 1), (0, 0)),
        "opt_param_scheduler": engine.scheduler.state_dict(),
    }
    state["optimizer"] = engine.optimizer.sharded_state_dict(state["model"])
    dist_checkpointing.save(state, str(step))
    (root / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


def _load(engine: Any, folder: str, *, optimizer: bool) -> dict[str, Any]:
    """Load a step into another model of the engine, strictly, as Megatron-LM does; return its plain values."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    model = engine.model.module
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    common: dict[str, Any] = dist_checkpointing.load_common_state_dict(folder)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    if optimizer:
        state["optimizer"] = engine.optimizer.sharded_state_dict(state["model"], is_loading=True, metadata=metadata)
    found = dist_checkpointing.load(state, folder, strict=StrictHandling.ASSUME_OK_UNEXPECTED)
    model.load_state_dict(found["model"])
    if optimizer:
        engine.optimizer.load_state_dict(found["optimizer"])
    return common


def loaded(name: str, folder: str) -> Tensor:
    """What the engine's model computes after a step was loaded into it."""
    engine = engine_of(name)
    common = _load(engine, folder, optimizer=False)
    assert common["args"].num_layers == 2 and common["checkpoint_version"] == 3.0
    return logits_of(engine.model.module)


def went_on(name: str, folder: str, expert_ranks: int) -> list[tuple[float, float, float]]:
    """Load a step with its optimizer into the engine's distributed one, and train two steps.

    The second tells what the first one's update was. The global batch is spread over the ranks of the case, and so are
    the experts.
    """
    import torch.distributed as dist

    engine = engine_of(name, distributed=True, expert_ranks=expert_ranks)
    common = _load(engine, folder, optimizer=True)
    assert (common["iteration"], common["args"].consumed_train_samples) == (STEPS, STEPS * BATCH)
    schedule = engine.scheduler
    schedule.use_checkpoint_opt_param_scheduler, schedule.override_opt_param_scheduler = False, True
    schedule.load_state_dict(common["opt_param_scheduler"])
    assert schedule.num_steps == STEPS * BATCH
    steps = []
    for number in (STEPS, STEPS + 1):
        loss, norm, rate = engine.step(batch(number).chunk(expert_ranks)[dist.get_rank()])
        mean = torch.tensor(loss)
        dist.all_reduce(mean)
        steps.append((float(mean) / expert_ranks, norm, rate))
    return steps


def continued(name: str, folder: str, save: str) -> None:
    """Go on from a native step with its optimizer, by one step of ours."""
    from megatron_moe.training.run import pretrain
    from megatron_moe_tools import compat

    words = shlex.split(LISTS[name].replace("--train-iters 8", f"--train-iters {STEPS + 1}"))
    words += ["--mock-data", "--defaults", "megatron", "--eval-iters", "0", "--load", folder, "--save", save]
    pretrain(compat.parse(words))


# ---- The format `torch`: the state of one rank, cut as several ranks would have it.


def legacy(
    root: Path, state: dict[str, Tensor], args: argparse.Namespace, *, tp: int = 1, pp: int = 1, ep: int = 1,
    experts: str = "sequential", names: dict[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write the files of all ranks of a layout; experts with a name each, or in one matrix (`grouped`, `weights`)."""
    layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    for t, p, e in itertools.product(range(tp), range(pp), range(ep)):
        place = {"rank": t + tp * (e + ep * p), "world_size": tp * ep * pp}
        args = argparse.Namespace(**{**vars(args), **layout, **place})
        parts: dict[str, Tensor] = {}
        for key, value in state.items():
            parts |= _of_rank(key, value, (t, tp), (p, pp), (e, ep), args.num_layers, args.num_experts)
        parts = {(names or {}).get(key, key): value for key, value in _packed(parts, experts).items()}
        name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        folder = root / "iter_0000005" / name
        folder.mkdir(parents=True)
        content = {"args": args, "checkpoint_version": 3.0, "iteration": 5, "model": parts}
        torch.save(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return root


_BY_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_q_up_proj.weight",
            "linear_kv_up_proj.weight", "linear_q_down_proj.weight", "linear_kv_down_proj.weight")  # fmt: skip


def _of_rank(
    key: str, value: Tensor, tensor: tuple[int, int], stage: tuple[int, int], expert: tuple[int, int], layers: int,
    num_experts: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Return a rank's part of a tensor under its name in that rank's file, or nothing."""
    words = key.split(".")
    per_stage = layers // stage[1]
    if "layers" in words:
        number = int(words[2])
        if number // per_stage != stage[0]:
            return {}
        words[2] = str(number % per_stage)
    elif stage[0] != (0 if words[0] == "embedding" else stage[1] - 1):
        return {}
    if "local_experts" in words:
        per_rank = num_experts // expert[1]
        number = int(words[6])
        if number // per_rank != expert[0]:
            return {}
        words[6] = str(number % per_rank)
    return {".".join(words): _cut(key, value, *tensor).clone()}


def _cut(key: str, value: Tensor, rank: int, size: int) -> Tensor:
    if key.endswith("linear_fc1.weight"):  # gate and up, each cut by itself
        return torch.cat([half.chunk(size)[rank] for half in value.chunk(2)])
    if key.endswith(_BY_ROWS):
        return value.chunk(size)[rank]
    if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return value.chunk(size, 1)[rank]
    return value


def _packed(parts: dict[str, Tensor], experts: str) -> dict[str, Tensor]:
    if experts == "sequential":
        return parts
    result: dict[str, Tensor] = {}
    matrices: dict[str, list[Tensor]] = {}
    for key, value in parts.items():
        prefix, found, rest = key.partition("local_experts.")
        number, product = rest.split(".")[:2] if found else ("", "")
        if not found:
            result[key] = value
        elif experts == "grouped":  # Transformer Engine's
            result[f"{prefix}{product}.weight{number}"] = value
        else:
            matrices.setdefault(f"{prefix}weight{product[-1]}", []).append(value.t())
    # One matrix of all experts: [hidden, e x out] for the first product, [e x in, hidden] for the second.
    for key, values in matrices.items():
        stacked = torch.stack(values)
        result[key] = stacked.reshape(stacked.shape[1], -1) if key.endswith("1") else stacked.flatten(0, 1)
    return result
