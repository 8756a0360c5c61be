"""The routed experts on Transformer Engine's GroupedLinear. Imported only when `--moe-expert-backend te` is chosen."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from transformer_engine.pytorch import GroupedLinear

from megatron_moe.moe.activation import weighted_swiglu
from megatron_moe.moe.dispatch import ExpertInput
from megatron_moe.moe.experts import Normal, mark_expert_parameter
from megatron_moe.moe.groups import MoEGroups
from megatron_moe.moe.options import MoEOptions


class TEGroupedExperts(MegatronModule):
    """As `GroupedExperts`, with one weight per expert in Transformer Engine's modules and the same checkpoint keys.

    GroupedLinear wants the number of rows per expert on the host: one synchronisation per layer that the
    `grouped_mm` backend does not need.
    """

    def __init__(self, config: Any, groups: MoEGroups) -> None:
        super().__init__(config)
        self.options = options = MoEOptions.from_engine_config(config)
        self.groups = groups
        if options.ffn_hidden_size % groups.etp_size:
            raise ValueError(
                f"--moe-ffn-hidden-size {options.ffn_hidden_size} is not a multiple of --expert-tensor-parallel-size "
                f"{groups.etp_size}"
            )
        self.num_local_experts = options.num_experts // groups.ep_size
        self.first_expert = groups.ep_rank * self.num_local_experts
        self.local_ffn_size = options.ffn_hidden_size // groups.etp_size
        build = dict(num_gemms=self.num_local_experts, bias=False, params_dtype=config.params_dtype)
        self.linear1 = GroupedLinear(in_features=options.hidden_size, out_features=2 * self.local_ffn_size, **build)
        self.linear2 = GroupedLinear(in_features=self.local_ffn_size, out_features=options.hidden_size, **build)
        for linear in (self.linear1, self.linear2):
            for parameter in linear.parameters():
                mark_expert_parameter(parameter, partition_dim=0 if linear is self.linear1 else 1)

    def forward(self, expert_input: ExpertInput) -> Tensor:
        """[R, H] -> [R, H]; see `GroupedExperts.forward`."""
        ends = expert_input.offsets.tolist()
        splits = [end - start for start, end in zip([0, *ends[:-1]], ends)]
        gate_up = self.linear1(expert_input.rows, splits)
        return self.linear2(weighted_swiglu(gate_up, expert_input.probs), splits)

    @torch.no_grad()
    def reset_parameters(self, normal: Normal, std: float, output_std: float) -> None:
        """As `GroupedExperts.reset_parameters`: the same names, hence the same weights."""
        options = self.options
        part = slice(self.groups.etp_rank * self.local_ffn_size, (self.groups.etp_rank + 1) * self.local_ffn_size)
        for local, (weight1, weight2) in enumerate(self._weights()):
            name = f"expert{self.first_expert + local}"
            full1 = normal(f"{name}.weight1", (2, options.ffn_hidden_size, options.hidden_size), std)
            full2 = normal(f"{name}.weight2", (options.hidden_size, options.ffn_hidden_size), output_std)
            weight1.copy_(full1[:, part].flatten(0, 1))
            weight2.copy_(full2[:, part])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """The keys and global shapes of `GroupedExperts`, one block per expert."""
        groups, options, axes = self.groups, self.options, len(sharded_offsets)
        sharded: dict[str, ShardedTensor] = {}
        for local, (weight1, weight2) in enumerate(self._weights()):
            expert_axis = (axes, self.first_expert + local, options.num_experts)
            blocks = {
                "weight1": (weight1.view(2, self.local_ffn_size, options.hidden_size), axes + 2),
                "weight2": (weight2, axes + 2),
            }
            for name, (weight, width_axis) in blocks.items():
                sharded[f"{prefix}{name}.{local}"] = ShardedTensor.from_rank_offsets(
                    f"{prefix}{name}",
                    weight,
                    *sharded_offsets,
                    expert_axis,
                    (width_axis, groups.etp_rank, groups.etp_size),
                    replica_id=(0, 0, groups.expert_dp.rank()),
                    prepend_axis_num=axes + 1,
                )
        return sharded

    def _weights(self) -> list[tuple[Tensor, Tensor]]:
        """(first, second) weight of each local expert."""
        return [
            (getattr(self.linear1, f"weight{e}"), getattr(self.linear2, f"weight{e}"))
            for e in range(self.num_local_experts)
        ]
