"""A Slurm cluster on this machine: slurmctld, one slurmd for each node, and a munged of its own, in one folder.

    with slurm_cluster.running(folder) as cluster:
        job = cluster.submit("job.sbatch", cwd=folder)
        cluster.ended(job)

Debian's packages slurmctld, slurmd, slurm-client and munge are all it takes. Nothing of the machine's own Slurm or
munge is used or changed, so several clusters run side by side. The "nodes" are processes here: each has one CPU and
this machine's address. A node that dies is said to be down (`kill_node`), as `SlurmdTimeout` would find later.
"""

import contextlib
import getpass
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue", "munged")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin:/usr/local/sbin"
PATIENCE = 1200.0
"""Seconds that anything may take: a limit for what never happens, on a machine with other work."""
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}

NODE = "NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 Weight={number} State=UNKNOWN"
"""Jobs get the nodes of the least weight that are free."""
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1,requeue_setup_env_fail
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=1
SlurmdTimeout=600
SlurmctldTimeout=600
KillWait=240
UnkillableStepTimeout=300
MinJobAge=3600
MessageTimeout=60
TCPTimeout=30
FirstJobId={first_job}
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/slurmd-%n.log
{node_lines}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no cluster here; None where there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    packages = "apt-get install slurmctld slurmd slurm-client munge"
    return f"{', '.join(absent)}: not installed; as root: {packages}" if absent else None


class Cluster:
    """A running cluster, with all of its files in `folder`."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, [f"node{number}" for number in range(1, nodes + 1)]
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def run(self, *command: str | Path, cwd: Path | None = None, check: bool = True, **environment: str) -> str:
        """Return what a command of Slurm's, or one that calls them, prints."""
        done = subprocess.run(
            [str(word) for word in command], cwd=cwd, env=self.inherited(**environment), capture_output=True,
            text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def inherited(self, **more: str) -> dict[str, str]:
        """The environment of a user's shell: this process's without a launcher's variables, with the cluster's."""
        launcher = re.compile(r"(SLURM|SBATCH|PET|TORCHELASTIC|OMPI|PMI)_|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_")
        own = {name: value for name, value in os.environ.items() if not launcher.match(name)}
        return {**own, **self.environment, **more}

    def submit(self, *words: str | Path, cwd: Path, **environment: str) -> int:
        return int(self.run("sbatch", "--parsable", *words, cwd=cwd, **environment).split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says, name -> value."""
        return dict(re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(\S*)", self.run("scontrol", "show", "job", str(number))))

    def state(self, number: int) -> str:
        return self.job(number)["JobState"]

    def until(self, holds: Callable[[], object], what: str, job: int | None = None) -> None:
        """Wait until something holds; it is an error if it does not, and if the job has ended meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            if job is not None and self.state(job) in FINAL and not holds():
                raise AssertionError(f"{what}: {self.job(job)}")
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:.0f} s"
            time.sleep(0.5)

    def hurry(self, number: int) -> None:
        """Start a job that was requeued in two seconds, where Slurm makes it wait for two minutes.

        A node refuses a job whose credential is of the second in which it was requeued.
        """
        job = self.job(number)
        if (job["JobState"], job["Reason"]) != ("PENDING", "BeginTime"):
            return
        seconds = (datetime.fromisoformat(job["EligibleTime"]) - datetime.now()).total_seconds()
        if seconds > 20:  # Slurm sets it again when the last process of the job has ended
            self.run("scontrol", "update", f"jobid={number}", "starttime=now+2seconds", check=False)

    def ended(self, number: int) -> dict[str, str]:
        """Wait until a job has come to its end, with nothing of it left on a node; return what Slurm says of it."""
        self.until(lambda: self.state(number) in FINAL, f"the end of job {number}")
        self.until(lambda: not self.run("squeue", "-h", "-j", str(number), "-t", "CG", check=False), "its last process")
        return self.job(number)

    def processes(self, having: str = "SLURM_CONF", **variables: str) -> list[psutil.Process]:
        """The cluster's daemons and the jobs' processes with such an environment."""
        wanted, found = {"SLURM_CONF": self.environment["SLURM_CONF"], **variables}, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if having in environment and wanted.items() <= environment.items():
                    found.append(process)
        return found

    def kill_node(self, node: str) -> None:
        """End slurmd, slurmstepd and the jobs' processes of a node by SIGKILL, and say that it is down."""
        slurmd = psutil.Process(int((self.folder / f"slurmd-{node}.pid").read_text()))
        _kill([slurmd, *self._steps(node), *self.processes(SLURMD_NODENAME=node)])
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def end(self) -> None:
        """End all that is left: the jobs' processes, Slurm's and munge's."""
        while left := [*self._steps(*self.nodes), *self.processes()]:
            _kill(left)
            psutil.wait_procs(left, timeout=30)

    def _steps(self, *nodes: str) -> list[psutil.Process]:
        """Each slurmstepd of these nodes. Its environment is empty, but it writes the log of its node."""
        logs, found = {str(self.folder / f"slurmd-{node}.log") for node in nodes}, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "slurmstepd" and logs & {file.path for file in process.open_files()}:
                    found.append(process)
        return found

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node, and wait until it is ready for jobs."""
        self.run("slurmd", "-N", node)
        if "DOWN" in self.run("scontrol", "show", "node", node):
            self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        self.until(lambda: self.is_idle(node), f"{node} is idle")

    def is_idle(self, node: str) -> bool:
        return node in self.run("sinfo", "-h", "-n", node, "-t", "idle", "-o", "%N", check=False)


@contextlib.contextmanager
def running(folder: Path, nodes: int = 3) -> Iterator[Cluster]:
    """A cluster with its files in `folder`, which is taken down whatever happens.

    Its nodes are called node1, node2, ...; partition `debug` is the default, and one job in `urgent` takes nodes from
    its jobs, which are requeued.
    """
    folder = folder.resolve()
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)  # munged refuses a socket that others cannot reach
    port, host = _free_ports(nodes + 1), socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(
        CONF.format(
            folder=folder, host=host, user=getpass.getuser(), port=port, first_job=random.randrange(1000, 60000),
            node_lines="\n".join(NODE.format(number=n, host=host, port=port + n) for n in range(1, nodes + 1)),
        )
    )  # fmt: skip
    cluster = Cluster(folder, nodes)
    try:
        key, options = folder / "munge.key", ("socket", "pid-file", "log-file", "seed-file")
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{option}={folder}/munge.{option}" for option in options]
        cluster.run("munged", "--force", "--num-threads=2", f"--key-file={key}", *files)
        cluster.run("slurmctld")
        for node in cluster.nodes:
            cluster.run("slurmd", "-N", node)
        for node in cluster.nodes:
            cluster.until(lambda node=node: cluster.is_idle(node), f"{node} is idle")
        yield cluster
    finally:
        cluster.end()


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the system hands out by itself."""
    while True:
        first = random.randrange(11000, 19000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
