"""Published silent bugs that `megatron-moe doctor --target` finds in the installed releases, and the seconds it takes.

Run from the repository's root, on CPUs:

    python -m benchmarks.doctor_published_bugs                    # a quarter of an hour on 2 cores
    python -m benchmarks.doctor_published_bugs --only 5916 48805  # parts of threads' names

Each row is one command on 2 ranks, with one check. A bug that the installed release no longer has must not be found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_moe.engine.defects import engine_version, known_defects

ROOT = Path(__file__).resolve().parent.parent
MEGATRON_MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --swiglu --normalization RMSNorm"
    " --position-embedding-type rope --disable-bias-linear --seq-length 64 --max-position-embeddings 64"
    " --micro-batch-size 1 --lr 1e-3 --untie-embeddings-and-output-weights"
)
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 8, "norm_topk_prob": True,
}  # fmt: skip


@dataclass(frozen=True)
class Bug:
    """A bug: its public thread, the check that finds it, and what to add to the small model's file to meet it.

    Attributes:
        added: flags of Megatron-LM, or keys of a YAML file for transformers.
        defect: its id in engine_defects.yaml, which knows the releases that have it. Empty: the installed ones do.
        fixed: whether the installed release of transformers no longer has it.
    """

    thread: str
    check: str
    added: str | dict[str, Any]
    defect: str = ""
    fixed: bool = False

    def is_expected(self) -> bool:
        """Return whether the installed release has the bug."""
        for known in known_defects():
            if known.id == self.defect:
                return known.is_present(engine_version())
        return not self.fixed


SP = "--tensor-model-parallel-size 2 --sequence-parallel"
EP = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
SEQUENCE = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --calculate-per-token-loss"
BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
CAPACITY = "--moe-expert-capacity-factor 1.0"
LATENT = "--transformer-impl local --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-layernorm"
EP_FSDP = {"ep_size": 2, "fsdp_size": 2}
UNREPORTED = "no public thread found"
BUGS = (
    Bug("NVIDIA/Megatron-LM#5916", "layout", f"{SP} --expert-tensor-parallel-size 1", "S5"),
    Bug("NVIDIA/Megatron-LM#5047", "layout", f"{SP} {SEQUENCE}", "E7"),
    Bug("NVIDIA/Megatron-LM#5798", "micro-batches", SEQUENCE, "E8"),
    Bug("NVIDIA/Megatron-LM#3199", "layout", "--moe-z-loss-coeff 0.01", "E9"),
    Bug("NVIDIA/Megatron-LM#7452, finding 8", "layout", f"{SP} --softmax-type learnable"),
    Bug(f"{UNREPORTED}: S2", "layout", f"{SP} {LATENT}", "S2"),
    Bug(f"{UNREPORTED}: N4", "expert-bias", f"{EP} {BIAS} {CAPACITY} --moe-pad-expert-input-to-capacity", "N4"),
    Bug(f"{UNREPORTED}: N5", "later-tokens", f"{CAPACITY} --moe-token-drop-policy position", "N5"),
    Bug(f"{UNREPORTED}: N6", "layout", f"{SP} --moe-token-dispatcher-type alltoall {CAPACITY}", "N6"),
    Bug("huggingface/transformers#48690", "micro-batches", {"router_aux_loss_coef": 0.05}),
    Bug("huggingface/transformers#48805", "resume", {"learning_rate": 1e-3}),
    Bug("huggingface/transformers#48687", "layout", {**EP_FSDP, "experts_implementation": "batched_mm"}, fixed=True),
    Bug(f"{UNREPORTED}: a cache joins documents", "documents", {"packing": True, "use_cache": True}),
    Bug(f"{UNREPORTED}: norms of heads, TP", "layout", {"tp_size": 2}),
)


def finding(bug: Bug, folder: Path) -> tuple[float, dict[str, Any]]:
    """Write what the doctor reads, and run it; return the command's seconds, and what it found as JSON."""
    target, config, report = "transformers", folder / "run.json", folder / "found.json"
    if isinstance(bug.added, str):
        target, config = "megatron-core", folder / "flags.txt"
        config.write_text(f"{MEGATRON_MODEL} {bug.added}\n", encoding="utf-8")
    else:
        (folder / "config.json").write_text(json.dumps(QWEN3_MOE), encoding="utf-8")
        config.write_text(json.dumps({"model_name_or_path": ".", **bug.added}), encoding="utf-8")
    command = [sys.executable, "-m", "megatron_moe", "doctor", "--target", target, str(config)]
    command += ["--ranks", "2", "--checks", bug.check, "--json", str(report)]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if not report.exists():
        raise RuntimeError(f"{bug.thread}: the doctor failed\n{done.stdout}{done.stderr}")
    (found,) = json.loads(report.read_text(encoding="utf-8"))["checks"]
    return seconds, found


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each bug. Returns 1 if one is not found that the release has, or the other way round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="only threads with one of these texts")
    only = parser.parse_args(argv).only
    print(", ".join(f"{name} {version(name)}" for name in ("megatron-core", "transformers", "torch")))
    print("\n| thread | check | first difference | size | cause | s | as expected |\n|---|---|---|---|---|---|---|")
    unexpected = 0
    for bug in BUGS:
        if not any(text in bug.thread for text in only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            seconds, found = finding(bug, Path(folder))
        first, size = found["error"] or "not found", ""
        if found["differences"]:
            one = found["differences"][0]
            first, size = f"{one['quantity']} {one['name']}".strip(), f"{float(one['error']):.1e}"
        as_expected = found["error"] is None and bool(found["differences"]) == bug.is_expected()
        unexpected += not as_expected
        cells = (bug.thread, bug.check, first, size, "; ".join(found["causes"]), f"{seconds:.0f}", str(as_expected))
        print(f"| {' | '.join(cells)} |", flush=True)
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
