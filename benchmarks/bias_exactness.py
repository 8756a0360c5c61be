"""How often the expert bias moves the wrong way: megatron-core's counts in bf16 beside ours, against exact integers.

Run from the repository's root:

    python -m benchmarks.bias_exactness            # two minutes on 2 cores
    python -m benchmarks.bias_exactness --quick    # fewer steps

Three parts. In the first, the engine's own router in the engine's own Float16Module and ours in ours route the same
tokens on 2 and 4 gloo ranks; each then takes its own path from counts to bias. In the second, token counts of many
ranks are drawn, rounded as the engine's buffer rounds them, added up in bf16 in the orders of a tree and of a ring, and
handed to the engine's own `get_updated_expert_bias`. The third repeats the sum that Megatron-LM's pull request 7081
reports. Nothing in the engine's classes is replaced; the platform's adaptor lets them run without a GPU.

An update is wrong where its sign is not that of `total - E x count` in integers: swallowed where it is 0 instead,
reversed where it is the opposite, invented where 0 was right.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import megatron_moe
from megatron_moe.config.schema import Run
from megatron_moe.parallel import groups

RATE = 1e-3
TOKENS = 4096
"""Tokens of a micro-batch; one micro-batch per rank and step."""


@dataclass
class Tally:
    """Updates seen, and how many were wrong. step is the largest |change| of a bias that was 0."""

    updates: int = 0
    swallowed: int = 0
    reversed: int = 0
    invented: int = 0
    step: float = 0.0

    def add(self, change: Tensor, direction: Tensor) -> None:
        """Take one step: the bias's change from 0, [E], and its right sign, [E] int64."""
        sign = torch.sign(change).long()
        self.updates += sign.numel()
        self.swallowed += int(((sign == 0) & (direction != 0)).sum())
        self.reversed += int((sign * direction < 0).sum())
        self.invented += int(((sign != 0) & (direction == 0)).sum())
        self.step = max(self.step, float(change.abs().max()))

    @property
    def wrong(self) -> float:
        """Share of wrong updates."""
        return (self.swallowed + self.reversed + self.invented) / max(self.updates, 1)


@dataclass
class Row:
    """One line of the table: the same steps by the engine's way and by ours."""

    ranks: int
    sums: str
    experts: int
    topk: int
    spread: float
    stock: Tally
    ours: Tally


def right_direction(counts: Tensor) -> Tensor:
    """The sign of every update, from exact counts [E] int64."""
    return torch.sign(counts.sum() - counts * counts.numel())


def relative_spread(counts: Tensor) -> float:
    """Standard deviation over mean of exact counts [E]."""
    return float(counts.double().std(correction=0) / counts.double().mean())


# ---- part 1: both routers, on real ranks


def build_routers(experts: int, topk: int, pg_collection: Any) -> tuple[Any, Any]:
    """The engine's router and ours, each in its Float16Module, with a gate that hands on its input as the logits."""
    from megatron.core.transformer.module import Float16Module as EngineFloat16Module
    from megatron.core.transformer.moe.router import TopKRouter as EngineRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=experts,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=RATE,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    wrapped = []
    for router_class, wrapper in (
        (EngineRouter, EngineFloat16Module),
        (megatron_moe.TopKRouter, megatron_moe.Float16Module),
    ):
        router = router_class(config, pg_collection=pg_collection)
        with torch.no_grad():
            router.weight.copy_(torch.eye(experts))
        wrapped.append(wrapper(config, router).train())
    return wrapped[0], wrapped[1]


def routed_steps(experts: int, topk: int, skew: float, steps: int, pg_collection: Any) -> tuple[Tally, Tally, float]:
    """Steps of one micro-batch per rank from a bias of 0; the tallies of both, and the mean spread of the loads."""
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

    from megatron_moe.training.finalize_model_grads import update_routers

    stock, ours = build_routers(experts, topk, pg_collection)
    tallies, spreads = (Tally(), Tally()), []
    preferences = skew * torch.randn(experts, generator=torch.Generator().manual_seed(experts))
    for step in range(steps):
        draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        # The K largest of preference plus Gumbel noise: experts drawn without replacement, by preference.
        noise = -torch.log(-torch.log(torch.rand(TOKENS, experts, generator=draw).clamp(1e-7, 1 - 1e-7)))
        hidden = (preferences + noise).unsqueeze(1)
        exact = torch.zeros(experts, dtype=torch.int64)
        for wrapper in (stock, ours):
            wrapper.module.expert_bias.zero_()
            _, routing_map = wrapper.module(hidden)
            counted = routing_map.sum(dim=0)
            assert wrapper is stock or torch.equal(counted, exact), "both have to route alike"
            exact = counted
        dist.all_reduce(exact)
        _update_router_expert_bias([stock], stock.config)
        stock.module.local_tokens_per_expert.zero_()  # as the engine's finalize_model_grads does
        update_routers([ours])
        spreads.append(relative_spread(exact))
        for wrapper, tally in zip((stock, ours), tallies):
            tally.add(wrapper.module.expert_bias, right_direction(exact))
    return *tallies, sum(spreads) / len(spreads)


