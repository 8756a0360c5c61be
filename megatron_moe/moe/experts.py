"""The routed experts of one rank: the weighted SwiGLU, the base class of all backends, and the grouped experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.schema import grouped_product_refusal
from megatron_moe.engine.dist_checkpointing import ShardedTensor
from megatron_moe.engine.layers import CheckpointWithoutOutput, MegatronModule
from megatron_moe.engine.modules import DeepcopyKeepsGroups
from megatron_moe.kernels.choice import has_kernel
from megatron_moe.moe.dispatch import ExpertInput
from megatron_moe.moe.grouped_gemm import DelayedWgrad, GroupedLinear, TorchProduct
from megatron_moe.moe.grouped_gemm_fp8 import Fp8Product, experts_by_triton
from megatron_moe.moe.options import MoEGroups, MoEOptions
from megatron_moe.parallel.groups import ranks_of_machine
from megatron_moe.platform import host
from megatron_moe.platform.autograd import Function
from megatron_moe.platform.numerics import unaffected_by_autocast
from megatron_moe.platform.protocols import AutogradContext, EngineConfig
from megatron_moe.precision.contract import mixes_dtypes

# The activation is SwiGLU times the routing weight, as one step of the graph. Multiplying by the weight here, on rows
# of the expert's width, is cheaper than weighing the outputs on rows of the model's width, and the second matrix
# product's output need not be kept for the backward pass. It is the same function, because the second product is
# linear.


@has_kernel("weighted_swiglu_forward")
@mixes_dtypes("rows in the model's dtype are multiplied in place into fp32")
def weighted_swiglu_forward(gate_up: Tensor, probs: Tensor) -> Tensor:
    """Return `weighted_swiglu` without its graph."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.chunk(2, dim=-1)
    hidden = F.silu(gate.to(wide))
    hidden *= up
    hidden *= probs.unsqueeze(-1)
    return hidden.to(gate_up.dtype)


