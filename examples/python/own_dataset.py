"""Train on samples of your own: anything with a length and numbered samples of seq_length + 1 token ids.

python examples/python/own_dataset.py
"""

import torch
from torch.utils.data import Dataset

import megatron_moe as mm

LENGTH, VOCABULARY = 32, 64


class Counting(Dataset):
    """Sequences that count upwards in steps of 1 to 7: the next token follows from the two before it."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(VOCABULARY, (size,), generator=generator)
        self.steps = torch.randint(1, 8, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> torch.Tensor:
        return (self.starts[number] + self.steps[number] * torch.arange(LENGTH + 1)) % VOCABULARY


settings = mm.Settings.from_preset(
    "tiny",
    vocab_size=VOCABULARY,
    seq_length=LENGTH,
    train_iters=60,
    eval_iters=2,
    lr=3e-3,
    micro_batch_size=16,
    global_batch_size=16,
)
result = mm.train(settings, data=Counting(1000, seed=1), valid_data=Counting(64, seed=2))
print(f"loss {result.steps[0].loss:.2f} -> {result.steps[-1].loss:.2f}, validation {result.summary['valid_loss']:.2f}")
print("10 13 16 ->", result.model.generate([10, 13, 16], max_new_tokens=5))