def rank_main(rank: int, world: int, store: str, cases: Sequence[tuple[int, int, float]], steps: int, out: str) -> None:
    """One gloo rank of part 1; rank 0 writes its rows, which are every rank's, as JSON."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    pg_collection = groups.initialize(Run())
    rows = []
    for experts, topk, skew in cases:
        stock, ours, spread = routed_steps(experts, topk, skew, steps, pg_collection)
        rows.append(asdict(Row(world, "gloo", experts, topk, spread, stock, ours)))
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    groups.destroy()


def real_ranks(world: int, cases: Sequence[tuple[int, int, float]], steps: int) -> list[Row]:
    """Part 1 on `world` gloo ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows.json"
        mp.spawn(rank_main, (world, f"{folder}/store", list(cases), steps, out), nprocs=world)
        rows = json.loads(Path(out).read_text())
    return [Row(**{**row, "stock": Tally(**row["stock"]), "ours": Tally(**row["ours"])}) for row in rows]


# ---- part 2: many ranks, simulated


def tree_sum(parts: Tensor) -> Tensor:
    """Sum of bf16 [N, E] over N = 2^k ranks, neighbours first, every partial sum rounded to bf16."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def ring_sum(parts: Tensor) -> Tensor:
    """Sum of bf16 [N, E] over N ranks, one after the other; each N-th of the experts starts at another rank."""
    ranks, experts = parts.shape
    start = torch.arange(experts) * ranks // experts
    total = parts[start, torch.arange(experts)]
    for hop in range(1, ranks):
        total = total + parts[(start + hop) % ranks, torch.arange(experts)]
    return total


SUMS: dict[str, Callable[[Tensor], Tensor]] = {"tree": tree_sum, "ring": ring_sum}


def simulated(ranks: int, experts: int, topk: int, skew: float, steps: int) -> Iterator[Row]:
    """Part 2: a row for each order of summation. Needs process groups of one rank for the engine's all-reduce."""
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    from megatron_moe.moe.load_balance import updated_expert_bias

    draw = np.random.default_rng(ranks * experts)
    loads = np.exp(skew * draw.standard_normal(experts))
    tallies = {name: (Tally(), Tally()) for name in SUMS}
    spreads = []
    for _ in range(steps):
        local = torch.from_numpy(draw.multinomial(TOKENS * topk, loads / loads.sum(), size=ranks))
        exact = local.sum(dim=0)
        buffer = torch.zeros(ranks, experts, dtype=torch.bfloat16)
        buffer += local  # as the engine's router counts
        spreads.append(relative_spread(exact))
        zeros, right = torch.zeros(experts), right_direction(exact)
        counts = local.to(torch.float32).to(torch.int64).sum(dim=0)  # as ours does
        for name, add_up in SUMS.items():
            tallies[name][0].add(get_updated_expert_bias(add_up(buffer)[None], zeros[None], RATE)[0], right)
            tallies[name][1].add(updated_expert_bias(zeros, counts, RATE), right)
    for name, (stock, ours) in tallies.items():
        yield Row(ranks, name, experts, topk, sum(spreads) / len(spreads), stock, ours)


# ---- part 3: the figures of pull request 7081


def pull_request_7081() -> dict[str, Any]:
    """64 local counts between 608 and 676 that add up to 40,840, in bf16 sums of two orders.

    The pull request gives the range, the exact sum, and 41,216 in one order and 40,704 in another; not the 64 counts.
    These are drawn until the two orders here give the same two figures.
    """
    for seed in range(1_000_000):
        draw = np.random.default_rng(seed)
        counts = draw.integers(608, 677, size=64)
        counts[:2] = 608, 676
        counts[2] += 40_840 - counts.sum()
        if not 608 <= counts[2] <= 676:
            continue
        local = torch.from_numpy(counts)[:, None]
        buffer = torch.zeros(64, 1, dtype=torch.bfloat16)
        buffer += local
        sums = {"tree": int(tree_sum(buffer)), "ring": int(ring_sum(buffer)), "exact": int(local.sum())}
        if {sums["tree"], sums["ring"]} == {41_216, 40_704}:
            return {"seed": seed, **sums}
    raise AssertionError("no such counts were found")


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| ranks | sum | experts | top-k | spread of loads | stock: wrong (swallowed, reversed) | ours: wrong "
        "| stock: step | ours: step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        stock, n = row.stock, max(row.stock.updates, 1)
        lines.append(
            f"| {row.ranks} | {row.sums} | {row.experts} | {row.topk} | {100 * row.spread:.1f} % "
            f"| {100 * stock.wrong:.1f} % ({100 * stock.swallowed / n:.1f}, {100 * stock.reversed / n:.1f}) "
            f"| {100 * row.ours.wrong:g} % of {row.ours.updates} | {stock.step:.10f} | {row.ours.step:.10f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts and print the table."""
    parser = argparse.ArgumentParser(description="expert bias updates: megatron-core's bf16 counts beside ours")
    parser.add_argument("--quick", action="store_true", help="a fifth of the steps")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    steps = 2 if options.quick else 10
    print(f"megatron-core {version('megatron-core')}, torch {torch.__version__}", flush=True)
    print(f"{TOKENS} tokens per rank and step, {steps} steps, update rate {RATE}", flush=True)
    routed = [(64, 8, skew) for skew in (0.04, 0.01, 0.0)] + [(16, 4, 0.01)]
    rows = [row for world in (2, 4) for row in real_ranks(world, routed, steps)]
    groups.initialize(Run())
    for ranks in (64, 512):
        for experts, topk in ((64, 8), (256, 8)):
            for skew in (0.03, 0.01, 0.003):
                rows += simulated(ranks, experts, topk, skew, steps)
    found = pull_request_7081()
    groups.destroy()
    print(table(rows))
    print(f"\n64 counts of 608 to 676: exact sum {found['exact']:,}, in bf16 {found['tree']:,} (tree), "
          f"{found['ring']:,} (ring); mean load 40,960")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "pull_request_7081": found}))


if __name__ == "__main__":
    main()
