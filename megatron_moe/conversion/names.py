"""What families of models call the same tensors. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """What families call the same things.

    experts: prefix of an expert's matrices, {e} being its number, and the names of gate, up and down.
    router: the gate's weight. shared: prefix of the shared expert.
    """

    experts: str = "mlp.experts.{e}."
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "mlp.gate.weight"
    shared: str = "mlp.shared_experts."


DEEPSEEK = Names()
QWEN = Names(shared="mlp.shared_expert.")
MIXTRAL = Names("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2"), "block_sparse_moe.gate.weight")
