"""Stage 5: pretrain_moe.py on one device: precisions, a NaN, saves, SIGTERM, resume, and whether bits repeat."""

import json
import math
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megatron_moe  # noqa: F401  (before the engine)
from megatron_moe.checkpoint.save import Saver
from megatron_moe.training import build as build_file
from megatron_moe.training import step as step_file
from tests.gpu.processes import ROOT, Child
from tests.gpu.stage import Stage
from tests.helpers.errors import worst

FLAGS = (
    "--preset tiny --mock-data --vocab-size 512 --seq-length 32 --max-position-embeddings 32 --eval-iters 0 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --log-interval 1"
)
PRECISIONS = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp16": ["--fp16", "--initial-loss-scale", "1024"],
    "bf16, moments on the host": ["--bf16", "--use-distributed-optimizer", "--optimizer-cpu-offload"],
    "bf16, activations on the host": [
        "--bf16",
        *("--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "1", "--offload-modules"),
        *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
    ],
    "bf16 with Muon, packed, on the host": [
        *("--bf16", "--optimizer", "muon", "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"),
        *("--use-distributed-optimizer", "--optimizer-cpu-offload", "--qk-clip", "--qk-clip-threshold", "0.05"),
    ],
    "bf16 at ZeRO stage 3": ["--bf16", "--use-torch-fsdp2", "--optimizer-cpu-offload"],
}
SPREAD = 1e-3
"""Largest relative spread of a loss over five equal fp32 runs that add in any order."""


