"""The command line of megatron-moe plan: plan a run, print the plan as aligned text, and write it as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import shlex
import textwrap
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.cuda_graphs import captured_modules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, replace
from megatron_moe.hf.config import filled_in
from megatron_moe.io.files import replace_json, require_writable
from megatron_moe.io.program import DONE, FAILED, run_program, say
from megatron_moe.platform import host
from megatron_moe_tools import compat
from megatron_moe_tools.plan.layouts import (
    GIB,
    RECOMPUTATION,
    Machine,
    brief,
    layer_shardings,
    layouts,
    legal,
    no_layout,
    recomputed,
    require_legal,
    spelled,
    vocabulary,
)

if TYPE_CHECKING:
    from megatron_moe_tools.plan.tracing import RankTrace

NAME = "megatron-moe plan"
T = TypeVar("T", int, float)

_OF_SEARCH = {
    "node_bandwidth": "GB/s that a rank sends to its machine",
    "network_bandwidth": "GB/s that a rank sends to other machines",
    "host_bandwidth": "GB/s that a device exchanges with host memory",
    "memory_bandwidth": "GB/s that a device reads or writes of its own memory",
    "host_memory_gib": "memory of a machine, of which what is offloaded leaves a tenth",
}

_architecture = partial(filled_in, weights=False)  # no weight is read, so none has to be there

_logger = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags; all other flags are those of megatron-moe train."""
    p = Parser(
        prog=NAME,
        usage="%(prog)s --world-size N [--json FILE] [options] [the run's flags]",
        description="Plan a run: parameters, memory, traffic and speed of every rank, without starting any of them.",
        epilog="Exit status: 0 planned; 1 nothing fits --fit; 2 a mistake in the flags, or a layout that cannot be. "
        "Other flags, such as --preset deepseek-v3 --pipeline-model-parallel-size 16, are those of megatron-moe train.",
        allow_abbrev=False,
    )
    p.add_argument("--world-size", type=_positive(int), required=True, metavar="N", help="number of ranks")
    p.add_argument("--json", metavar="FILE", help="write the plan as JSON")
    p.add_argument(
        "--device",
        choices=host.DEVICE_KINDS,
        default=Machine.device,
        help=f"device that the run is planned for (default: {Machine.device})",
    )
    p.add_argument(
        "--gpus-per-node", type=_positive(int), default=8, metavar="N", help="ranks of one machine (default: 8)"
    )
    p.add_argument("--device-memory-gib", type=_positive(float), metavar="X", help="memory of a device (default: 80)")
    p.add_argument(
        "--fit",
        type=_positive(float),
        metavar="GIB",
        help="look for the fastest layout that leaves a tenth of a device of GIB free, and plan it; layout flags that "
        "are given are kept",
    )
    for name, what in _OF_SEARCH.items():
        default = getattr(Machine, name)
        p.add_argument(
            f"--{name.replace('_', '-')}",
            type=_positive(float),
            metavar="X",
            help=f"for --fit: {what} (default: {default:g})",
        )
    p.add_argument(
        "--mfu",
        type=_positive(float),
        default=0.4,
        metavar="X",
        help="assumed share of the peak (default: 0.4)",
    )
    p.add_argument(
        "--imbalance",
        type=_positive(float),
        default=1.0,
        metavar="X",
        help="rows that a rank's experts get, over the mean (default: 1)",
    )
    p.add_argument(
        "--mean-document-length",
        type=_positive(float),
        metavar="TOKENS",
        help="for --reset-attention-mask: count the attention of documents of this length (default: of sequences)",
    )
    p.add_argument("--alternatives", type=int, default=5, metavar="N", help="layouts nearby to show (default: 5)")
    return p


def main(argv: list[str]) -> int:
    """Print the plan and return the exit status."""
    return run_program(NAME, _main, argv, rank=0)


