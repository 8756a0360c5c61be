"""Measures the oracle and every layout, and compares them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from megatron_moe.config import rules
from megatron_moe.config.schema import Run, flatten
from megatron_moe.report.run_info import versions
from megatron_moe_tools.doctor.assemble import AssembledModel, assemble
from megatron_moe_tools.doctor.compare import compare, matching_patterns, rounding_error, tolerances_of
from megatron_moe_tools.doctor.default_layouts import MODELS
from megatron_moe_tools.doctor.layouts import Layout, LayoutChoice, oracle_run
from megatron_moe_tools.doctor.measure import MeasuringRanks, Request
from megatron_moe_tools.doctor.report import DoctorReport, LayoutFinding, log_line
from megatron_moe_tools.doctor.small_copy import PADDED_VOCABULARY, changed_fields
from megatron_moe_tools.launch.local_ranks import RankFailure

# In fp32 scores of two layouts differ by some 1e-7; a choice with a smaller margin than this proves nothing.
CLEAR_MARGIN = 1e-5
_SEEDS, _CANDIDATES = 6, 1024

Log = Callable[[str], None]


def check_layouts(own: Run, copy: Run, choice: LayoutChoice, steps: int, seconds: float, log: Log) -> DoctorReport:
    """Measure the oracle and every layout, and compare each as soon as it is measured.

    Args:
        own: the run as the flags give it.
        copy: its small copy.
        choice: the layouts.
        steps: optimizer steps of each layout.
        seconds: a layout that takes longer has hung.
        log: called with lines of progress.

    Raises:
        RankFailure: the oracle itself could not be measured.
    """
    began, layouts = time.monotonic(), choice.layouts
    ranks = max(layout.ranks for layout in layouts)
    size = "num_layers hidden_size num_experts seq_length global_batch_size".split()
    sizes = ", ".join(f"{name} {flatten(copy)[name]}" for name in size)
    models = [name for name in dict.fromkeys(layout.model for layout in layouts) if name]
    log(f"small copies of models: {', '.join(models)}; demo: {sizes}" if models else f"a small copy in fp32: {sizes}")
    if choice.reduced_from:
        log(f"the layout in use ({choice.reduced_from}), at size 2 and at most {ranks} ranks")
    log(f"starting {ranks} processes for {len(layouts)} layouts; nothing leaves this machine, no GPU is used")
    report = DoctorReport(
        {
            "flags": _changed(own),
            "layout_in_use": choice.reduced_from,
            "shrunk": {name: list(pair) for name, pair in changed_fields(own, copy).items()},
            "features": sorted(frozenset().union(*(layout.features for layout in layouts))),
            "models": {name: MODELS[name] for name in models},
            "steps": steps,
            "versions": versions(),
            "oracles": [],
        },
        refused=choice.refused,
    )
    with MeasuringRanks(ranks, seconds) as pool:
        oracles: dict[tuple[Run, bool, str], tuple[AssembledModel, Request]] = {}
        for number, layout in enumerate(layouts, start=1):
            key = layout.copy, layout.masked, layout.run.derived.params_dtype_name
            if key not in oracles:
                oracles[key] = _oracle(pool, layout, steps, log)
                report.about["oracles"].append(_about_oracle(layout, *oracles[key]))
            finding = _examine(pool, *oracles[key], layout)
            report.findings.append(finding)
            log(log_line(number, len(layouts), finding))
    for layout, rule in choice.refused:
        log(f"not tried: {layout.name}: {rule}")
    log(f"{time.monotonic() - began:.0f} s")
    return report


def _oracle(pool: MeasuringRanks, layout: Layout, steps: int, log: Log) -> tuple[AssembledModel, Request]:
    """Return the result of one process, on the first samples whose choices of experts all have a clear margin.

    Where the layout is in half precision, each step's samples are picked from many: two runs may differ in a logit by
    what roundings add up to, in a score by a quarter of that, and two scores decide a choice.
    """
    run, dtype = oracle_run(layout.copy), layout.run.derived.params_dtype_name
    rules.check(run, 1)
    half = dtype != "float32"
    clear = max(CLEAR_MARGIN, rounding_error(layout.run) / 2)
    best: tuple[AssembledModel, Request] | None = None
    for seed in range(_SEEDS):
        gradients_at = tuple(range(1, steps + 1))
        request = Request(
            run, PADDED_VOCABULARY, steps, gradients_at, seed, layout.masked, dtype, _CANDIDATES if half else 0
        )
        (record,) = pool.measure(request, 1)
        whole = assemble([record])
        if best is None or whole.smallest_margin > best[0].smallest_margin:
            best = whole, dataclasses.replace(request, candidates=0, picked=tuple(record["picked"]))
        if whole.smallest_margin >= clear:
            break
    assert best is not None
    margin = best[0].smallest_margin
    closest = "" if math.isinf(margin) else f"; the closest choice of an expert is decided by {margin:.1e}"
    losses = ", ".join(f"{step['loss']:.5f}" for step in best[0].steps)
    what = [layout.model, "" if layout.masked else "a loss on every token"]
    if half:
        own = run.derived.params_dtype_name
        what.append(f"in {own}" if own == dtype else f"in {own} from weights in {dtype}")
    about = "".join(f", {text}" for text in what if text)
    log(f"the oracle, one process{about}: losses {losses}{closest}")
    if margin < clear:
        log(f"that is less than {clear:.0e}: counts may differ by a choice without any fault of a layout")
    return best


def _about_oracle(layout: Layout, oracle: AssembledModel, request: Request) -> dict[str, object]:
    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "model": layout.model,
        "dtype": request.run.derived.params_dtype_name,
        "masked": request.masked,
        "data_seed": request.data_seed,
        "losses": [step["loss"] for step in oracle.steps],
        "gradient_norms": [known(step["grad_norm"]) for step in oracle.steps],
        "loss_scales": [step["loss_scale"] for step in oracle.steps],
        "steps_applied": [step["committed"] for step in oracle.steps],
        "smallest_margin": known(oracle.smallest_margin),
    }


def _examine(pool: MeasuringRanks, oracle: AssembledModel, request: Request, layout: Layout) -> LayoutFinding:
    began = time.monotonic()
    asked = dataclasses.replace(request, run=layout.run)
    try:
        whole = assemble(pool.measure(asked, layout.ranks))
    except RankFailure as failure:
        return LayoutFinding(layout, time.monotonic() - began, error=str(failure))
    comparison = compare(whole, oracle, tolerances_of(layout.run))
    fits = matching_patterns(whole, oracle, comparison, one_process=not layout.masked)
    return LayoutFinding(layout, time.monotonic() - began, comparison, fits)


def _changed(run: Run) -> dict[str, object]:
    defaults = flatten(Run())
    return {name: value for name, value in flatten(run).items() if value != defaults[name]}
