"""Train a small model from Python, look at its metrics, and let it continue a few tokens.

python examples/python/train.py
"""

import megatron_moe as mm

settings = mm.Settings.from_preset(
    "tiny", mock_data=True, vocab_size=256, seq_length=64, train_iters=20, eval_iters=2, lr=3e-3
)
result = mm.train(settings)

for step in result.steps[::5]:
    print(f"step {step.iteration}: loss {step.loss:.3f}, gradient norm {step.grad_norm:.2f}")
print("validation loss:", round(result.summary["valid_loss"], 3))
print("the last layer's tokens per expert:", list(result.steps[-1].tokens_per_expert.values())[-1])
print("continued:", result.model.generate([1, 2, 3], max_new_tokens=8))