def train(runs: list[tuple[str, list[str]]], fault: str, at: int) -> None:
    """Run pretrain_moe.py once for each folder, with its flags; one that fails leaves `failed` in its folder.

    In step `at` of each run the gradient gets a NaN ("nan"), or the process a SIGTERM ("term").
    """
    finalize, steps = step_file.finalize_model_grads, [0]

    def finalize_with_fault(*arguments: Any, **options: Any) -> Any:
        result = finalize(*arguments, **options)
        steps[0] += 1
        if steps[0] == at and fault == "nan":
            weight = next(one for name, one in arguments[0][0].named_parameters() if name.endswith("router.weight"))
            weight.main_grad.view(-1)[0] = torch.nan
        elif steps[0] == at and fault == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    step_file.finalize_model_grads = finalize_with_fault
    memory: list[tuple[str, int, int]] = []
    Saver.save = noting_memory(memory, "save", Saver.save)  # type: ignore[method-assign]
    build_file.load = noting_memory(memory, "load", build_file.load)
    for folder, argv in runs:
        sys.argv, steps[0] = ["pretrain_moe.py", *argv], 0
        memory.clear()
        try:
            runpy.run_path(str(ROOT / "pretrain_moe.py"), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                Path(folder, "failed").write_text(f"exit status {ended.code}")
        except Exception:
            Path(folder, "failed").write_text(traceback.format_exc()[-1500:])
        Path(folder, "memory.json").write_text(json.dumps(memory))


def noting_memory(memory: list[tuple[str, int, int]], what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function; its calls note by how many bytes the card's and this process's memory exceeded the start."""

    def noted(*arguments: Any, **options: Any) -> Any:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        Path("/proc/self/clear_refs").write_text("5")  # the process's peak is from now on
        card, own = torch.cuda.memory_allocated(), _resident("VmRSS")
        result = function(*arguments, **options)
        memory.append((what, torch.cuda.max_memory_allocated() - card, _resident("VmHWM") - own))
        return result

    return noted


def _resident(name: str) -> int:
    """Return bytes of /proc/self/status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def run_all(
    stage: Stage, steps: int, flags: dict[str, list[str]], fault: str = "", at: int = 0
) -> Callable[[str], list[dict[str, Any]]]:
    """Train up to `steps` for each folder, one run after another in one process: loading takes most time.

    Returns:
        A function: folder -> the metrics of each step that its runs made; RuntimeError where one failed.
    """
    folders = {name: stage.folder / name.replace(" ", "-").replace(",", "") for name in flags}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    argv = [*FLAGS.split(), "--train-iters", str(steps), "--metrics-file"]
    given = [(str(folders[name]), [*argv, str(folders[name] / "metrics.jsonl"), *flags[name]]) for name in flags]
    child = Child(train, (given, fault, at), stage.folder / "runs.log", stage.dry, {})
    status = child.wait(min(120.0, stage.left))
    child.end()

    def metrics(name: str) -> list[dict[str, Any]]:
        failed, metrics = folders[name] / "failed", folders[name] / "metrics.jsonl"
        if failed.exists() or status != 0 or not metrics.exists():
            reason = failed.read_text() if failed.exists() else f"status {status}"
            raise RuntimeError(f"{reason}: {child.last_output()}")
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    return metrics


def training(stage: Stage) -> None:
    steps = 4 if stage.dry else 20
    stage.doing(f"{steps} steps in {', '.join(PRECISIONS)}, one with a NaN")
    found = run_all(stage, steps, PRECISIONS, "nan", steps // 2)
    for precision in PRECISIONS:
        with stage.attempt(f"{steps} steps in {precision}, one with a NaN"):
            _with_a_nan(stage, steps, precision, found(precision))
    with stage.attempt("activations on the host"):
        plain, moved = ([line["loss"] for line in found(name)] for name in ("bf16", "bf16, activations on the host"))
        apart = max(abs(one - other) / one for one, other in zip(plain, moved, strict=True))
        stage.within("activations on the host: losses of those that stay", apart, SPREAD)
    with stage.attempt("interrupted and resumed"):
        _resumed(stage, steps)
    with stage.attempt("the spread of equal runs"):
        _spread(stage, steps)


def _with_a_nan(stage: Stage, steps: int, precision: str, metrics: list[dict[str, Any]]) -> None:
    at = steps // 2
    losses = {line["iteration"]: line["loss"] for line in metrics}
    stage.holds(
        f"{steps} steps in {precision}: finite losses that fall",
        sorted(losses) == list(range(1, steps + 1))
        and all(math.isfinite(loss) for loss in losses.values())
        and (stage.dry or losses[steps] < losses[1]),
        str(losses),
        first=losses.get(1),
        last=losses.get(steps),
    )
    skipped = [line["iteration"] for line in metrics if line.get("skipped")]
    # fp16 also skips the steps that its scale is too large for.
    stage.holds(f"a NaN in {precision} is skipped, and no other step", skipped == [at] or
                (precision == "fp16" and at in skipped), f"skipped {skipped}, not [{at}]")  # fmt: skip


def _resumed(stage: Stage, steps: int) -> None:
    """A run that SIGTERM ends and that goes on against one that was never interrupted."""
    middle = steps // 2
    flags = ["--bf16", "--use-distributed-optimizer", "--deterministic-mode"]
    saving = ["--save", str(stage.folder / "parts" / "steps"), "--load", str(stage.folder / "parts" / "steps")]
    saving += ["--async-save", "--save-interval", "2", "--exit-signal-handler"]
    first = run_all(stage, steps, {"parts": [*flags, *saving]}, "term", middle)("parts")
    stage.holds("SIGTERM saves and stops", first and first[-1]["iteration"] == middle, f"at {first[-1:]}, not {middle}")
    again = {"whole": [*flags, "--save", str(stage.folder / "whole" / "steps")], "parts": [*flags, *saving]}
    found = run_all(stage, steps, again)
    whole, parts = found("whole"), found("parts")
    stage.holds("the resumed run goes on where it stopped", [line["iteration"] for line in parts] ==
                list(range(1, steps + 1)), str([line["iteration"] for line in parts]))  # fmt: skip
    for name in ("whole", "parts"):
        for what, card, host in json.loads((stage.folder / name / "memory.json").read_text()):
            stage.figure(f"memory of a {what}, beyond what was there", card_bytes=card, host_bytes=host)
    apart = {
        f"{key} of step {a['iteration']}": abs(a[key] - b[key]) / max(abs(a[key]), 1e-30)
        for a, b in zip(whole, parts)
        for key in ("loss", "grad_norm")
    }
    which = worst(apart)
    stage.within("interrupted and resumed: the bits of one run (--deterministic-mode)", apart[which], 0.0, which)
    saved = sorted(path.name for path in (stage.folder / "parts" / "steps").iterdir() if path.is_dir())
    stage.holds("background saves", len([name for name in saved if name.startswith("iter")]) >= 2, str(saved))


def _spread(stage: Stage, steps: int) -> None:
    """Without the deterministic mode, what adding in another order does to five equal runs."""
    number = 2 if stage.dry else 5
    found = run_all(stage, steps, {f"equal{one}": [] for one in range(number)})
    last = [found(f"equal{one}")[-1]["loss"] for one in range(number)]
    apart = {f"runs {i} and {k}": abs(a - b) / abs(a) for i, a in enumerate(last) for k, b in enumerate(last)}
    stage.within(f"spread of {number} equal runs in fp32", apart[worst(apart)], SPREAD, distinct=len(set(last)))
