"""Rotary positions: the frequencies and the amplitude of each --rope-type, equal to transformers' ROPE_INIT_FUNCTIONS.

A pair of a head's channels is turned by position x frequency (RoPE, arXiv 2104.09864). For contexts longer than the
model was trained with, frequencies are divided: all of them (linear, arXiv 2306.15595), the slow ones (yarn, arXiv
2309.00071; Llama 3.1), or each by a factor of its own (LongRoPE, arXiv 2402.13753). Yarn and LongRoPE make queries and
keys longer too, by the amplitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.config.model_flags import ModelConfig
from megatron_moe.config.schema import Run
from megatron_moe.engine.layers import RotaryEmbedding


@dataclass(frozen=True)
class Rotation:
    """How the first `width` channels of each head are rotated, or the positional part in latent attention."""

    model: ModelConfig
    width: int

    @classmethod
    def from_run(cls, run: Run) -> Rotation | None:
        """Return a run's rotation; None without positions."""
        model = run.model
        if model.position_embedding_type != "rope":
            return None
        latent = model.multi_latent_attention
        return cls(model, model.qk_pos_emb_head_dim if latent else int(run.derived.head_size * model.rotary_percent))

    def is_long(self, length: int) -> bool:
        """Return whether a sequence of `length` tokens is rotated at LongRoPE's frequencies for long ones."""
        return self.model.rope_type == "longrope" and length > self.model.original_max_position_embeddings

    def frequencies(self, length: int) -> Tensor:
        """Return radians per position, fp32 [width / 2], in a sequence of `length` tokens (LongRoPE has two sets)."""
        model, factor = self.model, self.model.rotary_scaling_factor
        periods = model.rotary_base ** (torch.arange(0, self.width, 2, dtype=torch.float32) / self.width)
        frequencies = 1.0 / periods
        if model.rope_type == "rope":
            return frequencies
        if model.rope_type == "linear":
            return frequencies / factor
        if model.rope_type == "longrope":
            factors = model.long_factor if self.is_long(length) else model.short_factor
            return 1.0 / (torch.tensor(factors, device=periods.device) * periods)
        kept = 1 - self._yarn_ramp() if model.rope_type == "yarn" else self._llama3_share(frequencies)
        return frequencies / factor * (1 - kept) + frequencies * kept

    def _yarn_ramp(self) -> Tensor:
        """Return how far each pair is on the way from fast frequencies, 0, to slow ones, 1."""
        model = self.model

        def place(rotations: float) -> float:
            """Return the (fractional) index of the pair that turns so often in the original context."""
            periods = model.original_max_position_embeddings / (rotations * 2 * math.pi)
            return self.width * math.log(periods) / (2 * math.log(model.rotary_base))

        first, last = place(model.beta_fast), place(model.beta_slow)
        if model.yarn_correction_range_round_to_int:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.width - 1)
        span = last - first or 0.001  # as DeepSeek's code does, where both ends meet
        return ((torch.arange(self.width // 2, dtype=torch.float32) - first) / span).clamp(0, 1)

    def _llama3_share(self, frequencies: Tensor) -> Tensor:
        """Return the share of each frequency that is kept, by its rotations in the original context."""
        model = self.model
        rotations = model.original_max_position_embeddings / (2 * math.pi / frequencies)
        return ((rotations - model.low_freq_factor) / (model.high_freq_factor - model.low_freq_factor)).clamp(0, 1)


class Angles(RotaryEmbedding):
    """The engine's table of angles for grouped-query attention, at the frequencies of a `Rotation`.

    The engine's attention multiplies cosines and sines by the amplitude (`model/engine_config.py`).
    """

    rotation: Rotation

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles, fp32 [max_seq_len, width / 2], of the last `max_seq_len` positions of a sequence.

        offset: the number of positions before them.
        """
        device, end = self.inv_freq.device, offset + max_seq_len
        on_device: dict[bool, Tensor] = self.__dict__.setdefault("_on_device", {})
        if (is_long := self.rotation.is_long(end)) not in on_device:
            on_device[is_long] = self.rotation.frequencies(end).to(device)
        return torch.outer(torch.arange(offset, end, dtype=torch.float32, device=device), on_device[is_long])
