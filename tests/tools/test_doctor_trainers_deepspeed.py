"""The doctor on DeepSpeed's engine: sound settings have no finding, errors that are planted in it are found."""

import importlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from megatron_moe.config.errors import ConfigError
from megatron_moe.engine.patching import replaced
from megatron_moe_tools.doctor.trainers import deepspeed_target, rank
from tests.helpers import beside
from tests.helpers.gloo_pool import GlooPool
from tests.helpers.ranks import RankParent
from tests.helpers.rows import rows
from tests.tools.test_doctor_trainers_ranks import checked, fork_ranks
from tests.tools.test_doctor_trainers_transformers import KINDS, SIZES

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}


def run_into(argument: dict[str, Any]) -> str:
    """Run a case on a rank that finds DeepSpeed, with the error planted that the configuration's name says."""
    beside.find_them()
    plant = PLANTED.get(argument["config"].rpartition("/")[2].removesuffix(".json"))
    with nullcontext() if plant is None else plant.plant():
        return rank.run_into(argument)


class Pools:
    """A pool for each number of ranks: DeepSpeed numbers the weights of a process, and ranks have to agree."""

    def __init__(self, parent: RankParent) -> None:
        self._pools = {ranks: GlooPool(parent) for ranks in (1, 2)}

    def run_within(self, seconds: float, ranks: int, *given: Any, **named: Any) -> list[Any]:
        return self._pools[ranks].run_within(seconds, ranks, *given, **named)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def pools(rank_parent):
    found = Pools(rank_parent)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def with_deepspeed(pools, tmp_path, monkeypatch):
    """Let the doctor and its ranks find DeepSpeed."""
    monkeypatch.syspath_prepend(beside.FOLDER)
    fork_ranks(monkeypatch, pools, tmp_path, run_into)


def found_in(kind: str, settings: dict[str, Any], folder: Any, *names: str) -> tuple[set[str], dict[str, Any]]:
    """The checks that fail for a model and DeepSpeed's settings, with all that was found."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **KINDS[kind]}))
    plan = folder / f"{settings.pop('named', 'plan')}.json"
    plan.write_text(json.dumps({"model_name_or_path": "model", "optimizer": ADAM, **settings}))
    found, _ = checked(plan, folder, "--target", "deepspeed", "--checks", "later-tokens", *names)
    return {check for check, one in found.items() if not one["agrees"]}, found


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


SOUND = {
    "no ZeRO": ("qwen3_moe", zero(0)),
    "ZeRO 1": ("qwen3_moe", zero(1)),
    "ZeRO 2": ("qwen3_moe", zero(2)),
    "ZeRO 3": ("qwen3_moe", zero(3)),
    "ZeRO 2, one bucket after another": ("mixtral", zero(2, overlap_comm=False, reduce_bucket_size=500)),
    "ZeRO 2, all-reduce": ("mixtral", zero(2, reduce_scatter=False)),
    "ZeRO 2, round robin left out": ("mixtral", zero(2, round_robin_gradients=True)),
    "ZeRO 3, all-reduce": ("llama", zero(3, reduce_scatter=False, stage3_param_persistence_threshold=0)),
    "ZeRO 1, clipped": ("deepseek_v3", {**zero(1), "gradient_clipping": 0.1}),
    "ZeRO 3, clipped": ("gpt_oss", {**zero(3), "gradient_clipping": 0.1}),
    "no ZeRO, divided before": ("olmoe", {**zero(0), "gradient_predivide_factor": 4.0}),
    "ZeRO 2, divided before": ("olmoe", {**zero(2, reduce_scatter=False), "gradient_predivide_factor": 4.0}),
    "ZeRO 3, secondary shards": ("qwen3_moe", zero(3, zero_hpz_partition_size=2)),
    "SGD": ("qwen3_moe", {**zero(1), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}),
    "tensor parallel": ("llama", {**zero(1), "tensor_parallel": {"autotp_size": 2}}),
}


@pytest.mark.parametrize("name", rows(SOUND, test=["ZeRO 3"]))
def test_a_sound_setting_has_no_finding(name, tmp_path, capsys):
    kind, settings = SOUND[name]
    checks = {"padding", "micro-batches", "layout", "gradients", "resume"}
    wrong, _ = found_in(kind, dict(settings), tmp_path, *checks)
    assert wrong == set(), capsys.readouterr().out


class Planted(NamedTuple):
    """An error: how it is planted, the settings that meet it, the check that finds it, and a part of a cause."""

    plant: Callable[[], AbstractContextManager[None]]
    settings: dict[str, Any]
    check: str
    cause: str


def around(module: str, owner: str, name: str, new: Callable[..., Any]) -> AbstractContextManager[None]:
    """Call new(old, ...) in place of a function of DeepSpeed's, which is imported where this runs."""
    place = importlib.import_module(f"deepspeed.runtime.{module}")
    place = getattr(place, owner) if owner else place
    old = getattr(place, name)
    return replaced([place], **{name: lambda *given, **named: new(old, *given, **named)})


