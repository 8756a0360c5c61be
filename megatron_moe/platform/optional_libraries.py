"""Finds out whether Transformer Engine and apex can be used here, and hides one that cannot from the engine.

megatron-core imports both where they are installed, and expects no other failure than that they are missing. A build
for another torch or CUDA fails with an ImportError, OSError, AssertionError or RuntimeError of its own, and with it
`import megatron.core`, also for a run that uses neither library. Loads no torch by itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys

# What of a library has to be loaded before it can be used. apex without its extensions offers an Adam that cannot be
# made; an unrelated package of that name has no optimizers.
_MODULES = {
    "transformer_engine": ("transformer_engine.pytorch",),
    "apex": ("apex.optimizers", "amp_C"),
}
NAMES = {"transformer_engine": "Transformer Engine", "apex": "apex"}
NOT_INSTALLED = "it is not installed"
_REASON_LENGTH = 300


def hide_unusable(*, cuda: bool) -> None:
    """Make Transformer Engine and apex look missing in this process where they cannot be used.

    Both need a CUDA device, so that they are not even imported without one. One that the program has imported by itself
    already is left alone.
    """
    for library in _MODULES:
        if library in sys.modules or not _is_installed(library):
            continue
        if not cuda or why_not_loaded(library) is not None:
            _hide(library)


@functools.cache
def why_not_loaded(library: str) -> str | None:
    """Return why a library cannot be loaded, None if it can be; loads it at the first call."""
    if not _is_installed(library):
        return NOT_INSTALLED
    if library in sys.modules and sys.modules[library] is None:
        return "it is hidden, because torch saw no CUDA device when the engine was loaded"
    try:
        for module in _MODULES[library]:
            importlib.import_module(module)
    except Exception as error:  # whatever its own code raises
        return f"it is installed and cannot be loaded: {_one_line(error)}"
    return None


def _is_installed(library: str) -> bool:
    """Return whether there is a library of this name, also one that is hidden."""
    return library in sys.modules or importlib.util.find_spec(library) is not None


def _hide(library: str) -> None:
    """Let `import library` raise ModuleNotFoundError, and forget the parts of it that were loaded."""
    for name in [name for name in sys.modules if name.startswith(f"{library}.")]:
        del sys.modules[name]
    sys.modules[library] = None  # type: ignore[assignment]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    shown = text if len(text) <= _REASON_LENGTH else text[:_REASON_LENGTH] + " ..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
