"""Layouts, and ways to store the optimizer's state, for tests in which one rank is the oracle of several."""

from typing import Any

import torch

from tests.helpers.stepped_trainer import EP2, LAYOUTS, ZERO_3, whole

FEW: dict[str, Any] = {"micro_batch_size": 4}
"""Two micro-batches of one rank, of which data-parallel ranks have one each."""
OF_DP4: dict[str, Any] = {"micro_batch_size": 2}
EVERY: dict[str, tuple[int, dict[str, Any]]] = {**LAYOUTS, "DP4 x EP2, ZeRO 3": (4, {**EP2, **ZERO_3, **OF_DP4})}

PACKED: dict[str, Any] = {"use_precision_aware_optimizer": True}
BF16_MOMENTS = {**PACKED, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
CODES = {**PACKED, "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "fp8"}
OFFLOAD = {"optimizer_cpu_offload": True}


def require_close(one: Any, many: Any, *, rtol: float = 0.0, atol: float = 2e-5) -> dict[str, torch.Tensor]:
    """Require that the ranks of two cases wrote the same tensors, up to tolerances; return those of `one`."""
    wanted, found = whole(one), whole(many)
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert found[key].isfinite().all(), key
        torch.testing.assert_close(found[key], wanted[key], rtol=rtol, atol=atol, msg=key)
    return wanted
