"""Train on a stream, with a loss on the answers alone: an object whose __iter__ begins anew.

python examples/python/own_stream.py
"""

import random
from collections.abc import Iterator

import megatron_moe as mm

LENGTH, PLUS, EQUALS, PAD = 15, 10, 11, 12


class Sums:
    """Sums of two numbers below 50, a digit a token; only the digits of the answer count for the loss."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        numbers = random.Random(self.seed)
        while True:
            a, b = numbers.randrange(50), numbers.randrange(50)
            question = [*map(int, f"{a:02d}"), PLUS, *map(int, f"{b:02d}"), EQUALS]
            ids = [*question, *map(int, f"{a + b:02d}")]
            ids += [PAD] * (LENGTH + 1 - len(ids))
            counts = [len(question) <= place < len(question) + 2 for place in range(1, LENGTH + 1)]
            yield {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": [int(one) for one in counts]}


settings = mm.Settings.from_preset(
    "tiny",
    vocab_size=16,
    seq_length=LENGTH,
    train_iters=50,
    eval_iters=1,
    lr=3e-3,
    micro_batch_size=32,
    global_batch_size=32,
)
result = mm.train(settings, data=Sums(seed=1), valid_data=Sums(seed=2))
print(f"loss of the answers: {result.steps[0].loss:.2f} -> {result.steps[-1].loss:.2f}")
