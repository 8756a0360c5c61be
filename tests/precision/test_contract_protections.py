"""A model keeps its fp32 state when it is wrapped for half precision, and a wrapper notices one that does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_moe.config.schema import build
from tests.helpers.stepped_trainer import SMALL, TINY


def _run(**flags: Any) -> Any:
    return build({**TINY, **SMALL, **flags})


def _subject(name: str, pg_collection: Any) -> torch.nn.Module:
    """A MoE layer or a model whose fp32 state has values that bf16 and fp16 cannot hold."""
    from megatron_moe.model.build import build_model
    from megatron_moe.model.engine_config import transformer_config
    from megatron_moe.moe.layer import MoELayer
    from megatron_moe.moe.options import MoEOptions
    from megatron_moe.moe.router import routers

    run = _run()
    if name == "MoELayer":
        options = MoEOptions.from_run(run)
        module: Any = MoELayer(transformer_config(run), pg_collection=pg_collection, layer_number=1, options=options)
    else:
        (module,) = build_model(run, pg_collection, 128, wrap=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in routers([module]):
            router.expert_bias.copy_(torch.randn(8, generator=generator) * 1e-3 + 1.0)
            router.local_tokens_per_expert.copy_(torch.randint(65505, 2**24, (8,), generator=generator))
    return module


def wrapped(by_engine: bool, shielded: bool) -> list[bool] | str:
    """Whether each tensor of the fp32 state has kept its bits in a wrapped model, or the error of the wrapper."""
    from megatron.core.transformer.module import Float16Module as EngineFloat16Module

    from megatron_moe.model.engine_config import transformer_config
    from megatron_moe.model.float16_module import Float16Module
    from megatron_moe.parallel import groups
    from megatron_moe.precision.contract import PrecisionError, declared_fp32_state
    from megatron_moe.precision.fp32_state import Fp32State

    module = _subject("model", groups.initialize(_run()))
    before = [tensor.clone() for _, tensor in declared_fp32_state(module)]
    shield = Fp32State._apply
    if not shielded:
        del Fp32State._apply
    try:
        (EngineFloat16Module if by_engine else Float16Module)(transformer_config(_run(bf16=True)), module)
    except PrecisionError as error:
        return str(error)
    finally:
        Fp32State._apply = shield
    after = [tensor for _, tensor in declared_fp32_state(module)]
    return [one.dtype == torch.float32 and torch.equal(one, other) for one, other in zip(after, before, strict=True)]


@pytest.mark.engine
def test_a_wrapper_keeps_the_bits_of_the_fp32_state_and_notices_a_model_whose_shield_is_gone(gloo):
    for by_engine in (False, True):
        (kept,) = gloo.run(1, wrapped, by_engine=by_engine, shielded=True)
        assert len(kept) >= 2 and all(kept)
    (said,) = gloo.run(1, wrapped, by_engine=False, shielded=False)
    assert "expert_bias is torch.bfloat16" in said
