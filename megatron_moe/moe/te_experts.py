"""The routed experts on Transformer Engine's GroupedLinear, imported when `--moe-expert-backend te` builds a layer."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor
from transformer_engine.pytorch import GroupedLinear

from megatron_moe.moe.dispatch import ExpertInput
from megatron_moe.moe.experts import LocalExperts, mark_expert_parameter, weighted_swiglu
from megatron_moe.moe.groups import MoEGroups
from megatron_moe.moe.options import MoEOptions


class TEGroupedExperts(LocalExperts):
    """Experts with one weight each in Transformer Engine's modules, and the checkpoint keys of `GroupedExperts`.

    GroupedLinear wants the number of rows per expert on the host: one synchronisation per layer that the
    `grouped_mm` backend does not need.
    """

    def __init__(self, config: Any, options: MoEOptions, groups: MoEGroups) -> None:
        super().__init__(config, options, groups)
        width, hidden = self.local_ffn_size, options.hidden_size
        build = dict(num_gemms=self.num_local_experts, bias=False, params_dtype=config.params_dtype)
        self.linear1 = GroupedLinear(in_features=hidden, out_features=2 * width, **build)
        self.linear2 = GroupedLinear(in_features=width, out_features=hidden, **build)
        for linear, partition_dim in ((self.linear1, 0), (self.linear2, 1)):
            for parameter in linear.parameters():
                mark_expert_parameter(parameter, partition_dim)

    def forward(self, expert_input: ExpertInput) -> Tensor:
        """See `LocalExperts.forward`."""
        ends = expert_input.offsets.tolist()
        splits = [end - start for start, end in zip([0, *ends[:-1]], ends)]
        gate_up = self.linear1(expert_input.rows, splits)
        down = partial(self.linear2, m_splits=splits)
        return self.activate_into(weighted_swiglu, down, gate_up, expert_input.probs)

    def local_weights(self) -> list[tuple[Tensor, Tensor]]:
        """See `LocalExperts.local_weights`."""
        shape = (2, self.local_ffn_size, self.options.hidden_size)
        return [
            (getattr(self.linear1, f"weight{e}").view(shape), getattr(self.linear2, f"weight{e}"))
            for e in range(self.num_local_experts)
        ]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the weights under the keys and global shapes of `GroupedExperts`, as one block per expert."""
        groups, options, axes = self.groups, self.options, len(sharded_offsets)
        sharded: dict[str, ShardedTensor] = {}
        for local, (weight1, weight2) in enumerate(self.local_weights()):
            expert_axis = (axes, self.first_expert + local, options.num_experts)
            for name, weight in (("weight1", weight1), ("weight2", weight2)):
                sharded[f"{prefix}{name}.{local}"] = ShardedTensor.from_rank_offsets(
                    f"{prefix}{name}",
                    weight,
                    *sharded_offsets,
                    expert_axis,
                    (axes + 2, groups.etp_rank, groups.etp_size),
                    replica_id=(0, 0, groups.expert_dp.rank()),
                    prepend_axis_num=axes + 1,
                )
        return sharded
