"""A plan as aligned text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_moe_tools.plan.layouts import GIB

_STEP = {
    "compute": "products of the model",
    "recomputed": "recomputation",
    "tensor": "collectives of TP and CP",
    "expert": "exchanges of EP",
    "pipeline": "messages of PP",
    "bubble": "waiting at both ends of the pipeline",
    "data": "data parallelism",
    "muon": "Muon's exchange and iteration",
    "host": "to host memory and back",
}
"""The parts of `StepTime` in words."""
_PARTS = ("weights", "gradients", "optimizer", "activations")


def text_report(plan: dict[str, Any]) -> str:
    """Return the text about the layout itself, for a terminal of 120 columns."""
    return "\n\n".join((_head(plan), _memory(plan), _traffic(plan), _speed(plan))) + "\n"


def comparison_report(plan: dict[str, Any]) -> str:
    """Return the text about other recomputation, other routing, neighbouring layouts and ZeRO's stages."""
    return "".join(f"\n{block}\n" for block in (_choices(plan), _alternatives(plan), _recommended(plan)) if block)


def fit_report(plan: dict[str, Any], flags: str) -> str:
    """Return the text about a layout that was looked for: its flags, plan and time, and how others lose against it."""
    found = plan["fit"]
    looked = f"{found['layouts']:,} layouts, {found['looked_at']:,} in detail, {found['planned']:,} planned as a whole"
    if found["fits"]:
        title = f"the fastest layout that fits, of {looked}:"
    else:
        much = plan["max_memory_gib"] - found["limit_gib"]
        title = f"NOTHING FITS, of {looked}; the least is {much:,.2f} GiB too much:"
    blocks = [f"{title}\n\n  {flags}", _head(plan), _memory(plan), _traffic(plan), _step(found), _others(found)]
    return "\n\n".join(block for block in [*blocks, "\n".join(found["advice"])] if block) + "\n"


def _step(found: dict[str, Any]) -> str:
    seconds, on = found["seconds"], found["assumed"]
    rows = [["estimated time of a step", "s", "share"]]
    for name, one in seconds.items():
        if one and name != "step":
            rows.append([_STEP[name], brief(one), f"{one / seconds['step']:.1%}"])
    return (
        f"{_table(rows)}\n"
        f"together {brief(seconds['step'])} s, {found['tokens_per_second']:,.0f} tokens/s, assumed, not measured:\n"
        f"products at {on['mfu']:.0%} of {on['peak_tflops']:,g} TFLOP/s; GB/s of a rank: {on['node_bandwidth']:,g} "
        f"to its machine, {on['network_bandwidth']:,g} to others, {on['host_bandwidth']:,g} to host memory;\n"
        f"what is recomputed is written and read at {on['memory_bandwidth']:,g} GB/s; {found['hidden']}"
    )


def _others(found: dict[str, Any]) -> str:
    rows = [["other layouts", "largest rank, GiB", "s a step", "loses by"]]
    for one in found["others"]:
        gib = ("" if one["planned"] else "about ") + brief(one["max_memory_gib"])
        rows.append([one["layout"], gib, brief(one["seconds"]), one["loses"]])
    return _table(rows) if len(rows) > 1 else ""


def _head(plan: dict[str, Any]) -> str:
    words = ", ".join(f"{name} {value}" for name, value in plan["layout"].items())
    limit, room = plan["device_memory_gib"], f"{plan['device_memory_gib']:g}"
    if "fit" in plan:
        limit, room = plan["fit"]["limit_gib"], f"{plan['fit']['limit_gib']:g}, {room} less a tenth"
    fits = "fits" if plan["max_memory_gib"] <= limit else "DOES NOT FIT"
    saving = plan["saving"]
    how = "kept and page-locked (--async-save)" if saving["kept"] else "until the step is written"
    return (
        f"{brief(plan['total_params'] / 1e9)} B parameters ({plan['total_params']:,}), of which a token meets "
        f"{brief(plan['active_params'] / 1e9)} B\n"
        f"{plan['world_size']:,} ranks: {words.replace('_', ' ')}\n"
        f"{plan['micro_batches']} micro-batches a step, {plan['global_batch_size']:,} sequences in all\n"
        f"largest rank {brief(plan['max_memory_gib'])} GiB of {room}: {fits}\n"
        f"a save takes up to {_gib(saving['host_rank'])} GiB of host memory in a rank, {_gib(saving['host_node'])} on "
        f"a machine, {how}"
    )