def without_communication(module: str, owner: str, name: str) -> AbstractContextManager[None]:
    """Leave out what a function adds up over the ranks."""

    def new(old: Any, *given: Any, **named: Any) -> Any:
        with replaced([importlib.import_module(f"deepspeed.runtime.{module}").dist], all_reduce=lambda *_, **__: None):
            return old(*given, **named)

    return around(module, owner, name, new)


def gradients_summed() -> AbstractContextManager[None]:
    def new(old: Any, *given: Any, **named: Any) -> Any:
        return old(*given, **named).mul_(dist.get_world_size())

    return around("engine", "DeepSpeedEngine", "allreduce_bucket", new)


def moments_not_loaded() -> AbstractContextManager[None]:
    def new(old: Any, *given: Any, **named: Any) -> Any:
        return old(*given, **named, load_optimizer_states=False)

    return around("engine", "DeepSpeedEngine", "load_checkpoint", new)


def micro_batches_not_scaled() -> AbstractContextManager[None]:
    def new(old: Any, *given: Any) -> Any:
        return old(*given, scale_wrt_gas=False)

    return around("engine", "DeepSpeedEngine", "backward", new)


STAGE_2 = ("zero.stage_1_and_2", "DeepSpeedZeroOptimizer")
STAGE_3 = ("zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
PLANTED = {
    "gradients summed": Planted(gradients_summed, zero(0), "layout", "2 times as large: DP"),
    "not averaged over the ranks": Planted(
        lambda: without_communication("engine", "DeepSpeedEngine", "allreduce_bucket"), zero(0), "layout", "own"
    ),
    "local norm": Planted(
        lambda: without_communication(*STAGE_2, "get_grad_norm_direct"), zero(1), "layout", "their norm is not"
    ),
    "local norm in ZeRO 3": Planted(
        lambda: without_communication(*STAGE_3, "get_grad_norm_direct"), zero(3), "layout", "their norm is not"
    ),
    "weights not gathered": Planted(
        lambda: around("zero.stage_1_and_2", "", "all_gather_dp_groups", lambda *_, **__: None),
        zero(1), "layout", "gathered",
    ),
    "moments not loaded": Planted(moments_not_loaded, zero(1), "resume", "not restored"),
    "micro-batches not scaled": Planted(micro_batches_not_scaled, zero(2), "micro-batches", "scaled"),
    "nothing planted: 0.19.8 divides once too often if gradient_predivide_factor is the number of ranks": Planted(
        nullcontext, {**zero(3, reduce_scatter=False), "gradient_predivide_factor": 2.0}, "layout", "1 / DP"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", rows(PLANTED, test=["local norm in ZeRO 3"]))
def test_a_planted_error_is_found_and_its_cause_is_named(name, tmp_path, capsys):
    one = PLANTED[name]
    wrong, found = found_in("qwen3_moe", {**one.settings, "named": name}, tmp_path, one.check)
    assert one.check in wrong, capsys.readouterr().out
    assert one.cause in "\n".join(found[one.check]["causes"]), found[one.check]


def test_what_trainer_fills_in_is_filled_in_and_the_rest_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    plan = {"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "train_batch_size": "auto"}))
    run = tmp_path / "run.json"
    given = {"deepspeed": "plan.json", "learning_rate": 0.01, "adam_beta2": 0.95, "bf16": True, "optim": "sgd"}
    run.write_text(json.dumps({"model_name_or_path": ".", "output_dir": "out", **given}))
    trainer = deepspeed_target.load(run)
    assert trainer.plan["gradient_clipping"] == 1.0
    assert trainer.plan["optimizer"]["params"] == {"lr": 0.01, "betas": [0.9, 0.95], "torch_adam": True}
    assert set(trainer.leaves_out) == {"bf16", "optim"}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"tp_size": 2}, "tp_size: is transformers'"),
        ({"deepspeed": "plan.json", "learning_rates": 1}, "learning_rates: not of TrainingArguments"),
        (
            {"zero_optimisation": {"stage": 1}},
            "zero_optimisation: no key of .*; did you mean zero_optimization",
        ),
    ],
)
def test_a_mistake_is_refused(settings, error, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"model_name_or_path": ".", **settings}))
    with pytest.raises(ConfigError, match=error):
        deepspeed_target.load(plan)
