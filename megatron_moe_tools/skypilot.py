"""`megatron-moe skypilot`: write a managed job of SkyPilot that goes on by itself.

    megatron-moe skypilot --image docker:REGISTRY/moe:1 --mounts s3://BUCKET:/runs --script job.yaml -- --preset tiny

The words after `--` are the flags of the training. They are checked for the job's ranks before anything is written;
what is on the nodes, such as the data, is not looked at. Exit status: 0, 2 for a mistake.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.io.program import run_program
from megatron_moe_tools.launch import jobs
from megatron_moe_tools.preflight import cli as preflight
from megatron_moe_tools.pretrain import parse

NAME = "megatron-moe skypilot"
_EXAMPLE = "--image docker:REGISTRY/moe:1 --mounts s3://BUCKET:/runs"


def parser() -> Parser:
    """Return the parser of the words before `--`."""
    p = jobs.parser(NAME, "Write a managed job of SkyPilot")
    p.add_argument("--accelerators", default="", help="kind of GPU, such as H100")
    p.add_argument("--memory", help="of a node in GB, as SkyPilot takes it, such as 512+")
    p.add_argument("--infra", help="where, as SkyPilot takes it, such as k8s or aws/us-east-1")
    p.add_argument("--use-spot", action="store_true", help="spot nodes, which may be taken away")
    p.add_argument("--setup", default="", help="commands that install this package, where no --image has it")
    jobs.add_pod_options(p, "buckets and volumes, and the folders where they are mounted, such as s3://BUCKET:/runs")
    return p


def main(argv: list[str]) -> int:
    """Write the job, and return the exit status."""
    return run_program(NAME, _main, argv, errors=(ConfigError, OSError), rank=0)


def _main(argv: list[str]) -> int:
    own, flags = jobs.split(parser(), argv, {}, _EXAMPLE)
    folders = jobs.check_pod(own)
    if not own.image and not own.setup:
        raise ConfigError(f"--image and --setup: nodes have no megatron-moe without one of them, e.g. {_EXAMPLE}")
    if bool(own.accelerators) != bool(own.gpus_per_node):
        raise ConfigError(
            "--accelerators and --gpus-per-node: one is given without the other; e.g. --accelerators H100 "
            "--gpus-per-node 8, or none"
        )
    preflight.parser().parse_args(jobs.words(own.preflight_flags))
    save, flags = jobs.checked(own, flags, folders, parse)
    return jobs.write_yaml(NAME, argv, own.script, "sky jobs launch", task(own, save, flags, folders))


def task(own: argparse.Namespace, save: str, flags: list[str], folders: dict[str, str]) -> dict[str, Any]:
    """Return the job, for checkpoints in `save`.

    SkyPilot brings back lost nodes by itself. It starts a job that has failed again by its status, which the script
    chooses; no other failure is repeated. Source: SkyPilot's task schema, 0.14.
    """
    resources: dict[str, Any] = {
        "use_spot": own.use_spot,
        "job_recovery": {
            "strategy": "EAGER_NEXT_REGION",
            "max_restarts_on_errors": 0,
            "recover_on_exit_codes": [jobs.AGAIN],
        },
    }
    if own.accelerators:
        resources["accelerators"] = f"{own.accelerators}:{own.gpus_per_node}"
    if own.cpus_per_task:
        resources["cpus"] = f"{own.cpus_per_task}+"
    if own.memory:
        resources["memory"] = own.memory
    if own.infra:
        resources["infra"] = own.infra
    if own.image:
        resources["image_id"] = own.image
    found = {
        "JOB": '"skypilot-$SKYPILOT_TASK_ID"',
        "INDEX": "$SKYPILOT_NODE_RANK",
        "MEET": "\"${SKYPILOT_NODE_IPS%%$'\\n'*}\"",
        "FIRST": "''",
    }
    written: dict[str, Any] = {"name": own.job_name, "num_nodes": own.nodes, "resources": resources}
    buckets, volumes = {}, {}
    for folder, what in folders.items():
        if "://" in what:
            # A cached mount uploads late, and in no order: a lost node would take checkpoints along.
            buckets[folder] = {"source": what, "mode": "MOUNT"}
        else:
            volumes[folder] = what
    if buckets:
        written["file_mounts"] = buckets
    if volumes:
        written["volumes"] = volumes
    if own.setup:
        written["setup"] = own.setup
    script = jobs.pod_script(own, save, flags, found)
    return {**written, "run": script}
