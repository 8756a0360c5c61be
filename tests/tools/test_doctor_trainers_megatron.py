"""The doctor's target megatron-core: the engine's own parts, sound layouts, its known defects and planted errors."""

import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as state
from megatron.core import tensor_parallel
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import optimizer
from megatron.core.transformer.moe import router, token_dispatcher
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe.engine.defects import engine_version, known_defects
from megatron_moe.engine.patching import replaced
from megatron_moe_tools.doctor.trainers import checks, rank
from megatron_moe_tools.doctor.trainers import megatron_core_target as target
from megatron_moe_tools.doctor.trainers.megatron_core_target import MegatronTrainer
from megatron_moe_tools.doctor.trainers.samples import Case, Sizes
from megatron_moe_tools.launch.local_ranks import RankFailure
from tests.helpers.gloo_pool import CaseFailed, GlooPool
from tests.helpers.rows import rows

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --swiglu"
    " --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length 64"
    " --max-position-embeddings 64 --micro-batch-size 1 --lr 1e-3 --untie-embeddings-and-output-weights"
)

finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]  # the package's name for it is the function

pytestmark = pytest.mark.engine


def trainer_of(flags: str) -> MegatronTrainer:
    words = f"{MODEL} {flags}".split()
    for mark, flag in (("TIED", "--untie-embeddings-and-output-weights"), ("DENSE", "--num-experts 8")):
        if mark in words:
            words = " ".join(word for word in words if word != mark).replace(f" {flag}", "").split()
    return target.trainer_of(words)


def record(flags: str, case: Case, plant: str, folder: str) -> dict[str, Any]:
    """Run a case on this rank, with an error planted in the engine."""
    request = rank.TrainerRequest("megatron-core", "", case, Sizes(), folder)
    with PLANTED[plant].plant() if plant else nullcontext():
        return rank.run(request, trainer_of(flags))


class ForkedRuns(checks.Runs):
    """Cases that a function runs on forked ranks."""

    def __init__(self, run: Callable[[Case], list[dict[str, Any]]]) -> None:
        self._run, self._records = run, {}

    def records(self, case: Case) -> list[dict[str, Any]]:
        if case not in self._records:
            self._records[case] = self._run(case)
        return self._records[case]


def findings(
    gloo: GlooPool, flags: str, ranks: int, plant: str = "", only: str = "", folder: str = ""
) -> list[checks.TrainerFinding]:
    """Return what the checks find; `only` names one of them."""

    def run(case: Case) -> list[dict[str, Any]]:
        began = time.monotonic()
        try:
            return gloo.run_within(100, case.ranks, record, flags=flags, case=case, plant=plant, folder=folder)
        except CaseFailed as error:
            raise RankFailure(str(error)) from error
        finally:
            print(f"{case}: {time.monotonic() - began:.1f} s")

    trainer, runs = trainer_of(flags), ForkedRuns(run)
    found = []
    for check in checks.checks_for(ranks, trainer.loss):
        missing = [name for name in check.needs if not getattr(trainer, name, None)]
        if check.name not in trainer.leaves_out and not missing and only in ("", check.name):
            found.append(checks.find(check, runs))
    if only in ("", "expert-bias"):
        found.append(checks.untrained(Case(), runs))
        if (of_bias := checks.bias_rule(Case(ranks=ranks), runs)) is not None:
            found.append(of_bias)
    return found


def wrong(found: list[checks.TrainerFinding]) -> dict[str, list[str]]:
    """Return the checks that found something: the first difference, then the causes."""
    return {one.check: [one.error or one.first, *one.causes] for one in found if not one.good}


# ---- Errors that are planted in the engine, a few lines each.


@dataclass(frozen=True)
class Planted:
    """An error: how it is planted. `flags` and `ranks` meet it, `check` finds it, and
    `cause` is a part of what has to be named."""

    plant: Callable[[], AbstractContextManager]
    flags: str
    cause: str
    check: str = "layout"
    ranks: int = 2


def around(owner: Any, name: str, new: Callable[..., Any]) -> AbstractContextManager:
    """Call new(old, ...) in place of a function of the engine's."""
    old = vars(owner)[name]
    is_static = isinstance(old, staticmethod)
    called = partial(new, old.__func__ if is_static else old)
    return replaced([owner], **{name: staticmethod(called) if is_static else lambda *a, **k: called(*a, **k)})


def after_reduction(change: Callable[[str, Any], None]) -> AbstractContextManager:
    """Change gradients, by name and weight, after the engine has reduced them."""

    def new(old: Any, model: Any, *rest: Any, **options: Any) -> None:
        old(model, *rest, **options)
        for name, weight in model[0].named_parameters():
            change(name, weight)

    return around(target, "finalize_model_grads", new)


