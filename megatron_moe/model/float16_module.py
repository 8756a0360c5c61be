"""Float16Module: the half-precision wrapper that leaves fp32 state alone, and proves it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import Float16Module as EngineFloat16Module

from megatron_moe.parallel.copying import CopiesShareGroups
from megatron_moe.precision.contract import PrecisionError, declared_fp32_state, verify_fp32_state


class Float16Module(CopiesShareGroups, EngineFloat16Module):
    """Cast a model's parameters to bf16 or fp16 and its inputs and outputs at the pipeline's ends.

    It is megatron-core's wrapper (so that the engine's `isinstance` tests hold) with a promise added: state that a
    module declares in `fp32_state` (`expert_bias`, `local_tokens_per_expert`) has the same bits after wrapping as
    before.

    Args:
        config: the engine's TransformerConfig; exactly one of `fp16` and `bf16` is set.
        module: the model.

    Raises:
        PrecisionError: if any declared fp32 tensor changed its dtype or its bits, naming it.
    """

    def __init__(self, config: Any, module: torch.nn.Module) -> None:
        before = {name: _bits(tensor) for name, tensor in declared_fp32_state(module)}
        super().__init__(config, module)
        verify_fp32_state(self.module, "wrapping in Float16Module")
        changed = [
            name
            for name, tensor in declared_fp32_state(self.module)
            if tensor.device.type != "meta" and not torch.equal(_bits(tensor), before[name])
        ]
        if changed:
            raise PrecisionError(f"wrapping in Float16Module changed the value of {', '.join(changed)}")

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As every torch module's; the engine's wrapper knows no `assign`."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.int32).clone()
