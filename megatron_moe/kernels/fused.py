"""The kernels, each under the name of the operation whose form it is (see `choice.has_kernel`)."""

from megatron_moe.kernels.triton_activation import weighted_swiglu_backward, weighted_swiglu_forward
from megatron_moe.kernels.triton_loss import add_statistics, gradient_of_tile
from megatron_moe.kernels.triton_rotary import join_positions, join_positions_backward
from megatron_moe.kernels.triton_routing import choose_experts, count_tokens, expert_weights, expert_weights_backward
from megatron_moe.kernels.triton_rows import gather_rows, sum_rows
from megatron_moe.kernels.triton_sort import sort_by_expert

__all__ = [
    "add_statistics",
    "gradient_of_tile",
    "choose_experts",
    "count_tokens",
    "expert_weights",
    "expert_weights_backward",
    "gather_rows",
    "join_positions",
    "join_positions_backward",
    "sort_by_expert",
    "sum_rows",
    "weighted_swiglu_backward",
    "weighted_swiglu_forward",
]