def before_reduction(change: Callable[[str, Any], None]) -> AbstractContextManager:
    """Change weights' marks or gradients before the engine reduces them."""

    def new(old: Any, model: Any, *rest: Any, **options: Any) -> None:
        for name, weight in model[0].named_parameters():
            change(name, weight)
        old(model, *rest, **options)

    return around(target, "finalize_model_grads", new)


def scaled(weights: str, factor: Callable[[], float]) -> Callable[[], AbstractContextManager]:
    """Scale gradients whose names match."""

    def change(name: str, weight: Any) -> None:
        if re.search(weights, name):
            weight.main_grad.mul_(factor())

    return lambda: after_reduction(change)


def unmarked(weights: str) -> Callable[[], AbstractContextManager]:
    """Take the sequence_parallel mark off weights whose names match."""

    def change(name: str, weight: Any) -> None:
        if re.search(weights, name):
            weight.sequence_parallel = False

    return lambda: before_reduction(change)


def experts_not_reduced() -> AbstractContextManager:
    def new(old: Any, model: Any, *rest: Any, **options: Any) -> None:
        with replaced(model, expert_parallel_bucket_groups=[]):
            old(model, *rest, **options)

    return around(target, "finalize_model_grads", new)


def mean_of_ranks_means() -> AbstractContextManager:
    def new(old: Any, model: Any, num_tokens: Any, *rest: Any, **options: Any) -> None:
        model[0].scale_gradients(1 / (num_tokens.item() * state.get_data_parallel_world_size()))
        old(model, None, *rest, **options)

    return around(target, "finalize_model_grads", new)


def counts_not_reduced() -> AbstractContextManager:
    def new(_: Any, counts: Tensor, bias: Tensor, rate: float, *__: Any, **___: Any) -> Tensor:
        return bias + torch.sign(counts.mean(-1, keepdim=True) - counts) * rate

    return around(finalize, "get_updated_expert_bias", new)


def bias_the_other_way() -> AbstractContextManager:
    def new(old: Any, counts: Tensor, bias: Tensor, rate: float, *rest: Any, **options: Any) -> Tensor:
        return old(counts, bias, -rate, *rest, **options)

    return around(finalize, "get_updated_expert_bias", new)


def bias_in_bf16() -> AbstractContextManager:
    return around(finalize, "get_updated_expert_bias", lambda old, *a, **k: old(*a, **k).bfloat16().float())


def bias_never_updated() -> AbstractContextManager:
    return around(finalize, "get_updated_expert_bias", lambda old, counts, bias, *a, **k: bias)


def tied_gradients_not_summed() -> AbstractContextManager:
    return around(finalize, "_allreduce_word_embedding_grads", lambda old, *a, **k: None)


def local_norm() -> AbstractContextManager:
    def new(_: Any, gradients: list[Tensor], *__: Any, **___: Any) -> float:
        return float(torch.stack([one.norm() for one in gradients]).norm())

    return around(optimizer, "get_grad_norm_fp32", new)


def norm_counts_copies() -> AbstractContextManager:
    return around(tensor_parallel, "param_is_not_tensor_parallel_duplicate", lambda old, *a, **k: True)


def stale_weights() -> AbstractContextManager:
    return around(param_and_grad_buffer._ParamAndGradBucketGroup, "start_param_sync", lambda old, *a, **k: None)


def shared_expert_added_by_each_rank() -> AbstractContextManager:
    return around(SharedExpertMLP, "forward", lambda old, *a: old(*a) * state.get_tensor_model_parallel_world_size())


def aux_loss_summed_over_data_ranks() -> AbstractContextManager:
    def new(old: Any, scale: Any) -> None:
        old(scale * state.get_data_parallel_world_size())

    return around(MoEAuxLossAutoScaler, "set_loss_scale", new)


def load_of_one_rank_in_the_aux_loss() -> AbstractContextManager:
    def new(old: Any, **options: Any) -> Any:
        _counts, local, total = old(**options)
        return options["routing_map"].sum(0) * options["reduce_group"].size(), local, total

    return around(router, "get_tokens_per_expert_and_token_count", new)


def experts_start_alike_on_all_ranks() -> AbstractContextManager:
    def new(old: Any, name: str, *rest: Any) -> Tensor:
        local = 8 // state.get_expert_model_parallel_world_size()
        return old(re.sub(r"experts\.(\d+)", lambda found: f"experts.{int(found[1]) % local}", name), *rest)

    return around(target, "_drawn", new)