def _main(argv: list[str]) -> int:
    flags, rest = parser().parse_known_args(argv)
    require_writable("--json", flags.json)
    if flags.mfu > 1:
        raise ConfigError(f"--mfu {flags.mfu:g}: is a share of the peak, at most 1; e.g. --mfu 0.4")
    if flags.imbalance < 1:
        raise ConfigError(f"--imbalance {flags.imbalance:g}: is the most over the mean; use 1 or more")
    if flags.alternatives < 0:
        raise ConfigError(f"--alternatives {flags.alternatives}: is a number of layouts; 0 shows none")
    if flags.fit is not None and flags.device_memory_gib is not None:
        raise ConfigError(
            f"--fit {flags.fit:g}, --device-memory-gib {flags.device_memory_gib:g}: both are the memory of a device; "
            "keep --fit to look for a layout, or the other to plan the one that is given"
        )
    for name in _OF_SEARCH:
        value = getattr(flags, name)
        if flags.fit is None and value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value:g}: is read where layouts are compared by their time; add --fit "
                f"{Machine.memory_gib:g}, or drop it"
            )
    run = compat.parse(rest, _architecture, flags.world_size)
    if flags.mean_document_length is not None and not run.data.reset_attention_mask:
        raise ConfigError(
            f"--mean-document-length {flags.mean_document_length:g}: documents of a sequence see each other; add "
            "--reset-attention-mask, or drop it"
        )
    if flags.mean_document_length is None and run.data.reset_attention_mask:
        say("--reset-attention-mask: attention is counted over sequences; --mean-document-length N counts documents")
    instead: dict[str, Any] = {}  # our own parts, for those that cannot be traced without their tensors' values
    if run.model.transformer_impl != "local":
        instead |= {"transformer_impl": "local", "attention_softmax_in_fp32": True}
    if run.moe.num_experts is not None and run.moe.moe_expert_backend in ("te", "loop"):
        instead["moe_expert_backend"] = "grouped_mm"
    if run.precision.fp8_format is not None:
        say(f"--fp8-format {run.precision.fp8_format}: is planned as emulated, with its buffers; speed is that of bf16")
    if captured := captured_modules(run):
        say(f"--cuda-graph-impl local: the memory that graphs of {', '.join(captured)} keep is not counted")
    if instead:
        words = ""
        for name, value in instead.items():
            if value is not True:
                words += f" --{name.replace('_', '-')} {value}"
        say(f"planned with{words}: parameters and traffic are the same, memory and speed of other kernels are not")
    for note in run.warnings:
        say(note)
    run = replace(run, **instead)
    vocabulary(run)
    machine = Machine(
        device=flags.device,
        gpus_per_node=flags.gpus_per_node,
        memory_gib=flags.fit or flags.device_memory_gib or Machine.memory_gib,
        peak_tflops=run.logging.peak_tflops or Machine.peak_tflops,
        mfu=flags.mfu,
        imbalance=flags.imbalance,
        mean_document_length=flags.mean_document_length,
        **{name: getattr(flags, name) or getattr(Machine, name) for name in _OF_SEARCH},
    )
    if flags.fit is None:
        require_legal(run, flags.world_size)
    else:
        # All layouts train on the same batch, which the run would take as it is.
        batch = run.training.global_batch_size or max(1, run.derived.global_batch_size(flags.world_size))
        run = replace(run, global_batch_size=batch)
        shardings = layer_shardings(run, flags.world_size, machine)
        if next(layouts(run, flags.world_size, machine, shardings, 1.0), None) is None:
            raise no_layout(run, flags.world_size)
    with warnings.catch_warnings(), _progress():
        # The engine's advice is for those who wrote its configuration.
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        if flags.fit is None:
            plan = _plan(run, machine, flags)
        else:
            plan = _fit(run, machine, rest, flags)
    if flags.json is not None:
        replace_json(Path(flags.json), plan)
        say(f"wrote {flags.json}")
    if flags.fit is not None and not plan["fit"]["fits"]:
        return FAILED
    return DONE