@has_kernel("weighted_swiglu_backward")
@mixes_dtypes("rows in the model's dtype are multiplied in fp32, and rounded once as they are written")
def weighted_swiglu_backward(grad: Tensor, gate_up: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate_up` [R, 2F] and `probs` [R], from that of the result [R, F]."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = (half.to(wide) for half in gate_up.chunk(2, dim=-1))
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_wide = grad.to(wide)
    grad_hidden = grad_wide * silu
    grad_probs = torch.linalg.vecdot(grad_hidden, up).to(probs.dtype)
    weighted = grad_wide.mul_(probs.unsqueeze(-1)) if grad_wide is not grad else grad_wide * probs.unsqueeze(-1)
    grad_gate_up = torch.empty_like(gate_up)
    grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
    torch.mul(weighted, silu, out=silu)
    grad_up.copy_(silu)
    # d silu(g)/dg = s + g s (1 - s) = s (1 + g (1 - s))
    slope = torch.addcmul(sigmoid, gate * sigmoid, 1 - sigmoid)
    grad_gate.copy_(slope.mul_(up).mul_(weighted))
    return grad_gate_up, grad_probs


class _WeightedSwiGLU(Function):
    """The activation as a function that saves its inputs alone and computes the sigmoid again in the backward pass.

    All arithmetic is in fp32 or wider, also under autocast, which would cast the dot product of the backward pass.
    """

    @staticmethod
    @unaffected_by_autocast
    def forward(ctx: AutogradContext, gate_up: Tensor, probs: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, probs)
        return weighted_swiglu_forward(gate_up, probs)

    @staticmethod
    @unaffected_by_autocast
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, probs = ctx.saved_tensors
        return weighted_swiglu_backward(grad, gate_up, probs)


def weighted_swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    """Return silu(gate) * up * prob for each row.

    Args:
        gate_up: [R, 2F], gate first.
        probs: [R] fp32 or wider, the weight of each row.

    Returns:
        [R, F] in the dtype of `gate_up`, rounded once. Gradients: [R, 2F] in that dtype, [R] in the dtype of `probs`.
    """
    return _WeightedSwiGLU.apply(gate_up, probs)


# ---- Other gated activations, and biases of experts, which are added next to them.


@dataclass(frozen=True)
class GatedActivation:
    """x sigmoid(slope x) of the gate, times (up + offset); see `weighted_glu`.

    slope: 1 for SiLU, 1.702 for the quick GELU. clamp: the most of the gate, and of up on both sides of 0.
    """

    slope: float = 1.0
    clamp: float | None = None
    offset: float = 0.0

    def halves(self, gate_up: Tensor, bias: Tensor | None, experts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return gate and up [R, F] with their biases, before they are cut off, in fp32 or wider."""
        wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
        if bias is not None:
            assert experts is not None
            wide = wide + _of_rows(bias.to(wide.dtype).flatten(1), experts)
        gate, up = wide.chunk(2, dim=-1)
        return gate, up

    def cut(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return both within the clamp."""
        if self.clamp is None:
            return gate, up
        return gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)


def expert_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """Return the expert of each row [R] int64, from the ends of the experts' rows [e]; e for rows behind the last."""
    return torch.searchsorted(offsets, torch.arange(rows, dtype=offsets.dtype, device=offsets.device), right=True)


def _of_rows(values: Tensor, experts: Tensor) -> Tensor:
    return values.index_select(0, experts.clamp(max=len(values) - 1))


def _sums_by_expert(rows: Tensor, experts: Tensor, count: int) -> Tensor:
    """Return [e, N], the sums of each expert's rows [R, N]. What is behind the last expert's may be anything."""
    return rows.new_zeros(count + 1, rows.shape[1]).index_add_(0, experts, rows)[:count]


class _WeightedGLU(Function):
    """A gated activation as a function that saves its inputs alone; all arithmetic is in fp32 or wider."""

    @staticmethod
    @unaffected_by_autocast
    @mixes_dtypes("rows in the model's dtype are activated in fp32, and rounded once")
    def forward(
        ctx: AutogradContext,
        gate_up: Tensor,
        probs: Tensor,
        bias: Tensor | None,
        experts: Tensor | None,
        kind: GatedActivation,
    ) -> Tensor:
        ctx.save_for_backward(gate_up, probs, bias, experts)
        ctx.kind = kind
        gate, up = kind.cut(*kind.halves(gate_up, bias, experts))
        activated = gate * torch.sigmoid(kind.slope * gate) * (up + kind.offset)
        return (activated * probs.unsqueeze(-1)).to(gate_up.dtype)

    @staticmethod
    @unaffected_by_autocast
    @mixes_dtypes("rows in the model's dtype are multiplied in fp32, and rounded once as they are written")
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        gate_up, probs, bias, experts = ctx.saved_tensors
        kind: GatedActivation = ctx.kind
        whole_gate, whole_up = kind.halves(gate_up, bias, experts)
        gate, up = kind.cut(whole_gate, whole_up)
        sigmoid = torch.sigmoid(kind.slope * gate)
        grad = grad.to(gate.dtype)
        of_activated = grad * gate * sigmoid
        grad_probs = (of_activated * (up + kind.offset)).sum(-1).to(probs.dtype)
        weighted = grad * probs.unsqueeze(-1)
        # d g s(a g) / dg = s + a g s (1 - s)
        grad_gate = weighted * (up + kind.offset) * sigmoid * (1 + kind.slope * gate * (1 - sigmoid))
        grad_up = of_activated * probs.unsqueeze(-1)
        if kind.clamp is not None:
            grad_gate = grad_gate.masked_fill(whole_gate > kind.clamp, 0.0)
            grad_up = grad_up.masked_fill(whole_up.abs() > kind.clamp, 0.0)
        both = torch.cat((grad_gate, grad_up), dim=-1)
        grad_bias = None
        if bias is not None:
            grad_bias = _sums_by_expert(both, experts, len(bias)).view(bias.shape).to(bias.dtype)
        return both.to(gate_up.dtype), grad_probs, grad_bias, None, None


def weighted_glu(
    gate_up: Tensor, probs: Tensor, bias: Tensor | None, experts: Tensor | None, kind: GatedActivation
) -> Tensor:
    """Return activation(gate) * (up + offset) * prob for each row, as `weighted_swiglu`.

    Args:
        gate_up: [R, 2F], gate first. probs: [R] fp32 or wider.
        bias: [e, 2, F], added to each expert's rows; None: none. experts: see `expert_of_rows`; None without a bias.
    """
    return _WeightedGLU.apply(gate_up, probs, bias, experts, kind)


class _WeightedBias(Function):
    """The second product's bias times each row's weight, added in fp32 to this rank's columns."""

    @staticmethod
    @unaffected_by_autocast
    @mixes_dtypes("rows in the model's dtype get a bias in fp32, and are rounded once")
    def forward(
        ctx: AutogradContext, output: Tensor, probs: Tensor, bias: Tensor, experts: Tensor, columns: slice
    ) -> Tensor:
        ctx.save_for_backward(probs, bias, experts)
        ctx.columns = columns
        output = output.clone()
        own = output[:, columns]
        own.copy_(own.to(probs.dtype) + _of_rows(bias.to(probs.dtype), experts) * probs.unsqueeze(-1))
        return output

    @staticmethod
    @unaffected_by_autocast
    @mixes_dtypes("gradients in the model's dtype are weighed and added up in fp32")
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        probs, bias, experts = ctx.saved_tensors
        own = grad[:, ctx.columns].to(probs.dtype)
        grad_probs = (own * _of_rows(bias.to(probs.dtype), experts)).sum(-1)
        grad_bias = _sums_by_expert(own * probs.unsqueeze(-1), experts, len(bias)).to(bias.dtype)
        return grad, grad_probs, grad_bias, None, None


def with_weighted_bias(output: Tensor, probs: Tensor, bias: Tensor, experts: Tensor, columns: slice) -> Tensor:
    """Return output [R, H] plus bias [e, columns of H] of each row's expert, times its weight, in these columns."""
    return _WeightedBias.apply(output, probs, bias, experts, columns)


Normal = Callable[[str, tuple[int, ...], float], Tensor]
"""(name, shape, standard deviation) -> fp32 tensor that is a function of these and the run's seed; for any thread."""


class LocalExperts(DeepcopyKeepsGroups, MegatronModule, ABC):
    """The experts that are on this rank, and their width: the base class of all backends.

    Attributes:
        copies_rows: whether the experts copy rows and add up results, where the dispatcher leaves it to them.

    Args:
        config: the engine's TransformerConfig.
        options: the layer's options.
        groups: the layer's process groups.

    Raises:
        ValueError: the experts' width does not divide among the ETP ranks.
    """

    copies_rows = False

    def __init__(self, config: EngineConfig, options: MoEOptions, groups: MoEGroups) -> None:
        super().__init__(config)
        self.options = options
        self.groups = groups
        if options.ffn_hidden_size % groups.etp_size:
            raise ValueError(
                f"--moe-ffn-hidden-size {options.ffn_hidden_size} is not a multiple of --expert-tensor-parallel-size "
                f"{groups.etp_size}"
            )
        self.num_local_experts = options.num_experts // groups.ep_size
        self.first_expert = groups.ep_rank * self.num_local_experts
        # (activation, second product, inputs of the activation): the second product's input is kept, or recomputed.
        self.activate_into = without_output if options.recompute_activation else _keeping
        self.local_ffn_size = options.ffn_hidden_size // groups.etp_size

    @abstractmethod
    def forward(self, expert_input: ExpertInput, later: DelayedWgrad | None = None) -> Tensor:
        """Return down(prob * silu(gate) * up) for rows [R, H]: [R, H] in the same dtype, partial over ETP ranks.

        Or with what the options have in place of SiLU; with biases, that of the second product times the weight too.

        later: takes over the weights' gradients, where `--delay-wgrad-compute` asks for it; only grouped_mm's experts
        are given one.
        """

    @abstractmethod
    def local_weights(self) -> list[tuple[Tensor, Tensor]]:
        """Return views of each local expert's weights: [2, F/ETP, H] (gate, up) and [H, F/ETP]."""

    @torch.no_grad()
    def reset_parameters(self, normal: Normal, std: float, output_std: float) -> None:
        """Draw each expert's weights from its own random stream, so that they do not depend on the rank that has it.

        Args:
            normal: see `Normal`; the names given are `expert{global index}.weight1` and `.weight2`.
            std, output_std: standard deviations of the first and of the second product's weights.
        """
        width, hidden = self.options.ffn_hidden_size, self.options.hidden_size
        part = slice(self.groups.etp_rank * self.local_ffn_size, (self.groups.etp_rank + 1) * self.local_ffn_size)

        def draw(local: int) -> tuple[Tensor, Tensor]:
            name = f"expert{self.first_expert + local}"
            first = normal(f"{name}.weight1", (2, width, hidden), std)
            return first, normal(f"{name}.weight2", (hidden, width), output_std)

        # One thread draws some 10^8 numbers a second, and a rank has billions. As many experts as threads are held.
        weights, threads = self.local_weights(), max(1, host.cores() // ranks_of_machine())
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(weights), threads):
                some = range(first, min(first + threads, len(weights)))
                for local, (full1, full2) in zip(some, pool.map(draw, some), strict=True):
                    weights[local][0].copy_(full1[:, part])
                    weights[local][1].copy_(full2[:, part])


class GroupedExperts(LocalExperts):
    """The e local experts as stacked weights; each rank has 1/ETP of every expert's width.

    Parameters, in the model's dtype:
        weight1: [e, 2, F/ETP, H], gate and up projections.
        weight2: [e, H, F/ETP], down projections.
        bias1, bias2: [e, 2, F/ETP] and [e, H/ETP], where linear layers have biases, else None. The ETP ranks' results
            are added up, so that each adds the second bias to other columns.

    Args:
        config: the engine's TransformerConfig.
        options: the layer's options.
        groups: the layer's process groups.
        kernel: the product of groups of rows with one matrix per group; torch's by default.
        offsets_on_host: whether the kernel reads the offsets on the host.
        gate_up_kernel: the product with gate and up projection, [e, 2, F/ETP, H], where it is another kernel.

    Raises:
        ValueError: the grouped product cannot take these widths in the dtype of the weights, when they are built or
            when they are cast (by `Float16Module`, `.to(dtype)`).
    """

    def __init__(
        self,
        config: EngineConfig,
        options: MoEOptions,
        groups: MoEGroups,
        kernel: GroupedLinear | None = None,
        offsets_on_host: bool = False,
        gate_up_kernel: GroupedLinear | None = None,
    ) -> None:
        super().__init__(config, options, groups)
        self.grouped_linear = TorchProduct(options.fuse_weight_gradients) if kernel is None else kernel
        self.gate_up_linear = self.grouped_linear if gate_up_kernel is None else gate_up_kernel
        self.offsets_on_host = offsets_on_host
        e, width, hidden = self.num_local_experts, self.local_ffn_size, self.options.hidden_size
        self.weight1 = mark_expert_parameter(_empty(e, 2, width, hidden, dtype=config.params_dtype), partition_dim=2)
        self.weight2 = mark_expert_parameter(_empty(e, hidden, width, dtype=config.params_dtype), partition_dim=2)
        self.bias1: torch.nn.Parameter | None = None
        self.bias2: torch.nn.Parameter | None = None
        share = hidden // groups.etp_size
        self.own_columns = slice(groups.etp_rank * share, (groups.etp_rank + 1) * share)
        if options.biases:
            self.bias1 = mark_expert_parameter(_empty(e, 2, width, dtype=config.params_dtype), partition_dim=2)
            self.bias2 = mark_expert_parameter(_empty(e, share, dtype=config.params_dtype), partition_dim=1)
            for bias in (self.bias1, self.bias2):
                torch.nn.init.zeros_(bias)
        kind = GatedActivation(1.702 if options.quick_gelu else 1.0, options.activation_clamp, options.linear_offset)
        self.activation = None if kind == GatedActivation() and not options.biases else kind
        """None: plain SwiGLU, which has kernels."""
        self._require_whole_rows()
        if config.perform_initialization:
            config.init_method(self.weight1)
            config.output_layer_init_method(self.weight2)

    def forward(self, expert_input: ExpertInput, later: DelayedWgrad | None = None) -> Tensor:
        """See `LocalExperts.forward`."""
        rows, probs, offsets = expert_input.rows, expert_input.probs, expert_input.offsets
        gate_up_linear, down_linear = self.gate_up_linear, self.grouped_linear
        if later is not None:
            gate_up_linear = down_linear = later.grouped_linear
        if self.offsets_on_host:
            offsets = offsets.cpu() if expert_input.host_offsets is None else expert_input.host_offsets()
        gate_up = gate_up_linear(rows, self.weight1, offsets)
        activate, kind, experts = weighted_swiglu, self.activation, None
        if self.bias1 is not None:
            experts = expert_of_rows(expert_input.offsets, rows.shape[0])
        if kind is not None:
            activate = lambda gate_up, probs: weighted_glu(gate_up, probs, self.bias1, experts, kind)  # noqa: E731
        output = self.activate_into(activate, lambda hidden: down_linear(hidden, self.weight2, offsets), gate_up, probs)
        if self.bias2 is None or experts is None:
            return output
        return with_weighted_bias(output, probs, self.bias2, experts, self.own_columns)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._require_whole_rows()  # fp32 weights may be wide enough, and too narrow in half precision
        return self

    def _require_whole_rows(self) -> None:
        options, dtype = self.options, str(self.weight1.dtype).removeprefix("torch.")
        refusal = grouped_product_refusal(dtype, options.hidden_size, self.local_ffn_size)
        by_torch = isinstance(self.grouped_linear, (TorchProduct, Fp8Product))
        if by_torch and refusal is not None:
            raise ValueError(
                f"--moe-expert-backend grouped_mm, --hidden-size {options.hidden_size}, --moe-ffn-hidden-size "
                f"{options.ffn_hidden_size}, --expert-tensor-parallel-size {self.groups.etp_size}: {refusal}"
            )

    def local_weights(self) -> list[tuple[Tensor, Tensor]]:
        """See `LocalExperts.local_weights`."""
        return list(zip(self.weight1.unbind(0), self.weight2.unbind(0)))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Return this rank's block of the global tensors [E, 2, F, H] and [E, H, F], split by expert and by width.

        And of biases [E, 2, F] and [E, H].
        """
        groups, layer_axes = self.groups, len(sharded_offsets)
        expert_axis = (layer_axes, groups.ep_rank, groups.ep_size)
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                weight,
                *sharded_offsets,
                expert_axis,
                (layer_axes + weight.partition_dim, groups.etp_rank, groups.etp_size),
                replica_id=(0, 0, groups.expert_dp.rank()),
                prepend_axis_num=layer_axes,
            )
            for name, weight in self.named_parameters(recurse=False)
        }


class GroupedExpertsFp8(GroupedExperts):
    """Grouped experts that our kernels compute in FP8, as one node of the graph; see `experts_by_triton`.

    Args:
        config, options, groups: see `GroupedExperts`.
        products: of gate and up projection, and of the down projection.
    """

    copies_rows = True

    def __init__(
        self, config: EngineConfig, options: MoEOptions, groups: MoEGroups, products: tuple[Fp8Product, Fp8Product]
    ) -> None:
        super().__init__(config, options, groups, products[1], gate_up_kernel=products[0])
        self.products = products
        self.activate_into = _keeping  # nothing is kept of it

    def forward(self, expert_input: ExpertInput, later: DelayedWgrad | None = None) -> Tensor:
        """See `LocalExperts.forward`; of rows that are to be copied, the sums of what was made of each row's copies."""
        given = expert_input
        route = given.offsets, given.copies, self.products, self.activate_into
        return experts_by_triton(given.rows, given.probs, self.weight1, self.weight2, *route)


def _keeping(activation: Callable[..., Tensor], product: Callable[[Tensor], Tensor], *inputs: Tensor) -> Tensor:
    return product(activation(*inputs))


def mark_expert_parameter(parameter: torch.nn.Parameter, partition_dim: int) -> torch.nn.Parameter:
    """Set the attributes by which the engine reduces an expert's weight and knows its dimension split over ETP."""
    # Reduced over the ranks that hold the same experts, not over data parallelism, also where EP and ETP are 1.
    parameter.allreduce = False  # type: ignore[attr-defined]
    # Every rank of the expert group holds another part: none is a duplicate that the gradient norm should skip.
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = partition_dim  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]
    return parameter


def _empty(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype))


def without_output(produce: Callable[..., Any], consume: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return consume(*produce(*inputs)), with the same numbers, without keeping what `produce` returned.

    The storage is freed after `consume`. When the gradient of the result arrives, `produce` runs again and fills the
    storage, so that everything `consume` saved of it, views included, is complete before it is read.

    Args:
        produce: returns a tensor or a tuple of tensors that no function but `consume` reads. Gradients of inputs and
            parameters are found as usual.
        consume: takes them as its arguments; its result must depend on them.
    """
    checkpoint = CheckpointWithoutOutput(fp8=None)  # its default, False, stands for "FP8, with Transformer Engine"
    produced = checkpoint.checkpoint(produce, *inputs)
    result = consume(*produced) if isinstance(produced, tuple) else consume(produced)
    checkpoint.discard_output_and_register_recompute(result)
    return result