def learning_rate_times_ranks() -> AbstractContextManager:
    def new(old: Any, **options: Any) -> Any:
        return old(**{**options, "lr": options["lr"] * torch.distributed.get_world_size()})

    return replaced([target], OptimizerConfig=partial(new, target.OptimizerConfig))


def another_choice_on_one_rank() -> AbstractContextManager:
    def new(old: Any, *given: Any) -> Tensor:
        logits = old(*given)
        return logits + torch.nn.functional.one_hot(torch.tensor(0), 8) * (torch.distributed.get_rank() > 0)

    return around(router.Router, "gating", new)


def tokens_lost_on_the_way_back() -> AbstractContextManager:
    def new(old: Any, given: Tensor, *rest: Any, **options: Any) -> Tensor:
        found = old(given, *rest, **options)
        kept = torch.ones(len(found), 1)
        kept[0] = torch.distributed.get_world_size() == 1
        return found * kept

    return around(token_dispatcher, "unpermute", new)


def a_recomputed_layer_sees_other_inputs() -> AbstractContextManager:
    def new(old: Any, function: Any, *rest: Any) -> Any:
        def noisy(hidden: Tensor, *given: Any) -> Any:
            return function(hidden * (1.01 if torch.is_grad_enabled() else 1.0), *given)

        return old(noisy, *rest)

    return around(tensor_parallel, "checkpoint", new)


def losses_left_out() -> AbstractContextManager:
    def new(old: Any, mask: Tensor, losses: Tensor) -> Any:
        total, tokens, logged = old(mask, losses)
        kept = state.get_pipeline_model_parallel_world_size() == 1 or int(losses[0, 0] * 1000) % 2
        return total * kept, tokens, logged

    return around(target, "_loss", new)


def mean_of_micro_batches() -> AbstractContextManager:
    def new(old: Any, mask: Tensor, losses: Tensor) -> Any:
        total, tokens, logged = old(mask, losses)
        return total / tokens, torch.ones_like(tokens), logged

    return around(target, "_loss", new)


def labels_not_shifted() -> AbstractContextManager:
    def new(old: Any, given: Tensor, pads: tuple[int, int], **options: Any) -> Tensor:
        shifted = old(given, pads, **options)
        return shifted.roll(1, 1) if pads == (0, 1) else shifted

    return around(torch.nn.functional, "pad", new)


def moments_not_loaded() -> AbstractContextManager:
    return around(optimizer.FP32Optimizer, "load_state_dict", lambda old, *a, **k: None)


def bias_not_loaded() -> AbstractContextManager:
    def new(old: Any, *given: Any, **options: Any) -> Any:
        found = old(*given, **options)
        for name, tensor in found["model"].items():
            if "expert_bias" in name:
                tensor.zero_()
        return found

    return around(target.dist_checkpointing, "load", new)


