"""Train with an optimizer of your own: Lion (arXiv:2302.06675), which steps by the sign of a momentum.

It updates fp32 main weights, so that it works with --bf16, --fp16 and every ZeRO stage; its state is in checkpoints.

python examples/python/own_optimizer.py
"""

import megatron_moe as mm


class Lion(mm.Adam):
    """Lion with decoupled weight decay; `exp_avg` is its momentum."""

    def update(self, group, params, grads, states) -> None:
        """Update weights of one group; `states` have exp_avg and exp_avg_sq, fp32."""
        first, second = group["betas"]
        for weight, grad, state in zip(params, grads, states):
            direction = (first * state["exp_avg"] + (1 - first) * grad).sign()
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
            state["exp_avg"].lerp_(grad, 1 - second)


settings = mm.Settings.from_preset(
    "tiny", mock_data=True, vocab_size=256, seq_length=64, train_iters=30, eval_iters=0, bf16=True, weight_decay=0.1
)
adam = mm.train(settings.replace(lr=3e-3))
lion = mm.train(settings.replace(lr=1e-3), optimizer=Lion)
print(f"loss after 30 steps: AdamW {adam.steps[-1].loss:.3f}, Lion {lion.steps[-1].loss:.3f}")
