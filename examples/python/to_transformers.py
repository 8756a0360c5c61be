"""Train, write a Hugging Face folder, and check that transformers computes the same logits.

python examples/python/to_transformers.py runs/tiny-hf
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import megatron_moe as mm

settings = mm.Settings.from_preset("tiny", mock_data=True, vocab_size=256, seq_length=64, train_iters=5, eval_iters=0)
model = mm.train(settings).model
folder = mm.save_hf(model, sys.argv[1])

theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ids = list(range(3, 40))
with torch.no_grad():
    expected = theirs(torch.tensor([ids])).logits[0]
difference = (model.logits(ids) - expected).abs().max()
print(f"{folder}: the largest difference of a logit is {difference:.1e}")
assert difference < 1e-4