SP = "--tensor-model-parallel-size 2 --sequence-parallel"
EP = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
SHARED = "--moe-shared-expert-intermediate-size 64"
SEQUENCE = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01"
PER_TOKEN = "--calculate-per-token-loss"
CAPACITY = "--moe-expert-capacity-factor 1.0"
LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8"
    " --v-head-dim 16 --qk-layernorm"
)
DEPTH = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
PLANTED = {
    "experts x EP": Planted(
        scaled(r"\.experts\.", lambda: state.get_expert_model_parallel_world_size()),
        EP,
        "experts' gradients are summed",
    ),
    "experts / EP": Planted(
        scaled(r"\.experts\.", lambda: 1 / state.get_expert_model_parallel_world_size()),
        EP,
        "experts' gradients are av",
    ),
    "all but experts / EP": Planted(
        scaled(r"^((?!\.experts\.).)*$", lambda: 1 / state.get_expert_model_parallel_world_size()),
        EP,
        "weights that every rank holds are summed or averaged over the wrong group",
    ),
    "averaged twice": Planted(scaled("", lambda: 1 / state.get_data_parallel_world_size()), "", "the loss's scale"),
    "shared expert's gradient twice": Planted(
        scaled(r"\.shared_experts\.", lambda: state.get_tensor_model_parallel_world_size()),
        f"{SP} {SHARED}",
        "shared expert",
    ),
    "shared expert added twice": Planted(shared_expert_added_by_each_rank, f"{SP} {SHARED}", "forward pass differs"),
    "router not summed over TP": Planted(unmarked(r"\.router\."), SP, "it is not summed over the ranks"),
    "norms not summed over TP": Planted(unmarked("layernorm"), SP, "it is not summed over the ranks"),
    "experts not reduced": Planted(experts_not_reduced, EP, "it is not averaged over the ranks", ranks=4),
    "tied embeddings": Planted(
        tied_gradients_not_summed, "--pipeline-model-parallel-size 2 TIED", "it is not summed over the ranks"
    ),
    "mean of ranks' means": Planted(mean_of_ranks_means, PER_TOKEN, "means of ranks or micro-batches are averaged"),
    "mean of micro-batches": Planted(
        mean_of_micro_batches, PER_TOKEN, "accumulated micro-batches are weighed alike", "micro-batches"
    ),
    "a loss left out": Planted(losses_left_out, "--pipeline-model-parallel-size 2", "backward pass"),
    "counts not reduced": Planted(counts_not_reduced, BIAS, "the load is right, expert_bias is not"),
    "bias not reduced, by rule": Planted(counts_not_reduced, BIAS, "other counts than the batch's", "expert-bias"),
    "bias the other way": Planted(bias_the_other_way, BIAS, "it moves the other way", "expert-bias"),
    "bias in bf16": Planted(bias_in_bf16, BIAS, "it is rounded to bf16", "expert-bias"),
    "bias not updated": Planted(bias_never_updated, BIAS, "it did not move", "expert-bias"),
    "local norm": Planted(local_norm, SP, "gradients are right, their norm is not"),
    "norm counts copies": Planted(norm_counts_copies, SP, "gradients are right, their norm is not"),
    "stale weights": Planted(stale_weights, "--use-distributed-optimizer", "gathered"),
    "aux loss summed": Planted(aux_loss_summed_over_data_ranks, SEQUENCE, "an auxiliary loss"),
    "aux loss of one rank's load": Planted(load_of_one_rank_in_the_aux_loss, f"{SP} {SEQUENCE}", "an auxiliary loss"),
    "experts start alike": Planted(experts_start_alike_on_all_ranks, EP, "how they are initialised"),
    "learning rate": Planted(learning_rate_times_ranks, "", "the update is not"),
    "another choice": Planted(another_choice_on_one_rank, "", "tokens go to other experts"),
    "tokens lost": Planted(tokens_lost_on_the_way_back, EP, "forward pass differs"),
    "recomputed otherwise": Planted(
        a_recomputed_layer_sees_other_inputs,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "recomputed from other inputs",
    ),
    "moments not loaded": Planted(moments_not_loaded, "", "part of the state is not saved", "resume"),
    "bias not loaded": Planted(bias_not_loaded, BIAS, "part of the state is not saved", "resume"),
    "labels not shifted": Planted(labels_not_shifted, "", "labels are not shifted", "later-tokens"),
}


# ---- The tests.

SOUND = {
    "DP2": ("--moe-router-load-balancing-type none", 2),
    "TP2": (f"{SP} {SEQUENCE} {SHARED}", 2),
    "TP2, all-to-all": (f"{SP} --moe-token-dispatcher-type alltoall", 2),
    "PP2": ("--pipeline-model-parallel-size 2", 2),
    "PP2, tied": ("--pipeline-model-parallel-size 2 TIED", 2),
    "PP2, first layer dense": ("--pipeline-model-parallel-size 2 --moe-layer-freq [0,1]", 2),
    "EP2, all-gather": ("--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather", 2),
    "EP2, all-to-all": (f"{EP} {SEQUENCE} {SHARED}", 2),
    "TP2, EP2": (f"{SP} {EP} --expert-tensor-parallel-size 1", 2),
    "TP2, EP2, ETP2": (f"{SP} {EP} {SEQUENCE}", 4),
    "DP2, distributed optimizer": ("--use-distributed-optimizer", 2),
    "EP2, distributed optimizer": (f"{EP} --use-distributed-optimizer --overlap-grad-reduce", 2),
    "EP2, expert bias": (f"{EP} {BIAS} --moe-router-load-balancing-type none", 2),
    "DP2, aux loss": ("--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01", 2),
    "DP2, loss per token": (f"{PER_TOKEN}", 2),
    "EP2, groups": (f"{EP} --moe-router-num-groups 4 --moe-router-group-topk 2", 2),
    "EP2, capacity": (f"{EP} {CAPACITY}", 2),
    "TP2, latent attention": (f"{SP} {LATENT}", 2),
    "EP2, latent attention": (f"{EP} {BIAS} {LATENT} --moe-router-load-balancing-type none", 2),
    "PP2, latent attention, a depth more": (f"--pipeline-model-parallel-size 2 {LATENT} {DEPTH}", 2),
    "EP2, a depth more, aux loss": (f"{EP} {DEPTH} {SEQUENCE}", 2),
    "DP2, windows left out": ("--window-size 8,0 --softmax-type learnable", 2),
    "DP2, recomputed": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2),
}
DEFECTS = {
    "S2": (f"{SP} {LATENT} --transformer-impl local", "layout", "the backward pass is not"),
    "N11": (f"--tensor-model-parallel-size 2 {LATENT} DENSE", "layout", "over the wrong group"),
    "S5": (f"{SP} --expert-tensor-parallel-size 1", "layout", "each rank keeps its own"),
    "E7": (f"{SP} {SEQUENCE} {PER_TOKEN}", "layout", "an auxiliary loss"),
    "E8": (f"{SEQUENCE} {PER_TOKEN}", "micro-batches", "is not weighed per token"),
    "E9": ("--moe-z-loss-coeff 0.01", "layout", "is logged otherwise"),
    "N4": (f"{EP} {BIAS} {CAPACITY} --moe-pad-expert-input-to-capacity", "expert-bias", "it did not move"),
    "N5": (f"{CAPACITY} --moe-token-drop-policy position", "later-tokens", "a capacity lets later tokens"),
    "N6": (f"{SP} --moe-token-dispatcher-type alltoall {CAPACITY}", "layout", "a capacity that is one of each rank"),
}
"""Of engine_defects.yaml: flags, the check that finds it, and a part of a cause that is named."""


