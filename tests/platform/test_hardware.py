"""Which devices of a machine, which ranks on them and which backends are refused; the memory of this process."""

import pytest
import torch

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError, MachineError
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.io.program import USER_ERROR, run_program
from megatron_moe.parallel import groups
from megatron_moe.platform import hardware, host, numerics
from megatron_moe.training.run import pretrain

pytestmark = pytest.mark.engine

LAUNCHER = ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Imitate a machine: its environment, its device files, and what torch says of its driver; None: CUDA works."""

    def imitate(environment=(), files=(), reason=TOO_OLD, count=4):
        for name in LAUNCHER:
            monkeypatch.delenv(name, raising=False)
        for name, value in dict(environment).items():
            monkeypatch.setenv(name, value)
        for name in files:
            (tmp_path / name).touch()
        host.device_files.cache_clear()
        monkeypatch.setattr(host, "_DEVICE_FILES", (tmp_path, "nvidia[0-9]*"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: reason is None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count if reason is None else 0)

        def init():
            raise reason if isinstance(reason, Exception) else RuntimeError(reason)

        monkeypatch.setattr(torch.cuda, "init", init)

    yield imitate
    host.device_files.cache_clear()


@pytest.mark.parametrize(
    ("environment", "files", "reason", "says"),
    [
        ({}, ("nvidia0", "nvidiactl"), TOO_OLD, ["nvidia0", TOO_OLD]),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, (), "No CUDA GPUs", ["CUDA_VISIBLE_DEVICES=0,1", "No CUDA GPUs"]),
        ({}, ("nvidia0",), AssertionError("Torch not compiled with CUDA enabled"), ["Torch not compiled with CUDA"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1f"}, (), TOO_OLD, ["CUDA_VISIBLE_DEVICES=GPU-1f", "found version 11040"]),
    ],
    ids=["driver", "named devices", "torch without CUDA", "a device by its identifier"],
)
@pytest.mark.parametrize("asked", [platform.device, platform.backend])
def test_devices_that_torch_cannot_use_are_refused_by_its_reason(machine, environment, files, reason, says, asked):
    machine(environment, files, reason)
    with pytest.raises(ConfigError) as error:
        asked()
    for text in (*says, "CUDA_VISIBLE_DEVICES= (empty)"):
        assert text in str(error.value)


@pytest.mark.parametrize("start", [pretrain, groups.initialize])
def test_programs_are_refused_before_they_join_a_group(machine, start):
    """Training checks first; every tool that runs a model in its own process joins a group before it builds one."""
    machine(files=("nvidia0",))
    tiny = {**PRESETS["tiny"], "mock_data": True, "vocab_size": 64, "train_iters": 1, "lr_warmup_iters": 0}
    with pytest.raises(MachineError, match="nvidia0"):
        start(replace(Run(), **tiny))
    assert not torch.distributed.is_initialized()
    assert not list(numerics.states()), "the program keeps its own settings"


@pytest.mark.parametrize(
    ("environment", "files"),
    [
        ({}, ()),
        ({}, ("nvidiactl", "nvidia-uvm")),
        *(({"CUDA_VISIBLE_DEVICES": hidden}, ("nvidia0",)) for hidden in ("", "-1", "-1,0", "NoDevFiles")),
        ({"WORLD_SIZE": "2"}, ()),
    ],
)
def test_a_machine_without_devices_or_with_hidden_ones_runs_on_the_cpu(machine, environment, files):
    machine(environment, files)
    assert platform.device() == torch.device("cpu") and platform.backend() == "gloo"


EIGHT = {"WORLD_SIZE": "8", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("refused", "accepted", "says"),
    [
        ({**EIGHT, "LOCAL_WORLD_SIZE": "8"}, {**EIGHT, "LOCAL_WORLD_SIZE": "4"}, ["LOCAL_WORLD_SIZE=8", "node 4"]),
        ({**EIGHT, "LOCAL_RANK": "4"}, {**EIGHT, "LOCAL_RANK": "3"}, ["LOCAL_RANK=4", "4 CUDA devices"]),
        ({"WORLD_SIZE": "2", "RANK": "1"}, {"WORLD_SIZE": "1"}, ["WORLD_SIZE=2", "LOCAL_RANK", "torchrun"]),
    ],
    ids=["too many ranks", "a rank too many", "ranks without a number"],
)
def test_ranks_without_a_device_of_their_own_are_refused(machine, refused, accepted, says):
    machine(accepted, reason=None)
    assert platform.backend() == "nccl"
    assert platform.device() == torch.device("cuda", int(accepted.get("LOCAL_RANK", "0")))
    machine(refused, reason=None)
    with pytest.raises(MachineError) as error:
        platform.device()
    for text in (*says, "CUDA_VISIBLE_DEVICES= (empty)"):
        assert text in str(error.value)


def test_a_plan_is_made_on_any_machine(machine):
    machine(files=("nvidia0",))
    with hardware.fake_device("cuda", {}):
        assert platform.device() == torch.device("meta") and platform.backend() == "nccl"


def test_the_first_rank_of_a_refused_machine_prints_why(machine, capsys):
    """All the other machines of the run may be sound, rank 0's among them."""
    machine({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "4", "LOCAL_RANK": "0"}, ("nvidia0",))

    def main(argv):
        platform.device()

    assert run_program("train", main, [], rank=4) == USER_ERROR
    assert TOO_OLD in capsys.readouterr().err
    machine({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5", "LOCAL_RANK": "1"}, ("nvidia0",))
    assert run_program("train", main, [], rank=5) == USER_ERROR
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("cuda", [True, False])
def test_a_backend_that_cannot_work_here_is_refused_and_a_working_setting_named(machine, cuda):
    machine(reason=None if cuda else TOO_OLD)
    assert platform.backend("nccl" if cuda else "gloo") == platform.backend()
    with pytest.raises(ConfigError, match="--distributed-backend .* leave the flag out"):
        platform.backend("gloo" if cuda else "nccl")


def test_the_peak_memory_covers_what_was_allocated():
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert hardware.max_memory_bytes() > held.numel()
    assert hardware.max_memory_bytes() < 2**40
