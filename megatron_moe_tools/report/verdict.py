"""What a reader has to know first: how a run ended, what is good in it, and what needs attention, with what to do."""

from __future__ import annotations

import math
import time
from datetime import datetime

import numpy as np

from megatron_moe.io.texts import duration_text
from megatron_moe_tools.report.files import RunState

_SILENT_SECONDS, _SILENT_STEPS = 300.0, 20.0
_EVEN, _UNEVEN, _COLLAPSED = 1.5, 2.5, 0.25
_MANY_SKIPPED, _MUCH_LOST, _ENOUGH_STEPS = 0.01, 0.05, 100
_SKIPPED_IN_A_ROW = {False: 3, True: 40}  # by fp16, whose loss scale falls from 2^32 to 1 in that many
_MOST_TEXT = 200
_ENDED = {"failed": "failed", "killed": "was killed"}


def status_of(state: RunState) -> dict[str, str]:
    """Return `state` (finished, running, stopped, killed, failed, empty or unknown) and `text` for people.

    A run whose last attempt has no ending is running until its files have been silent for five minutes, and for twenty
    of its steps.
    """
    attempts = state.info.get("attempts") or []
    if not state.count and not attempts:
        return {"state": "empty", "text": "no step yet"}
    at = f"at iteration {state.last['iteration']:,}" if state.last else "before its first step"
    if not attempts:
        return {"state": "unknown", "text": f"{at}; it has no metrics.run.json, which says how a run ended"}
    ending = attempts[-1].get("ending")
    if ending is None:
        silent = _silent_seconds(state)
        each = state.seconds / state.count if state.count else 0.0
        if silent > max(_SILENT_SECONDS, _SILENT_STEPS * each):
            return {
                "state": "killed",
                "text": f"{at}: no ending was written, and nothing for {duration_text(silent)}",
            }
        return {"state": "running", "text": f"{at}, last heard of {duration_text(silent)} ago"}
    for word in ("finished", "stopped", "failed"):
        if str(ending).startswith(word):
            return {"state": word, "text": f"{at}{str(ending)[len(word) :]}"}
    return {"state": "stopped", "text": f"{at}: {ending}"}


def findings(state: RunState, status: dict[str, str]) -> list[dict[str, str]]:
    """Return what is good and what needs attention: level (bad, attention, good), text, do, chart, page."""
    found = [*_of_steps(state), *_of_loss(state, status), *_of_experts(state), *_of_attempts(state, status)]
    order = {"bad": 0, "attention": 1, "good": 2}
    return sorted(found, key=lambda finding: order[finding["level"]])


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


def _finding(level: str, text: str, chart: str, do: str = "", page: str = "") -> dict[str, str]:
    return {"level": level, "text": text, "chart": chart, "do": do, "page": page}


def _of_steps(state: RunState) -> list[dict[str, str]]:
    watch, found = state.watch, []
    if watch.not_finite:
        count = _count(watch.not_finite, "step")
        text = f"{count} had a loss that is NaN or infinite, the first at {watch.first_not_finite:,}"
        found.append(
            _finding(
                "bad", text, "loss", "see which batch, and whether --on-nan skips it", "reliability.md#r7-nan-and-inf"
            )
        )
    if watch.skipped:
        found.append(_of_skipped(state))
    if state.count and not watch.not_finite and not watch.skipped:
        found.append(_finding("good", "every step was finite and applied", "loss"))
    if watch.spike_count:
        places = ", ".join(f"{iteration:,}" for iteration, _ in list(watch.spikes)[-5:])
        text = f"the loss jumped {_count(watch.spike_count, 'time')}, last at {places}"
        do = "--loss-spike-factor keeps the batch of such a step; a lower --lr or more warm-up helps"
        found.append(_finding("attention", text, "loss", do, "reliability.md#what-happens-and-the-flag-for-it"))
    if watch.norm_spikes:
        text = f"the gradient norm was over 8 times its median at {_count(watch.norm_spikes, 'step')}"
        found.append(_finding("attention", text, "grad_norm", "look at the loss at the same steps"))
    if state.seconds and watch.seconds_lost > _MUCH_LOST * state.seconds:
        lost = f"{duration_text(watch.seconds_lost)} of {duration_text(state.seconds)}"
        text = f"{_count(watch.slow, 'slow step')} cost {lost}"
        do = "--timing-log-level 1 says which part of a step is slow"
        found.append(_finding("attention", text, "seconds", do, "gpu.md#host-synchronisation"))
    if state.bad_lines:
        found.append(_finding("attention", f"{_count(state.bad_lines, 'line')} of its files could not be read", "loss"))
    return found


def _of_skipped(state: RunState) -> dict[str, str]:
    """Return what the skipped steps mean: fp16 begins with some while its loss scale falls, others are faults."""
    watch, page = state.watch, "precision.md#a-step-is-a-transaction"
    text = f"{_count(watch.skipped, 'step')} of {state.count:,} skipped, the last at {watch.last_skipped or 0:,}"
    fp16 = (state.info.get("all_flags") or {}).get("fp16") or state.last.get("loss_scale", 1.0) != 1.0
    if watch.skipped_in_a_row > _SKIPPED_IN_A_ROW[bool(fp16)]:
        text = (
            f"the last {_count(watch.skipped_in_a_row, 'step')} were all skipped: nothing is learnt any more ({text})"
        )
        return _finding("bad", text, "grad_norm", "go back to a checkpoint before them, with a lower --lr", page)
    often = watch.skipped > _MANY_SKIPPED * state.count
    if fp16:
        do = "fp16 skips a few while it looks for its loss scale; many later mean overflow: try bf16 or a lower --lr"
        return _finding("attention" if often else "good", text, "loss_scale", do, page)
    do = "their loss or gradient was not finite: the events say where; a lower --lr helps if it is not the data"
    return _finding("bad" if often else "attention", text, "grad_norm", do, page)


