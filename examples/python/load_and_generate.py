"""Load a step of a run, or a Hugging Face folder, and use it as a torch module.

python examples/python/load_and_generate.py runs/demo/checkpoints "def main():"
"""

import sys

import torch

import megatron_moe as mm

model = mm.load_model(sys.argv[1])
prompt = sys.argv[2]

logits = model.logits(prompt)  # [S, V], fp32
probabilities, ids = logits[-1].softmax(-1).topk(5)
for probability, token in zip(probabilities.tolist(), ids.tolist()):
    print(f"{probability:6.1%} {model.tokenizer.detokenize([token])!r}")
print(prompt + model.generate(prompt, max_new_tokens=20))

# It is a torch module: the loss of the prompt under the model, and its gradient.
tokens = torch.tensor([model.tokenizer.tokenize(prompt)])
loss = torch.nn.functional.cross_entropy(model(tokens)[0, :-1].float(), tokens[0, 1:])
loss.backward()
largest = max(model.named_parameters(), key=lambda named: 0 if named[1].grad is None else named[1].grad.abs().max())
print(f"loss {loss:.3f}; the largest gradient is in {largest[0]}")