@pytest.mark.parametrize("name", rows(SOUND, test=["EP2, expert bias"]))
def test_a_sound_layout_has_no_finding(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    assert not wrong(findings(gloo, *SOUND[name], folder=str(tmp_path)))


@pytest.mark.parametrize("name", rows(DEFECTS, test=["S5"]))
def test_a_defect_of_the_engine_is_found_in_the_releases_that_have_it(gloo: GlooPool, name: str) -> None:
    flags, check, cause = DEFECTS[name]
    found = wrong(findings(gloo, flags, 2, only=check))
    if not next(one for one in known_defects() if one.id == name).is_present(engine_version()):
        assert not found
    else:
        assert any(cause in text for text in found[check][1:]), found


@pytest.mark.test_all(
    instead="tests/tools/test_doctor_trainers_megatron.py::"
    "test_a_defect_of_the_engine_is_found_in_the_releases_that_have_it"
)
def test_attention_sinks_are_left_out_of_the_engines_norm(gloo: GlooPool) -> None:
    found = wrong(findings(gloo, f"{SP} --softmax-type learnable", 2, only="layout"))
    assert found["layout"][0].startswith("gradient norm, step 1")
    assert "Megatron-LM #5916, #7452" in found["layout"][1]


@pytest.mark.parametrize("name", rows(PLANTED, test=["router not summed over TP", "bias in bf16"]))
def test_a_planted_error_is_found_and_its_cause_is_named(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    one = PLANTED[name]
    found = wrong(findings(gloo, one.flags, one.ranks, name, one.check, str(tmp_path)))
    assert any(one.cause in text for text in found[one.check][1:]), found


def test_a_launch_script_is_read_and_its_layout_cut_to_two(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "TP=4\ntorchrun --nproc-per-node 8 pretrain_gpt.py " + MODEL + " "
        "--tensor-model-parallel-size $TP --sequence-parallel --expert-model-parallel-size 8 --bf16\n"
    )
    trainer = target.load(script)
    assert trainer.ranks == 4
    assert trainer.loss == "micro-batches"
    assert "grouped GEMM" in trainer.leaves_out


def test_what_needs_cuda_is_left_out_and_stages_where_ranks_are_too_many() -> None:
    trainer = trainer_of(
        f"{SP} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex"
        " --moe-enable-deepep --moe-router-dtype fp32 --moe-grouped-gemm --overlap-moe-expert-parallel-comm --bf16"
        " --recompute-granularity selective --recompute-modules moe_act core_attn"
    )
    assert trainer.ranks == 4
    wanted = {"pipeline stages", "dispatcher flex", "--overlap-moe-expert-parallel-comm", "--recompute-modules moe_act"}
    assert wanted <= trainer.leaves_out.keys()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--use-torch-fsdp2 --no-gradient-accumulation-fusion", "--use-torch-fsdp2: is not checked"),
        ("--moe-router-topk 1", "megatron-core refuses the flags: .*pre-softmax when topk is 1"),
    ],
)
def test_what_cannot_be_checked_is_refused(flags: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        trainer_of(flags)
