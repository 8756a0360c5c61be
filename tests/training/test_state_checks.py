"""A dtype that changes in the middle of a run stops it at the next check, by name and with when it changed."""

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.precision.packed_state import NOT_FINITE
from megatron_moe.training.state_checks import is_finite, non_finite_text
from tests.helpers.rows import rows
from tests.helpers.trained_steps import SMALL, trained

_MATMUL = "torch.backends.cuda.matmul"
_REDUCED = [f"{_MATMUL}.allow_{half}_reduced_precision_reduction" for half in ("bf16", "fp16")]
SWITCHES = {
    "torch.backends.{cuda,mkldnn}.matmul.fp32_precision (TF32)": f"{_MATMUL}.allow_tf32 = True",
    **{name: f"{name} = True" for name in _REDUCED},
    "torch.use_deterministic_algorithms": "torch.use_deterministic_algorithms(False)",
}
"""Switch -> what somebody's code may say in the middle of a run."""


def spoil(what: str, model: Any, optimizer: Any) -> None:
    """Change a dtype or a switch of a run."""
    from megatron_moe.engine.optimizer import parts

    if what == "moment":
        part = parts(optimizer)[0]
        state = part.optimizer.state[part.get_parameters()[0]]
        state["exp_avg"] = state["exp_avg"].bfloat16()
    if what == "gradient":
        weight = next(p for name, p in model[0].named_parameters() if name.endswith("final_layernorm.weight"))
        weight.main_grad = weight.main_grad.bfloat16()
    if what == "bias":
        router = next(m for m in model[0].modules() if type(m).__name__ == "TopKRouter")
        router._buffers["expert_bias"] = router.expert_bias.half()
    if what in SWITCHES:
        exec(SWITCHES[what], {"torch": torch})


def stopped(what: str, at: int, flags: dict[str, Any]) -> str:
    """The message that a run ends with in which something is changed after step `at`."""
    from megatron_moe.precision.contract import PrecisionError
    from megatron_moe.training import loop

    steps, train_step = [], loop.train_step

    def spoiling(model: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
        result = train_step(model, optimizer, *rest, **options)
        steps.append(result)
        if len(steps) == at:
            spoil(what, model, optimizer)
        return result

    with mock.patch.object(loop, "train_step", spoiling), pytest.raises(PrecisionError) as error:
        trained({**SMALL, "train_iters": 6, "check_precision_interval": 2, **flags})
    return f"after {len(steps)} steps: {error.value}"


SINCE = "changed between training (iteration 2) and training (iteration 4)"


@pytest.mark.parametrize(
    ("what", "at", "precision", "named"),
    [
        ("moment", 4, "bf16", "weight (exp_avg)"),
        ("gradient", 3, "fp16", "final_layernorm.weight (accumulated gradient)"),
    ],
)
def test_a_tensor_that_turned_bf16_stops_the_run_by_name(gloo, what, at, precision, named):
    (told,) = gloo.run(1, stopped, what=what, at=at, flags={precision: True})
    assert told.startswith("after 4 steps: precision contract broken at training (iteration 4): ")
    assert told.endswith(f"{named} is torch.bfloat16, must be torch.float32: {SINCE}")


@pytest.mark.parametrize("switch", rows(SWITCHES, test=[*SWITCHES][::3]))
def test_a_switch_that_was_set_in_the_middle_stops_the_run_by_name(gloo, switch):
    (told,) = gloo.run(1, stopped, what=switch, at=3, flags={"bf16": True, "deterministic_mode": True})
    assert told.startswith(f"after 4 steps: precision contract broken at training (iteration 4): {switch} (switch) is ")
    assert told.endswith(SINCE)


def test_a_bias_that_was_cast_is_not_computed_with(gloo):
    (told,) = gloo.run(1, stopped, what="bias", at=3, flags={"bf16": True})
    assert told.startswith("after 3 steps") and "expert_bias is torch.float16, must be torch.float32" in told


def test_without_an_interval_the_moment_is_noticed_where_the_run_saves_and_nothing_is_saved(gloo, tmp_path):
    flags = {"bf16": True, "check_precision_interval": 0, "save": str(tmp_path)}
    (told,) = gloo.run(1, stopped, what="moment", at=6, flags=flags)
    assert told.startswith("after 6 steps: precision contract broken at saving (iteration 6): ")
    assert not list(tmp_path.glob("iter_*"))


def test_groups_of_codes_that_are_not_finite_are_counted():
    exponents = torch.tensor([3, NOT_FINITE, -5], dtype=torch.int8)
    assert not is_finite(exponents) and is_finite(exponents[:1])
    assert is_finite(torch.full((3,), 255, dtype=torch.uint8))
    assert non_finite_text(exponents) == "1 of 3 groups that are not finite"
