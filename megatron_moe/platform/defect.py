"""What is known of one defect of megatron-core, and which flags meet it. No torch.

The defects themselves: `router_defects.py` and `engine_defects.py`. `docs/engine_defects.md` names the test of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_moe.config.schema import Run

Treatment = Literal["overridden", "refused", "not used", "kept"]
"""overridden: other code runs in its place. refused: a rule stops such flags. not used: no run gets there.
kept: as in Megatron-LM, and told."""

Condition = Callable[[Run, int], bool]
Version = tuple[int, ...]
OLDEST: Version = (0, 16, 1)
NEWEST: Version = (0, 19, 2)
"""The two releases that this project is tested with."""


@dataclass(frozen=True)
class Defect:
    """One defect of the engine, and what becomes of it here.

    Args:
        id: stable name, for the log and the docs.
        title: what goes wrong, one line.
        source: public issue or pull request, or the engine's file.
        meets: whether the flags of a run on so many ranks reach it.
        treatment, how: what this project does; `how` ends the line that a run starts with.
        where: of the mechanism, the file in the repository and a word that stands in it.
        since: first release that has it.
        fixed_in: first release without it; `NEWEST` where it is known of no release before, None where of none.
        without_cuda_only: it needs a machine without CUDA.
    """

    id: str
    title: str
    source: str
    meets: Condition
    treatment: Treatment
    how: str
    where: tuple[tuple[str, str], ...] = ()
    since: Version = OLDEST
    fixed_in: Version | None = None
    without_cuda_only: bool = False

    def present(self, version: Version) -> bool:
        """Whether this release of the engine has the defect."""
        return self.since <= version and (self.fixed_in is None or version < self.fixed_in)

    def versions(self) -> str:
        """The releases in words."""
        if self.fixed_in == NEWEST:
            return "0.16.1, no longer in 0.19.2; not looked for in between"
        if self.fixed_in is not None:
            return f"before {'.'.join(map(str, self.fixed_in))}"
        since = "" if self.since == OLDEST else f"from {'.'.join(map(str, self.since))}, "
        return f"{since}no release without it is known"


# ---- conditions


def always(run: Run, world_size: int) -> bool:
    """Every run meets it."""
    return True


def callers_only(run: Run, world_size: int) -> bool:
    """Met by callers of our modules (padding, layers that differ in experts), never by a run of pretrain_moe.py."""
    return False


def half(run: Run) -> bool:
    """The model is bf16 or fp16."""
    return run.precision.bf16 or run.precision.fp16


def expert_bias(run: Run, world_size: int) -> bool:
    """There is an expert bias."""
    return run.moe.num_experts is not None and run.moe.moe_router_enable_expert_bias


def half_bias(run: Run, world_size: int) -> bool:
    """There is an expert bias in a model of bf16 or fp16."""
    return expert_bias(run, world_size) and half(run)


def auxiliary_losses(run: Run) -> set[str]:
    """The auxiliary losses of the run by name."""
    kinds = set(run.moe.moe_router_load_balancing_type) & {"aux_loss", "seq_aux_loss", "global_aux_loss"}
    return kinds if run.moe.num_experts is not None else set()


def tp_size(run: Run) -> int:
    """Tensor-parallel ranks."""
    return run.parallel.tensor_model_parallel_size


def scaled_losses(run: Run, world_size: int) -> bool:
    """A per-token loss beside auxiliary losses or a z-loss, over several TP or CP ranks."""
    attached = bool(auxiliary_losses(run)) or (run.moe.num_experts is not None and bool(run.moe.moe_z_loss_coeff))
    return attached and run.optimizer.calculate_per_token_loss and tp_size(run) * run.parallel.context_parallel_size > 1


def experts(run: Run, world_size: int) -> bool:
    """It is a MoE model."""
    return run.moe.num_experts is not None


def distributed_and_resumable(run: Run, world_size: int) -> bool:
    """The distributed optimizer, with checkpoints."""
    saved = run.checkpoint.save is not None or run.checkpoint.load is not None
    return run.optimizer.use_distributed_optimizer and saved
