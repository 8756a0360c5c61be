"""The process groups of one MoE layer, passed in or taken from the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from torch.distributed import ProcessGroup


class _OneRank:
    """A stand-in for a process group, for a router or a layer used in a plain script without process groups."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@dataclass(frozen=True)
class MoEGroups:
    """The process groups that a MoE layer communicates in.

    tp: tensor parallel. tp_cp: ranks that share a micro-batch. tp_dp_cp: ranks that share a global batch and hold the
    same layers. expert: the EP x ETP ranks that together hold all experts of the layer, ETP fastest. expert_dp: ranks
    that hold the same part of the same experts.
    """

    tp: ProcessGroup
    tp_cp: ProcessGroup
    tp_dp_cp: ProcessGroup
    expert: ProcessGroup
    expert_dp: ProcessGroup
    ep_size: int
    ep_rank: int
    etp_size: int
    etp_rank: int


def moe_groups(pg_collection: Any = None) -> MoEGroups:
    """Return the groups from the engine's ProcessGroupCollection, or from its global state if None is given."""
    if pg_collection is not None:
        pg = pg_collection
        tp, tp_cp, tp_dp_cp, expert, expert_dp = pg.tp, pg.tp_cp, pg.tp_dp_cp, pg.tp_ep, pg.expt_dp
        ep, etp = pg.ep, pg.expt_tp
    elif parallel_state.model_parallel_is_initialized():
        tp = parallel_state.get_tensor_model_parallel_group()
        tp_cp = parallel_state.get_tensor_and_context_parallel_group()
        tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        expert = parallel_state.get_expert_tensor_and_model_parallel_group()
        expert_dp = parallel_state.get_expert_data_parallel_group()
        ep = parallel_state.get_expert_model_parallel_group()
        etp = parallel_state.get_expert_tensor_parallel_group()
    else:
        tp = tp_cp = tp_dp_cp = expert = expert_dp = ep = etp = _OneRank()
    return MoEGroups(
        tp=tp,
        tp_cp=tp_cp,
        tp_dp_cp=tp_dp_cp,
        expert=expert,
        expert_dp=expert_dp,
        ep_size=ep.size(),
        ep_rank=ep.rank(),
        etp_size=etp.size(),
        etp_rank=etp.rank(),
    )