def _memory(plan: dict[str, Any]) -> str:
    rows = [["stage", "ranks", "layers", "dense", "expert", *_PARTS, "peak", "in flight", "logits", "dispatch"]]
    for entry in _distinct(plan["ranks"]):
        memory = entry["memory"]
        rows.append(
            [
                entry["stages"],
                f"{entry['ranks'][0]}-{entry['ranks'][1]}",
                str(len(entry["layers"])),
                f"{entry['dense_params'] / 1e6:,.1f} M",
                f"{entry['expert_params'] / 1e6:,.1f} M",
                *(_gib(memory[part]) for part in (*_PARTS, "peak")),
                str(memory["in_flight"]),
                *(_gib(memory[part]) for part in ("logits", "dispatch")),
            ]
        )
    host = max(entry["memory"]["host"] + entry["memory"]["host_activations"] for entry in plan["ranks"])
    told = f"\nwhat is offloaded takes {_gib(host)} GiB of a rank's host memory" if host else ""
    title = "Memory of a rank, in GiB; parameters of one rank; logits and dispatch are within the activations"
    return f"{title} (imbalance {plan['imbalance']:g})\n{_table(rows)}{told}"


def _distinct(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ranks' entries with neighbouring stages of equal figures as one."""
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        same = ("dense_params", "expert_params", "memory")
        if rows and all(rows[-1][key] == rank[key] for key in same):
            rows[-1]["ranks"] = [rows[-1]["ranks"][0], rank["ranks"][1]]
            rows[-1]["stages"] = f"{rows[-1]['stage']}-{rank['stage']}"
        else:
            rows.append({**rank, "stages": str(rank["stage"])})
    return rows


def _choices(plan: dict[str, Any]) -> str:
    rows = [["recomputation", "largest rank, GiB"]]
    rows += [[kind, brief(gib)] for kind, gib in plan["recomputation"].items()]
    rows += [[f"imbalance {imbalance}", brief(gib)] for imbalance, gib in plan["imbalances"].items()]
    return _table(rows)


def _traffic(plan: dict[str, Any]) -> str:
    worst: dict[str, dict[str, float]] = {}
    for rank in plan["ranks"]:
        for name, one in rank["traffic"].items():
            if one["sent"] > worst.get(name, {"sent": -1})["sent"]:
                worst[name] = one
    if not worst:
        return "Nothing is sent between ranks"
    rows = [["sent by a rank per step", "GiB", "of it to other machines, GiB"]]
    rows += [[name, _gib(one["sent"]), _gib(one["between_nodes"])] for name, one in worst.items()]
    return _table(rows)


def _speed(plan: dict[str, Any]) -> str:
    lines = [
        f"{brief(plan['model_flops_per_token'] / 1e9)} GFLOP a token (model), "
        f"{brief(plan['computed_flops_per_token'] / 1e9)} with what is recomputed",
        f"pipeline bubble {plan['bubble_share']:.1%} of a step",
    ]
    seconds, muon = plan["seconds_per_step"], plan["muon_share"]
    if seconds is None:
        lines.append("no speed of a CPU without --peak-tflops")
    else:
        lines.append(
            f"at {plan['mfu']:.0%} of {plan['peak_tflops']:,g} TFLOP/s: "
            f"{plan['tokens_per_second']:,.0f} tokens/s, {brief(seconds)} s a step"
            + (f", of it Muon's iteration {muon:.1%}" if muon else "")
        )
    return "\n".join(lines)


def _alternatives(plan: dict[str, Any]) -> str:
    if not plan["alternatives"]:
        return ""
    rows = [["nearest legal layouts, best first", "largest rank, GiB", "fits", "relative time"]]
    for row in plan["alternatives"]:
        fits = "yes" if row["fits"] else "no"
        rows.append([row["change"], brief(row["max_memory_gib"]), fits, f"{row['relative_time']:.3f}"])
    return _table(rows)


def _recommended(plan: dict[str, Any]) -> str:
    """Return which ZeRO stage to take, and what ZeRO++ saves between machines with it."""
    found = plan["zero"]
    chosen = f"--data-parallel-sharding-strategy {found['strategy']} ({brief(found['max_memory_gib'])} GiB)"
    if not found["fits"]:
        return (
            f"no ZeRO stage leaves a tenth of the device free; least takes {chosen}:\n"
            "more ranks, TP, EP, PP or recomputation are needed"
        )
    lines = [f"lowest ZeRO stage with a tenth of the device free: {chosen}"]
    if found["switches"]:
        with_switches = brief(found["max_memory_gib_with_switches"])
        lines.append(
            f"a rank sends {_gib(found['between_nodes'])} GiB to other machines in a step with it, and "
            f"{_gib(found['between_nodes_with_switches'])} ({with_switches} GiB) with\n  " + " ".join(found["switches"])
        )
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text, the first column aligned to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def brief(number: float) -> str:
    """Return a number with two decimals, or with two digits where these would say nothing."""
    return f"{number:,.2f}" if number >= 0.1 or not number else f"{number:.2g}"


def _gib(size: float) -> str:
    return brief(size / GIB)