def _fit(run: Run, machine: Machine, rest: list[str], flags: argparse.Namespace) -> dict[str, Any]:
    """Return the plan of the fastest layout that fits, or of the least; print it with the flags that ask for it."""
    from megatron_moe_tools.plan.fit import fitted_plan

    fitted, plan = fitted_plan(run, flags.world_size, machine, flags.alternatives)
    added = spelled(compat.parse(rest, _architecture, flags.world_size), fitted)
    # What is printed is what was planned: the same parser reads it, and the rules allow it.
    again = compat.parse([*rest, *added], _architecture, flags.world_size)
    assert spelled(again, fitted) == [], (added, spelled(again, fitted))
    rules.check_layout(again, flags.world_size)
    plan["fit"]["flags"] = [*rest, *added]
    found = plan["fit"]
    looked = f"{found['layouts']:,} layouts, {found['looked_at']:,} in detail, {found['planned']:,} planned as a whole"
    title = f"the fastest layout that fits, of {looked}:"
    if not found["fits"]:
        much = plan["max_memory_gib"] - found["limit_gib"]
        title = f"NOTHING FITS, of {looked}; the least is {much:,.2f} GiB too much:"
    # As a shell reads them; a flag and its values stay on one line.
    words = re.sub(" (?!--)", "\N{NO-BREAK SPACE}", shlex.join(found["flags"]))
    lines = textwrap.wrap(words, 113, break_long_words=False, break_on_hyphens=False)
    command = " \\\n  ".join(lines).replace("\N{NO-BREAK SPACE}", " ")
    blocks = [f"{title}\n\n  {command}", _head(plan), _memory(plan), _traffic(plan), _step(found)]
    if plan["mla_cp_exchange"] is not None:
        blocks.append(_exchanges(plan["mla_cp_exchange"]))
    rows = [["other layouts", "largest rank, GiB", "s a step", "loses by"]]
    for one in found["others"]:
        about = "" if one["planned"] else "about "
        rows.append([one["layout"], about + brief(one["max_memory_gib"]), brief(one["seconds"]), one["loses"]])
    if found["others"]:
        blocks.append(_table(rows))
    if found["advice"]:
        blocks.append("\n".join(found["advice"]))
    print("\n\n".join(blocks), flush=True)
    return plan


def _plan(run: Run, machine: Machine, flags: argparse.Namespace) -> dict[str, Any]:
    """Return the plan; its text is printed as soon as it is known, that of the comparisons after it."""
    # Not before the flags are right: loading torch and the engine takes seconds.
    from megatron_moe_tools.plan.latent_exchange import compared_exchanges
    from megatron_moe_tools.plan.plan import make_plan, peak_gib, ranked, recommended_stage

    known: dict[Hashable, RankTrace] = {}
    plan = make_plan(run, flags.world_size, machine, known)
    print(text_report(plan), end="", flush=True)
    _logger.info("comparing recomputation, routing and layouts nearby")
    plan["mla_cp_exchange"] = compared_exchanges(run, flags.world_size, machine, known)
    if plan["mla_cp_exchange"] is not None:
        print(f"\n{_exchanges(plan['mla_cp_exchange'])}", flush=True)
    plan["recomputation"] = {}
    for kind, modules in RECOMPUTATION.items():
        other = recomputed(run, modules)
        if legal(other, flags.world_size):
            plan["recomputation"][kind] = peak_gib(other, flags.world_size, machine, known)
    plan["imbalances"] = {}
    if run.moe.num_experts is not None and run.parallel.expert_model_parallel_size > 1:
        for imbalance in (flags.imbalance, 2 * flags.imbalance):
            skewed = dataclasses.replace(machine, imbalance=imbalance)
            plan["imbalances"][f"{imbalance:g}"] = peak_gib(run, flags.world_size, skewed, known)
    plan["alternatives"] = []
    if flags.alternatives > 0:
        plan["alternatives"] = ranked(run, flags.world_size, machine, flags.alternatives, known)
    plan["zero"] = recommended_stage(run, flags.world_size, machine, known)
    print(comparison_report(plan), end="", flush=True)
    return plan


