"""Stages 1 and 2: what the machine is, and whether NCCL does each collective that is used."""

import json

import torch

from megatron_moe.config import cli
from megatron_moe_tools.preflight.checks import run_checks
from tests.gpu import ranks
from tests.gpu.processes import RanksFailed, run_ranks
from tests.gpu.stage import FAIL, IMPOSSIBLE, PASS, Stage


def preflight(stage: Stage) -> None:
    """Stage 1: the device, and what megatron-moe preflight finds of a model like DeepSeek-V2-Lite."""
    stage.figure("device", **_device(stage))
    run = cli.parse(["--preset", "deepseek-v2-lite", "--mock-data", "--vocab-size", "1000", "--bf16"])
    findings = run_checks(run, started=stage.doing)
    for finding in findings:
        # What is worth a warning before a long run is no fault here. Nor is what an imagined device lacks.
        status = {"fail": IMPOSSIBLE if stage.dry else FAIL, "not possible here": IMPOSSIBLE}.get(finding.status, PASS)
        advice = f" -> {finding.advice}" if finding.advice else ""
        stage.check(finding.check, status, f"{finding.status}: {finding.found}{advice}", **finding.figures)


def _device(stage: Stage) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": torch.cuda.get_device_name(0),
        "devices": torch.cuda.device_count(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "device_memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": str(torch.version.cuda),
        "cudnn": "none" if stage.dry else str(torch.backends.cudnn.version()),
        "nccl": "none" if stage.dry else ".".join(map(str, torch.cuda.nccl.version())),
        "imagined": stage.dry,
    }


def collectives(stage: Stage) -> None:
    """Stage 2: every collective that is used, over NCCL with all cards, and over the staged backend of stage 6."""
    cards = 1 if stage.dry else torch.cuda.device_count()
    for backend, number, one_device in (("nccl", cards, False), ("staged", 2, True)):
        where = f"{'gloo for nccl' if stage.dry and backend == 'nccl' else backend}, {number} ranks"
        stage.doing(where)
        folder = stage.folder / backend
        try:
            run_ranks(
                ranks.collectives, (str(folder), backend), number, folder, min(60, stage.left), stage.dry, one_device
            )
        except RanksFailed as error:
            stage.check(where, FAIL, str(error))
            continue
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(number)]
        for name in found[0]:
            wrong = {rank: one[name] for rank, one in enumerate(found) if one[name]}
            if wrong and all(text.startswith("not possible") for text in wrong.values()):
                stage.impossible(f"{name} ({where})", wrong[0])
            else:
                stage.holds(f"{name} ({where})", not wrong, "; ".join(f"rank {r}: {text}" for r, text in wrong.items()))
