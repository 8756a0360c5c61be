"""A short text by the trained model, for the person who waited."""

from __future__ import annotations

from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.model.generate import generate
from megatron_moe.training.evaluate import gathered_parameters
from megatron_moe.training.job import Job

# The likeliest token each time leads a small model into a loop; this keeps to likely ones.
TEMPERATURE = 0.7


def sample_text(job: Job, tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    """The prompt and its continuation, drawn with the run's seed; the same on every rank."""
    prompt_ids = tokenizer.tokenize(prompt) or [tokenizer.eod]
    with gathered_parameters(job.trained.model):
        new_ids = generate(
            job.trained.model,
            prompt_ids,
            num_tokens,
            job.run.model.seq_length,
            vocab_size=tokenizer.vocab_size,
            temperature=TEMPERATURE,
            seed=job.run.training.seed,
            end_id=tokenizer.eod,
        )
    return prompt + tokenizer.detokenize([token for token in new_ids if token != tokenizer.eod])
