"""megatron_moe: Mixture-of-Experts pre-training on megatron-core.

Import this package before `megatron.core`: on a machine without CUDA the engine is adapted while it is being imported
(`engine/import_hook.py`). The import itself is light: neither torch nor the engine is loaded until it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_moe.engine import import_hook
from megatron_moe.io.source_version import VERSION as __version__
from megatron_moe.platform import env_vars

env_vars.check()
env_vars.keep_kernels_on_this_node()
import_hook.install()

if TYPE_CHECKING:
    from megatron_moe.config.errors import ConfigError, RunFault
    from megatron_moe.engine.adam import Adam
    from megatron_moe.model.float16_module import Float16Module
    from megatron_moe.moe.layer import MoELayer
    from megatron_moe.moe.router import TopKRouter
    from megatron_moe.training.callback import Callback
    from megatron_moe.training.finalize_model_grads import finalize_model_grads
    from megatron_moe.training.routes import RecordedRoutes, RoutingTrace
    from megatron_moe_tools.api import Settings, load_model, save_hf, train

_PUBLIC = {
    # The Python interface (docs/guides/python.md). It has the audit, the page and other programs' flags, as the command
    # line has them, and so is the workshop's; nothing else of the trainer names the workshop.
    "Settings": "megatron_moe_tools.api",
    "load_model": "megatron_moe_tools.api",
    "save_hf": "megatron_moe_tools.api",
    "train": "megatron_moe_tools.api",
    "Adam": "megatron_moe.engine.adam",
    "Callback": "megatron_moe.training.callback",
    "ConfigError": "megatron_moe.config.errors",
    "RunFault": "megatron_moe.config.errors",
    # Parts for a megatron-core program
    "Float16Module": "megatron_moe.model.float16_module",
    "MoELayer": "megatron_moe.moe.layer",
    "TopKRouter": "megatron_moe.moe.router",
    "finalize_model_grads": "megatron_moe.training.finalize_model_grads",
    "RecordedRoutes": "megatron_moe.training.routes",
    "RoutingTrace": "megatron_moe.training.routes",
}

__all__ = [
    "Adam", "Callback", "ConfigError", "Float16Module", "MoELayer", "RecordedRoutes", "RoutingTrace",
    "RunFault", "Settings", "TopKRouter", "__version__", "finalize_model_grads", "load_model", "save_hf", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))
