"""Checks of the kernels that torch takes for the run's sizes: attention, grouped products, sums in half precision."""

from __future__ import annotations

import torch

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.platform import probes
from megatron_moe_tools.preflight.findings import FAIL, IMPOSSIBLE, PASS, WARN, Finding, Place

_CUDNN_WITH_TWO_WIDTHS = (9, 11, 0)
_FAST = ("flash", "cudnn")
NO_DEVICE = "torch sees no CUDA device"
NO_MODEL = "no flags of a model were given; add them, for example --preset deepseek-v3"


def attention(place: Place) -> Finding:
    """Check that the attention of the run's head widths takes a fast kernel."""
    if (why_not := _why_not(place)) is not None:
        return why_not
    from megatron_moe.model.context_parallel import for_kernels  # with the engine, which may be broken

    run = place.run
    if run.model.transformer_impl == "transformer_engine":
        return Finding(PASS, "Transformer Engine's attention, which chooses its kernel itself (NVTE_DEBUG=1 shows it)")
    over_ranks = run.parallel.context_parallel_size > 1
    heads, groups, widths = attention_sizes(run)
    query, key, value = probes.attention_operands(heads, groups, widths, dtype_of(run))
    key, value, grouped = for_kernels(query, key, value)
    if over_ranks:  # half of a rank's queries, against more keys
        query = query[:, :, : query.shape[2] // 2]
    kernel = probes.attention_kernel(query, key, value, grouped, over_ranks)
    return judged_attention(run, kernel, probes.torch_build().cudnn)


def attention_sizes(run: Run) -> tuple[int, int, tuple[int, int]]:
    """Return the heads and key/value groups of a rank, and the widths of keys and values."""
    model, tensor_ranks = run.model, run.parallel.tensor_model_parallel_size
    heads = max(1, model.num_attention_heads // tensor_ranks)
    if model.multi_latent_attention:
        return heads, heads, (model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim)
    groups = max(1, run.derived.num_query_groups // tensor_ranks)
    return heads, groups, (run.derived.head_size, run.derived.head_size)


def judged_attention(run: Run, kernel: str, cudnn: tuple[int, int, int] | None) -> Finding:
    """Return the finding for the kernel that was chosen."""
    heads, groups, (keys, values) = attention_sizes(run)
    dtype = run.derived.params_dtype_name
    found = f"{kernel} kernel for {dtype}, {heads} heads, {groups} key/value groups, widths {keys}/{values}"
    if run.parallel.context_parallel_size > 1:
        found += f", context parallel over {run.parallel.context_parallel_size}"
    if kernel == "math":
        return Finding(FAIL, f"{found}: it keeps the S x S scores in memory", "use --bf16 and head widths up to 256")
    if kernel in _FAST:
        return Finding(PASS, found)
    if dtype == "float32":
        return Finding(WARN, found, "the flash and cuDNN kernels have no fp32; use --bf16 for a long run")
    if keys != values and run.parallel.context_parallel_size > 1:
        return Finding(
            WARN,
            found,
            "flash has one width and the mask is not cuDNN's: count on this, or do without --context-parallel-size",
        )
    if keys != values and (cudnn is None or cudnn < _CUDNN_WITH_TWO_WIDTHS):
        have = "no cuDNN" if cudnn is None else f"cuDNN {'.'.join(map(str, cudnn))}"
        return Finding(
            WARN, f"{found}; {have}", "install a torch with cuDNN 9.11 or later, which is fast at two widths"
        )
    return Finding(
        WARN, found, "no fast kernel was chosen; flash needs widths that are equal, at most 256, multiples of 8"
    )


def grouped_product(place: Place) -> Finding:
    """Check that the experts' grouped product is one kernel, which needs no copy to the host."""
    if (why_not := _why_not(place)) is not None:
        return why_not
    run = place.run
    if run.moe.num_experts is None or run.moe.moe_expert_backend != "grouped_mm":
        return Finding(PASS, "the run does not use torch's grouped product")
    name = f"{run.derived.params_dtype_name} on {probes.device_name()}"
    if probes.grouped_product_is_fused(dtype_of(run)):
        return Finding(PASS, f"one kernel for {name}")
    return Finding(
        WARN,
        f"{name}: torch's fallback, a product for each expert after a copy of the counts to the host",
        "the kernel needs --bf16 and compute capability 9.x or 10.x (H100, H200, B200); --moe-expert-backend te is "
        "another way on other cards",
    )


def reductions(place: Place) -> Finding:
    """Check that the switches by which a run keeps sums of half-precision products in fp32 can be set."""
    departing = probes.departing_switches()
    if departing:
        return Finding(FAIL, "; ".join(departing), "use a torch whose switches can be set; see docs/precision.md")
    return Finding(PASS, "a run adds half-precision products in fp32, and multiplies by TF32 with --allow-tf32 alone")


def dtype_of(run: Run) -> torch.dtype:
    """Return the dtype of weights and activations."""
    return getattr(torch, run.derived.params_dtype_name)


def _why_not(place: Place) -> Finding | None:
    if not platform.has_cuda():
        return Finding(IMPOSSIBLE, NO_DEVICE)
    return None if place.has_model else Finding(IMPOSSIBLE, NO_MODEL)
