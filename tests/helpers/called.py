"""The operations of torch that are called within a block."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Called(TorchDispatchMode):
    """Notes each operation and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls.append((func.overloadpacket, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """The operations' names, without their namespaces."""
        return [operation.__name__ for operation, _ in self.calls]
