"""A tokenizer of Hugging Face's that is made in a moment, and a model in a folder with it, as models are published."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch

from tests.helpers import tiny_models

TEXTS = [f"def area_{i}(width, height):\n    return width * height + {i}  # naïve\n" for i in range(60)]


def byte_level(folder: Path, size: int = 330) -> Path:
    """A tokenizer of Hugging Face's with a begin token that its post-processor puts before a text."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<|bos|>", "<|end|>"],
        initial_alphabet=letters if size > len(letters) else [],
        show_progress=False,
    )
    model.train_from_iterator(TEXTS, trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", model.token_to_id("<|bos|>"))]
    )
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    said = {"eos_token": "<|end|>", "bos_token": "<|bos|>", "pad_token": "<pad>", "auto_map": {"a": "b"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, "tokenizer_class": "LlamaTokenizer"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def published(case: str, seed: int, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model of `tiny_models` with a tokenizer and generation settings in its folder."""
    byte_level(folder, tiny_models.VOCABULARY)
    model = tiny_models.make(case, seed, folder, dtype)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    return model
