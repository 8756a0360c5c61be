"""What the words of a log line mean, for `--log-legend`."""

from __future__ import annotations

LEGEND: tuple[tuple[str, str], ...] = (
    ("iteration", "optimizer steps that are done, those that were skipped included, of --train-iters"),
    ("loss", "nats per token of the global batch, the mean over the steps since the last line that were applied"),
    ("mtp", "the same of each further predicted token (--mtp-num-layers)"),
    ("SKIPPED", "steps since the last line that were not applied, in fp16 because a gradient was not finite"),
    ("lr", "the learning rate of the step"),
    ("grad norm", "the norm of all gradients before they are clipped (--clip-grad)"),
    ("params norm", "the norm of all weights after the step (--log-params-norm)"),
    ("num zeros", "elements of all gradients that are 0 (--log-num-zeros-in-grad)"),
    ("tok/s", "tokens per second of all ranks together, over all steps since the last line"),
    ("TFLOP/s", "10^12 operations of the model per second and device, recomputation not counted"),
    ("MFU", "the same as a share of --peak-tflops"),
    ("load", "of the worst layer, the tokens of its busiest expert over the mean: 1 is even; MaxVio is this less 1"),
    ("empty", "experts, of all layers together, that got no token in the step"),
    ("dropped", "share of choices beyond the experts' capacity (--moe-expert-capacity-factor)"),
    ("left", "time until --train-iters, at the pace of the last steps"),
    ("effective", "of the worst layer, how many evenly used experts would have the same entropy"),
    ("flips", "of the worst layer, the share of tokens that would get other experts if the router computed in fp64"),
    ("max logit", "the largest magnitude of a router's logits, over all tokens"),
    ("dense/expert norm", "the norms of the gradients outside of the experts, and of the experts"),
    ("LOST", "share of additions to gradients that were too small for the sum's dtype to change it"),
)
"""A word of a line -> its meaning, in the order of the line. The words from `effective` on are there where health was
measured (--health-interval)."""


def text() -> str:
    """Return the legend, a word a line."""
    width = max(len(word) for word, _ in LEGEND)
    return "\n".join(f"{word:<{width}}  {meaning}" for word, meaning in LEGEND)
