"""What the jobs for Kubernetes and SkyPilot say, and how their script ends: test_pod_ranks.py has real ranks in it."""

import copy
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from megatron_moe_tools import kubernetes, skypilot

SCHEMAS = yaml.safe_load(Path(__file__).with_name("job_schemas.yaml").read_text())
FLAGS = "--preset tiny --mock-data --vocab-size 99".split()
MISTAKE, EXHAUSTED, AGAIN = 2, 3, 75

STAND_IN = r"""#!/bin/bash
echo "${0##*/} $*" >>record
if [[ ${SAVES-} ]]; then mkdir -p a/checkpoints && echo "$SAVES" >a/checkpoints/latest_checkpointed_iteration.txt; fi
if [[ ${TRAINS-} == "$JOB_COMPLETION_INDEX" ]]; then
  trap 'touch asked; exit 0' TERM
  touch started
  while :; do sleep 0.02; done
fi
status=STATUS_$JOB_COMPLETION_INDEX
[[ ${!status-} == 0 ]] && until [[ -e asked ]]; do sleep 0.02; done # all save and end with 0 when one is asked to
exit "${!status:-0}"
"""


def written(folder: Path, tool: Any, *options: str, what: str = "runs", also: Sequence[str] = ()) -> list[Any]:
    """Return the documents that a command writes; `what` is mounted at the folder."""
    words = ["--mounts", f"{what}:{folder}", *also, *options, "--script", "job.yaml"]
    assert tool.main([*words, "--", *FLAGS, "--save", f"{folder}/a/checkpoints"]) == 0
    return list(yaml.safe_load_all((folder / "job.yaml").read_text()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that the pods share, with stand-ins for the programs of their image."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("megatron-moe", "torchrun"):
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def script(folder) -> Path:
    """The script of two pods."""
    return script_of(folder, "--nodes", "2", "--no-preflight", "--max-restarts", "1")


def script_of(folder: Path, *options: str) -> Path:
    config, _ = written(folder, kubernetes, "--image", "moe", *options)
    (folder / "pod.sh").write_text(config["data"]["pod.sh"])
    return folder / "pod.sh"


def started(script: Path, pod: int, attempt: int, **more: str) -> subprocess.Popen[str]:
    """Start a pod as the controllers of JobSet and Job do."""
    environment = {
        "PATH": f"{script.parent / 'bin'}:{os.defpath}", "JOB_COMPLETION_INDEX": str(pod),
        "JOBSET_RESTART_ATTEMPT": str(attempt), **more,
    }  # fmt: skip
    return subprocess.Popen(
        ["bash", str(script)], env=environment, cwd=script.parent, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def statuses(script: Path, attempt: int, pods: Sequence[int] = (0, 1), **more: str) -> tuple[list[int], str]:
    """Run the pods of an attempt; return their exit statuses and all that they said."""
    processes = [started(script, pod, attempt, **more) for pod in pods]
    said = "".join(process.communicate()[0] for process in processes)
    return [process.returncode for process in processes], said


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


def valid(document: dict[str, Any], kind: str) -> None:
    jsonschema.validate(document, {"$ref": f"#/$defs/{kind}", "$defs": SCHEMAS["$defs"]})


def test_a_jobset_is_as_its_published_schema_has_it_and_ends_for_good_by_the_statuses_of_its_script(folder):
    options = ["--nodes", "2", "--gpus-per-node", "2", "--cpus-per-task", "8", "--memory", "64Gi", "--namespace", "n"]
    config, jobset = written(folder, kubernetes, "--image", "moe", "--save-seconds", "600", *options)
    valid(config, "config_map")
    valid(jobset, "jobset")
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [MISTAKE, EXHAUSTED]
    assert jobset["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert job["completions"] == job["parallelism"] == 2 and job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 630  # more than a checkpoint takes
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    typo = copy.deepcopy(jobset)
    typo["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimits"] = 0
    with pytest.raises(jsonschema.ValidationError):
        valid(typo, "jobset")


def test_a_skypilot_job_is_as_its_published_schema_has_it_and_is_repeated_by_one_status_alone(folder):
    options = ["--gpus-per-node", "2", "--accelerators", "H100", "--infra", "k8s", "--use-spot", "--cpus-per-task", "8"]
    options += ["--setup", "pip install --user $HOME/moe"]
    (task,) = written(folder, skypilot, *options, what="s3://b", also=["v:/data"])
    valid(task, "task")
    assert task["file_mounts"] == {str(folder): {"source": "s3://b", "mode": "MOUNT"}}
    assert task["volumes"] == {"/data": "v"} and task["resources"]["accelerators"] == "H100:2"
    recovery = task["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [AGAIN] and recovery["max_restarts_on_errors"] == 0


def test_a_skypilot_node_meets_the_others_at_the_first_one(folder):
    (task,) = written(folder, skypilot, "--nodes", "2", "--no-preflight", "--image", "docker:moe")
    (folder / "pod.sh").write_text(task["run"])
    (folder / "a").mkdir()
    (folder / "a/skypilot-sky-1.status.0").write_text("0")  # the first node has ended
    sky = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_TASK_ID": "sky-1"}
    process = started(folder / "pod.sh", 1, 0, **sky)
    assert process.communicate()[0].endswith("skypilot-sky-1, node 1: is done\n") and process.returncode == 0
    assert "--rdzv-endpoint 10.0.0.1:29400" in (folder / "record").read_text()


def test_a_job_without_incident_ends_with_0(folder):
    script = script_of(folder, "--nodes", "2", "--job-name", "b", "--preflight-flags=--across 40")
    assert statuses(script, 0)[0] == [0, 0]
    record = (folder / "record").read_text()
    assert record.count("megatron_moe preflight --across 40 --preset tiny") == 2
    assert "--rdzv-endpoint b-ranks-0-0.b:29400" in record and "is_host=true" in record and "is_host=false" in record
    assert f"--exit-signal-handler --load {folder}/a/checkpoints" in record


def test_the_budget_counts_attempts_in_a_row_without_a_newer_checkpoint(script):
    failing = {"STATUS_0": "1", "STATUS_1": "137"}
    for attempt, saves in enumerate(("", "5", "5", "7")):
        assert statuses(script, attempt, SAVES=saves, **failing)[0] == [AGAIN, AGAIN]
    assert statuses(script, 4, SAVES="7", **failing)[0] == [AGAIN, AGAIN]
    ended, said = statuses(script, 5, SAVES="7", **failing)
    assert ended == [EXHAUSTED, AGAIN] and "gives up: 2 attempts in a row" in said
    # The other pod may have been the one by which the job failed: the next attempt trains nothing.
    (script.parent / "record").unlink()
    assert statuses(script, 6, pods=[0])[0] == [EXHAUSTED] and not (script.parent / "record").exists()
    # A job that is submitted again has a whole budget.
    assert statuses(script, 0, SAVES="7", **failing)[0] == [AGAIN, AGAIN]


def test_a_pod_that_is_lost_counts(script):
    for attempt in range(2):
        pod = started(script, 0, attempt, TRAINS="0")
        wait_for(script.parent / "started")
        os.killpg(pod.pid, signal.SIGKILL)
        pod.communicate()
        (script.parent / "started").unlink()
    ended, said = statuses(script, 2, pods=[0])
    assert ended == [EXHAUSTED] and "a node was lost or killed" in said


def test_a_mistake_on_one_pod_ends_the_job_on_all(script):
    ended, said = statuses(script, 0, STATUS_0="1", STATUS_1="2")
    assert ended == [MISTAKE, MISTAKE] and said.count("is not started again") == 2


def test_pods_save_when_one_is_asked_to_end_and_all_go_on(script):
    """The ranks agree on the signal: those of the other pod end with 0, and yet the job is not done."""
    pods = [started(script, 0, 0, STATUS_0="0", SAVES="8"), started(script, 1, 0, TRAINS="1")]
    wait_for(script.parent / "started")
    pods[1].send_signal(signal.SIGTERM)
    said = [pod.communicate()[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [AGAIN, AGAIN]
    assert "asked to end: the ranks save" in said[1] and "another node was asked to end" in said[0]
    assert "fruitless=0" in (script.parent / "a/kubernetes-moe.state").read_text()


def test_a_pod_without_the_package_or_a_folder_to_write_in_is_a_mistake(script):
    assert statuses(script, 0, pods=[0], PATH=os.defpath)[0] == [MISTAKE]
    for path in sorted((script.parent / "a").glob("*")):
        path.unlink()
    (script.parent / "a").rmdir()
    (script.parent / "a").write_text("")
    ended, said = statuses(script, 0, pods=[0])
    assert ended == [MISTAKE] and "--save has to lie in a folder that all nodes share" in said