def _of_loss(state: RunState, status: dict[str, str]) -> list[dict[str, str]]:
    losses = [loss for loss in state.course.rows().get("loss", {}).get("mean", []) if loss is not None]
    if not losses:
        return []
    valid = state.last_evaluation.get("valid", {}).get("loss")
    now = valid if valid is not None else losses[-1]
    which = "the validation loss" if valid is not None else "the loss"
    found = []
    entropy = (state.info.get("facts") or {}).get("unigram_entropy")
    if isinstance(entropy, (int, float)):
        if now < entropy:
            found.append(_finding("good", f"{which} is {entropy - now:.3f} below the unigram entropy", "loss"))
        else:
            text = f"{which}, {now:.3f}, is {now - entropy:.3f} above the unigram entropy: no context is used yet"
            late = state.count > _ENOUGH_STEPS and status["state"] == "finished"
            do = "normal in the first steps; later, check data, tokenizer and --lr"
            found.append(_finding("bad" if late else "attention", text, "loss", do))
    if losses[-1] > losses[0] and len(losses) > 1:
        text = f"the loss rose from {losses[0]:.3f} to {losses[-1]:.3f}"
        found.append(_finding("bad", text, "loss", "a lower --lr, more warm-up, or a check of the data"))
    elif len(losses) > 1:
        found.append(_finding("good", f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}", "loss"))
    return found


def _of_experts(state: RunState) -> list[dict[str, str]]:
    load = state.experts.load()
    if load is None:
        return []
    page = "balancing.md"
    layers = state.loads.layers
    dead = state.experts.dead().sum(axis=1)
    found = []
    if dead.any():
        worst = int(dead.argmax())
        count = _count(int(dead.sum()), "expert")
        text = f"{count} got no token lately, {int(dead[worst])} of them in layer {layers[worst]}"
        do = "raise --moe-router-bias-update-rate or the coefficient of an auxiliary loss"
        found.append(_finding("bad", text, "experts", do, page))
    shares = load / np.maximum(load.sum(axis=1, keepdims=True), 1e-9)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    effective = np.exp(-(shares * logs).sum(axis=1)) / load.shape[1]
    peak = load.max(axis=1)
    worst = int(peak.argmax())
    if effective.min() < _COLLAPSED:
        lowest = int(effective.argmin())
        text = f"layer {layers[lowest]} uses {100 * effective[lowest]:.0f} % of its experts: its load has collapsed"
        found.append(
            _finding("bad", text, "experts", "go back to a checkpoint before it, with stronger balancing", page)
        )
    elif peak[worst] > _UNEVEN:
        text = f"the fullest expert of layer {layers[worst]} gets {peak[worst]:.2f} times the mean"
        found.append(_finding("attention", text, "loads", "normal in the first steps; later, stronger balancing", page))
    elif peak[worst] < _EVEN and not dead.any():
        text = f"experts are evenly loaded: at most {peak[worst]:.2f} times the mean (layer {layers[worst]})"
        found.append(_finding("good", text, "loads"))
    return found


def _of_attempts(state: RunState, status: dict[str, str]) -> list[dict[str, str]]:
    attempts = state.info.get("attempts") or []
    found = []
    if len(attempts) > 1:
        broken = sum(attempt.get("ending") is None for attempt in attempts[:-1])
        text = f"{len(attempts)} attempts, {broken} of them killed"
        found.append(_finding("attention" if broken else "good", text, "attempts", "", "reliability.md"))
    faults = state.event_counts["fault"]
    if faults:
        last = next((event["text"] for event in reversed(state.events) if event["kind"] == "fault"), "")
        text = f"{_count(faults, 'fault')} recorded, the last: {last[:_MOST_TEXT]}{'...' * (len(last) > _MOST_TEXT)}"
        found.append(_finding("attention", text, "events", "the table of events has each", "reliability.md"))
    if status["state"] in ("failed", "killed"):
        do = "the same command goes on from the last checkpoint, where --save and --load are given"
        at = f" at iteration {state.last['iteration']:,}" if state.last else ""
        found.append(
            _finding("bad", f"the last attempt {_ENDED[status['state']]}{at}", "attempts", do, "reliability.md")
        )
    return found


def _silent_seconds(state: RunState) -> float:
    """Return the seconds since anything was written about the run."""
    try:
        latest = state.metrics_file.stat().st_mtime
    except OSError:
        latest = 0.0
    times = [attempt.get("start_time") for attempt in state.info.get("attempts") or []]
    for text in [*times, state.last.get("time")]:
        if isinstance(text, str):
            try:
                latest = max(latest, datetime.fromisoformat(text).timestamp())
            except ValueError:
                continue
    return max(0.0, time.time() - latest) if latest else math.inf