@contextmanager
def _progress() -> Iterator[None]:
    """Print what the planner logs to stderr: a line at the beginning of each stage."""
    handler, package = logging.StreamHandler(), logging.getLogger(__package__)
    handler.setFormatter(logging.Formatter(f"{NAME}: %(message)s"))
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)


def _positive(kind: type[T]) -> Callable[[str], T]:
    """Return what converts a word to a number above 0, for a parser, which names the kind in its messages."""

    def convert(text: str) -> T:
        number = kind(text)
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: must be above 0")
        return number

    convert.__name__ = kind.__name__
    return convert


# ---- the plan as aligned text, for a terminal of 120 columns

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
_OF_A_STAGE = ("dense_params", "expert_params", "memory")


def text_report(plan: dict[str, Any]) -> str:
    """Return the text about the layout itself, for a terminal of 120 columns."""
    speed = (
        f"{brief(plan['model_flops_per_token'] / 1e9)} GFLOP a token (model), "
        f"{brief(plan['computed_flops_per_token'] / 1e9)} with what is computed again\n"
        f"pipeline bubble {plan['bubble_share']:.1%} of a step\n"
    )
    if plan["seconds_per_step"] is None:
        speed += "no speed of a CPU without --peak-tflops"
    else:
        speed += (
            f"at {plan['mfu']:.0%} of {plan['peak_tflops']:,g} TFLOP/s: {plan['tokens_per_second']:,.0f} tokens/s, "
            f"{brief(plan['seconds_per_step'])} s a step"
        )
        if plan["muon_share"]:
            speed += f", of it Muon's iteration {plan['muon_share']:.1%}"
    return "\n\n".join((_head(plan), _memory(plan), _traffic(plan), speed)) + "\n"


def comparison_report(plan: dict[str, Any]) -> str:
    """Return the text about other recomputation, other routing, neighbouring layouts and ZeRO's stages."""
    rows = [["recomputation", "largest rank, GiB"]]
    for kind, gib in plan["recomputation"].items():
        rows.append([kind, brief(gib)])
    for imbalance, gib in plan["imbalances"].items():
        rows.append([f"imbalance {imbalance}", brief(gib)])
    text = f"\n{_table(rows)}\n"
    if plan["alternatives"]:
        rows = [["nearest legal layouts, best first", "largest rank, GiB", "fits", "relative time"]]
        for row in plan["alternatives"]:
            fits = "yes" if row["fits"] else "no"
            rows.append([row["change"], brief(row["max_memory_gib"]), fits, f"{row['relative_time']:.3f}"])
        text += f"\n{_table(rows)}\n"
    found = plan["zero"]  # which ZeRO stage to take, and what ZeRO++ saves between machines with it
    chosen = f"{found['flags']} ({brief(found['max_memory_gib'])} GiB)"
    if not found["fits"]:
        return (
            f"{text}\nno ZeRO stage leaves a tenth of the device free; least takes {chosen}:\n"
            "more ranks, TP, EP, PP or recomputation are needed\n"
        )
    text += f"\nlowest ZeRO stage with a tenth of the device free: {chosen}\n"
    if found["switches"]:
        text += (
            f"a rank sends {_gib(found['between_nodes'])} GiB to other machines in a step with it, and "
            f"{_gib(found['between_nodes_with_switches'])} ({brief(found['max_memory_gib_with_switches'])} GiB) with\n"
            f"  {' '.join(found['switches'])}\n"
        )
    return text


def _exchanges(found: dict[str, Any]) -> str:
    """Return the table of what context-parallel ranks of latent attention may exchange."""
    columns = ("numbers of a token", "sent, GiB", "to other machines", "TFLOP", "s a step")
    rows = [[f"--mla-cp-exchange, {found['ranks']} CP ranks", *columns]]
    for name, way in found["ways"].items():
        numbers, sent = f"{way['numbers']:,}", (_gib(way["sent"]), _gib(way["between_nodes"]))
        words, seconds = name, "unknown"
        if name == found["chosen"]:
            words += ", as here"
        if way["seconds"] is not None:
            seconds = brief(way["seconds"])
        rows.append([words, numbers, *sent, brief(way["flops"] / 1e12), seconds])
    return f"{_table(rows)}\nnumbers of one layer; what a way sends and computes in addition, with nothing hidden"


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


