"""Compare what context-parallel ranks of latent attention may exchange: the latents, or keys and values."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from megatron_moe.config.latent_exchange import exchange_cost
from megatron_moe.config.model_flags import EXCHANGES
from megatron_moe.config.schema import Run, replace
from megatron_moe_tools.plan.layouts import Machine
from megatron_moe_tools.plan.plan import Traffic, rank_traffic, sending_seconds, traced
from megatron_moe_tools.plan.tracing import RankTrace


def compared_exchanges(
    run: Run, world_size: int, machine: Machine, known: dict[Hashable, RankTrace] | None = None
) -> dict[str, Any] | None:
    """Return what each value of `--mla-cp-exchange` takes of a rank in a step, on the stage with most layers.

    Args:
        run: a run that has passed the rules for `world_size` ranks.
        known: see `trace_ranks`.

    Returns:
        chosen: what the run exchanges. ranks: CP. ways: by exchange, numbers (of a token and layer), sent and
        between_nodes (bytes over CP, and over TP what the other does not send), flops (that the other does not
        compute), seconds (of these, nothing hidden; None for a CPU of unknown peak). None for a run without such ranks.
    """
    chosen = run.derived.mla_cp_exchange
    if chosen is None:
        return None
    layers, micro_batches = run.derived.pipeline_layer_counts, run.derived.num_microbatches(world_size)
    stage = layers.index(max(layers))
    over_cp: dict[str, Traffic] = {}
    over_tp: dict[str, Traffic] = {}
    flops: dict[str, int] = {}
    for exchange in EXCHANGES:
        other = run
        if exchange != chosen:
            other = replace(run, mla_cp_exchange=exchange)
        (trace,) = traced(other, world_size, machine, known, stages=[stage])
        traffic = rank_traffic(other, trace, world_size, machine.gpus_per_node)
        over_cp[exchange] = traffic["CP"]
        over_tp[exchange] = traffic.get("TP", Traffic(0.0, 0.0))
        flops[exchange] = micro_batches * trace.flops
    least_over_tp = min(over_tp.values(), key=lambda one: one.sent)
    cost = exchange_cost(run, run.derived.params_dtype_name)
    ways: dict[str, Any] = {}
    for exchange in EXCHANGES:
        sent = Traffic(
            over_cp[exchange].sent + over_tp[exchange].sent - least_over_tp.sent,
            over_cp[exchange].between_nodes + over_tp[exchange].between_nodes - least_over_tp.between_nodes,
        )
        repeated = flops[exchange] - min(flops.values())
        seconds = None
        if machine.device != "cpu" or run.logging.peak_tflops is not None:
            seconds = sending_seconds(sent, machine) + repeated / (machine.mfu * machine.peak_tflops * 1e12)
        ways[exchange] = {
            "numbers": getattr(cost, exchange),
            **vars(sent),
            "flops": repeated,
            "seconds": seconds,
        }
    return {"chosen": chosen, "ranks": run.parallel.context_parallel_size, "ways": ways}
