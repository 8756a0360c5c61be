"""Watch a run and act in it: a callback reads the model and ends the run when the loss is low enough.

python examples/python/own_callback.py
"""

import torch

import megatron_moe as mm


class Watch(mm.Callback):
    """Keeps the norm of each layer's router gradient, and ends the run at a loss."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.router_norms: list[list[float]] = []

    def before_update(self, step) -> None:
        """Read the gradients, which are reduced and not clipped yet."""
        norms = []
        for chunk in self.trainer.trained.model:
            for name, parameter in chunk.named_parameters():
                if name.endswith("router.weight"):
                    norms.append(float(torch.linalg.vector_norm(parameter.main_grad)))
        self.router_norms.append(norms)

    def after_step(self, step, result) -> None:
        """End the run on all ranks after this step, with a checkpoint where the run saves."""
        if result.loss < self.target:
            self.trainer.end_run(f"loss {result.loss:.3f} is below {self.target}")


watch = Watch(target=5.4)
settings = mm.Settings.from_preset("tiny", mock_data=True, vocab_size=256, seq_length=64, train_iters=50, lr=3e-3)
result = mm.train(settings, callbacks=[watch])
print(f"{len(result.steps)} steps; router gradients of the last one: {watch.router_norms[-1]}")