def _head(plan: dict[str, Any]) -> str:
    words = ", ".join(f"{name} {value}" for name, value in plan["layout"].items())
    limit, room = plan["device_memory_gib"], f"{plan['device_memory_gib']:g}"
    if "fit" in plan:
        limit, room = plan["fit"]["limit_gib"], f"{plan['fit']['limit_gib']:g}, {room} less a tenth"
    fits = "fits" if plan["max_memory_gib"] <= limit else "DOES NOT FIT"
    saving, loading = plan["saving"], plan["loading"]
    how = "kept and page-locked (--async-save)" if saving["kept"] else "until the step is written"
    return (
        f"{brief(plan['total_params'] / 1e9)} B parameters ({plan['total_params']:,}), of which a token meets "
        f"{brief(plan['active_params'] / 1e9)} B\n"
        f"{plan['world_size']:,} ranks: {words.replace('_', ' ')}\n"
        f"{plan['micro_batches']} micro-batches a step, {plan['global_batch_size']:,} sequences in all\n"
        f"largest rank {brief(plan['max_memory_gib'])} GiB of {room}: {fits}\n"
        f"a save takes up to {_gib(saving['host_rank'])} GiB of host memory in a rank, {_gib(saving['host_node'])} on "
        f"a machine, {how}; a load {_gib(loading['host_rank'])} and {_gib(loading['host_node'])}"
    )


def _memory(plan: dict[str, Any]) -> str:
    parts = ("weights", "gradients", "optimizer", "activations", "peak")
    rows = [["stage", "ranks", "layers", "dense", "expert", *parts, "in flight", "logits", "dispatch"]]
    entries: list[dict[str, Any]] = []  # neighbouring stages of equal figures as one
    for rank in plan["ranks"]:
        last = entries[-1] if entries else {}
        if all(last.get(key) == rank[key] for key in _OF_A_STAGE):
            last["ranks"] = [last["ranks"][0], rank["ranks"][1]]
            last["stages"] = f"{last['stage']}-{rank['stage']}"
        else:
            entries.append({**rank, "stages": str(rank["stage"])})
    for entry in entries:
        memory = entry["memory"]
        row = [entry["stages"], f"{entry['ranks'][0]}-{entry['ranks'][1]}", str(len(entry["layers"]))]
        row += [f"{entry['dense_params'] / 1e6:,.1f} M", f"{entry['expert_params'] / 1e6:,.1f} M"]
        row += [_gib(memory[part]) for part in parts]
        rows.append([*row, str(memory["in_flight"]), _gib(memory["logits"]), _gib(memory["dispatch"])])
    host = max(entry["memory"]["host"] + entry["memory"]["host_activations"] for entry in plan["ranks"])
    told = f"\nwhat is offloaded takes {_gib(host)} GiB of a rank's host memory" if host else ""
    title = "Memory of a rank, in GiB; parameters of one rank; logits and dispatch are within the activations"
    return f"{title} (imbalance {plan['imbalance']:g})\n{_table(rows)}{told}"


def _traffic(plan: dict[str, Any]) -> str:
    worst: dict[str, dict[str, float]] = {}
    for rank in plan["ranks"]:
        for name, one in rank["traffic"].items():
            if one["sent"] > worst.get(name, {"sent": -1})["sent"]:
                worst[name] = one
    if not worst:
        return "Nothing is sent between ranks"
    rows = [["sent by a rank per step", "GiB", "of it to other machines, GiB"]]
    for name, one in worst.items():
        rows.append([name, _gib(one["sent"]), _gib(one["between_nodes"])])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text, the first column aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def _gib(size: float) -> str:
    return brief(size / GIB)
