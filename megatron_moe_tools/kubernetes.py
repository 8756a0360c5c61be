"""`megatron-moe kubernetes`: write a JobSet of Kubernetes that goes on by itself.

    megatron-moe kubernetes --image REGISTRY/moe:1 --mounts runs:/runs --script job.yaml -- --preset tiny ...

The words after `--` are the flags of the training. They are checked for the job's ranks before anything is written;
what is in the image, such as the data, is not looked at. Exit status: 0, 2 for a mistake.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.io.program import USER_ERROR, run_program
from megatron_moe_tools.launch import jobs
from megatron_moe_tools.preflight import cli as preflight
from megatron_moe_tools.pretrain import parse

NAME = "megatron-moe kubernetes"
GROUP = "ranks"
"""The JobSet's only group of pods; a pod's host is JOB-GROUP-0-INDEX.JOB."""
_EXAMPLE = "--image REGISTRY/moe:1 --mounts runs:/runs"


def parser() -> Parser:
    """Return the parser of the words before `--`."""
    p = jobs.parser(NAME, "Write a JobSet of Kubernetes")
    p.add_argument("--namespace", help="of the job (default: kubectl's)")
    p.add_argument("--memory", help="of a pod, such as 512Gi (default: what the cluster gives)")
    jobs.add_pod_options(p, "persistent volume claims, and the folders where they are mounted, such as runs:/runs")
    return p


def main(argv: list[str]) -> int:
    """Write the JobSet, and return the exit status."""
    return run_program(NAME, _main, argv, errors=(ConfigError, OSError), rank=0)


def _main(argv: list[str]) -> int:
    own, flags = jobs.split(parser(), argv, {}, _EXAMPLE)
    folders = jobs.check_pod(own)
    if not own.image:
        raise ConfigError(f"--image: is missing; pods run in one, e.g. {_EXAMPLE}")
    preflight.parser().parse_args(jobs.words(own.preflight_flags))
    save, flags = jobs.checked(own, flags, folders, parse)
    return jobs.write_yaml(NAME, argv, own.script, "kubectl apply -f", *documents(own, save, flags, folders))


def documents(
    own: argparse.Namespace, save: str, flags: list[str], folders: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap with the pods' script, and the JobSet, for checkpoints in `save`.

    The Job fails with its first pod, and the JobSet starts all pods again, unless the pod's status says that this would
    change nothing. Source: JobSet's API v1alpha2, and the Job's pod failure policy.
    """
    name = own.job_name
    metadata = {"namespace": own.namespace} if own.namespace else {}
    found = {
        "JOB": f"kubernetes-{name}",
        "INDEX": "$JOB_COMPLETION_INDEX",
        "MEET": f"{name}-{GROUP}-0-0.{name}",
        "FIRST": "$( ((JOBSET_RESTART_ATTEMPT == 0)) && echo yes)",
    }
    script = jobs.pod_script(own, save, flags, found)
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-script", **metadata},
        "data": {"pod.sh": script},
    }
    statuses = {"operator": "In", "values": [USER_ERROR, jobs.EXHAUSTED]}
    job = {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": own.nodes,
        "parallelism": own.nodes,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"containerName": GROUP, **statuses}}]},
        "template": {"spec": _pod(own, folders)},
    }
    spec = {
        "failurePolicy": {
            "maxRestarts": jobs.RESTARTS_OF_CLUSTER,
            # Ranks of two attempts must not write to one folder.
            "restartStrategy": "BlockingRecreate",
            "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": job}}],
    }
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, **metadata},
        "spec": spec,
    }
    return config, jobset


def _pod(own: argparse.Namespace, folders: dict[str, str]) -> dict[str, Any]:
    """Return the spec of a pod."""
    attempt = {"fieldRef": {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"}}
    # Data workers and NCCL share memory there, of which a container has 64 MB.
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        {"name": "script", "configMap": {"name": f"{own.job_name}-script"}},
    ]
    mounts = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "script", "mountPath": "/etc/megatron-moe", "readOnly": True},
    ]
    claims: dict[str, str] = {}
    for folder, claim in folders.items():
        if claim not in claims:
            claims[claim] = f"claim-{len(claims)}"
            volumes.append({"name": claims[claim], "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": claims[claim], "mountPath": folder})
    asked = {}
    if own.cpus_per_task:
        asked["cpu"] = str(own.cpus_per_task)
    if own.memory:
        asked["memory"] = own.memory
    resources: dict[str, Any] = {"requests": asked} if asked else {}
    if own.gpus_per_node:
        resources["limits"] = {"nvidia.com/gpu": str(own.gpus_per_node)}
    container = {
        "name": GROUP,
        "image": own.image,
        "command": ["bash", "/etc/megatron-moe/pod.sh"],
        "env": [{"name": "JOBSET_RESTART_ATTEMPT", "valueFrom": attempt}],
        "volumeMounts": mounts,
    }
    if resources:
        container["resources"] = resources
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": own.save_seconds + 30,
        "containers": [container],
        "volumes": volumes,
    }
