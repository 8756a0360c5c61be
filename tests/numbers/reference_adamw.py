"""What an optimizer step does to a model's weights, in fp64, written to be read; torch only.

Clip the gradients to a joint norm, then AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with the learning
rate as the schedule's multiplier): moments, bias correction, and weight decay beside the gradient, not in it. Vectors
(norms and biases) do not decay.
"""

import math

import torch
from torch import Tensor

Named = dict[str, Tensor]


def joint_norm(gradients: Named) -> float:
    """The norm of all gradients as one vector."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def clipped(gradients: Named, largest_norm: float) -> Named:
    """All gradients times one factor, so that their joint norm is at most `largest_norm`; 0 clips nothing."""
    norm = joint_norm(gradients)
    factor = largest_norm / norm if 0 < largest_norm < norm else 1.0
    return {name: gradient.double() * factor for name, gradient in gradients.items()}


def learning_rate(step: int, *, first: float, peak: float, least: float, warm_up_steps: int, decay_steps: int) -> float:
    """The rate that step 0, 1, 2, ... uses: a line from `first` to `peak`, then half a cosine wave down to `least`."""
    if step < warm_up_steps:
        return first + (peak - first) * step / warm_up_steps
    if step >= decay_steps:
        return least
    share = (step - warm_up_steps) / (decay_steps - warm_up_steps)
    return least + (peak - least) * (1 + math.cos(math.pi * share)) / 2


class AdamW:
    """Weights, moments and the number of steps, all by name."""

    def __init__(self, weights: Named, *, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
        self.weights = {name: weight.double().clone() for name, weight in weights.items()}
        self.first = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self.steps = 0

    def step(self, gradients: Named, rate: float) -> None:
        """One update of every weight with a gradient in fp64."""
        self.steps += 1
        for name, weight in self.weights.items():
            gradient = gradients[name]
            self.first[name] = self.beta1 * self.first[name] + (1 - self.beta1) * gradient
            self.second[name] = self.beta2 * self.second[name] + (1 - self.beta2) * gradient**2
            mean = self.first[name] / (1 - self.beta1**self.steps)
            variance = self.second[name] / (1 - self.beta2**self.steps)
            decay = self.weight_decay * weight if weight.dim() > 1 else torch.zeros_like(weight)
            self.weights[name] = weight - rate * (mean / (variance.sqrt() + self.eps) + decay)
