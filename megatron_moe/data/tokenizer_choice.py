"""The tokenizer of a run: built from its flags, or from the files that came with an imported model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.model_flags import ModelConfig
from megatron_moe.config.paths import require_readable
from megatron_moe.config.rules.sources import tokenizer_files_go_with_their_type
from megatron_moe.config.run_flags import TOKENIZER_FIELDS, TOKENIZER_FILES, DataConfig
from megatron_moe.config.schema import Run
from megatron_moe.data.tiktoken_models import KIMI_FILE, MEGATRON_SPECIAL, kimi_tokenizer, megatron_tiktoken
from megatron_moe.data.tokenizers import (
    ByteTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from megatron_moe.io.texts import how_to_download, is_hub_name


def build_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """Build the tokenizer of a run.

    Args:
        data: the run's data section: the fields of TOKENIZER_FIELDS, and `mock_data`.
        vocab_size: `--vocab-size`. NullTokenizer, which mock data uses where no type is given, requires it, and
            TikTokenizer takes as many ids; the others ignore it (`checks.check_data` compares it with theirs).

    Raises:
        ConfigError: a flag is missing, or a file is missing or malformed.
    """
    kind = data.tokenizer_type
    is_named = kind is not None
    if kind is None and (data.mock_data or data.program_data):
        kind = "NullTokenizer"
    if kind is None:
        raise ConfigError(
            f"--tokenizer-type is missing: choose one of {', '.join(TOKENIZER_FILES)} (ByteTokenizer needs no file)"
        )
    if kind not in TOKENIZER_FILES:
        raise ConfigError(f"--tokenizer-type {kind}: choose one of {', '.join(TOKENIZER_FILES)}")
    data = replace(data, tokenizer_type=kind)
    tokenizer_files_go_with_their_type(Run(data=data, model=ModelConfig(vocab_size=vocab_size)), 1)
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        assert vocab_size is not None
        return NullTokenizer(vocab_size, is_named)
    if kind == "GPT2BPETokenizer":
        return GPT2BPETokenizer(
            _existing("--vocab-file", data.vocab_file, kind), _existing("--merge-file", data.merge_file, kind)
        )
    if kind == "HuggingFaceTokenizer":
        return _of_hugging_face(_existing("--tokenizer-model", data.tokenizer_model))
    file = _existing("--tokenizer-model", data.tokenizer_model, kind)
    if kind == "TikTokenizer":
        named = data.tiktoken_special_tokens or MEGATRON_SPECIAL
        return megatron_tiktoken(file, data.tiktoken_pattern, named, data.tiktoken_num_special_tokens, vocab_size)
    return SentencePieceTokenizer(file)


def tokenizer_of_step(
    config: Mapping[str, Any], trained_with: Mapping[str, Any], given: Mapping[str, Any], vocab_size: int, where: str
) -> tuple[Tokenizer, DataConfig]:
    """Build the tokenizer that a step was trained with, from its files of today.

    Args:
        config: the step's settings, by field.
        trained_with: what its state says of the tokenizer: type and hash; empty where nothing is known.
        given: fields of TOKENIZER_FIELDS that go before the step's, such as the place of moved files.
        where: the step, as messages name it.

    Returns:
        The tokenizer, and the data section that it was built from.

    Raises:
        ConfigError: a file is not where it was, or is not what it was.
    """
    named = {name: config[name] for name in TOKENIZER_FIELDS if config.get(name) is not None} | dict(given)
    kinds = {name: bool(config.get(name)) for name in ("mock_data", "program_data")}
    data = schema.build({**named, **kinds}).data
    wanted = trained_with.get("sha256")
    digest = "" if wanted is None else f" (SHA-256 {wanted[:12]}...)"
    fields = TOKENIZER_FILES.get(data.tokenizer_type or "", ())
    for name in fields:
        flag, path = all_fields()[name].flag, getattr(data, name)
        if path is not None and not Path(path).exists():
            raise ConfigError(
                f"{flag} {path}: is not there, and {where} was trained with it{digest}; say where it is now: "
                f"{flag} PATH"
            )
    tokenizer = build_tokenizer(data, vocab_size)
    if wanted not in (None, tokenizer.sha256):
        files = " with ".join(str(getattr(data, name)) for name in fields) or tokenizer.name
        flags = " ".join(f"{all_fields()[name].flag} PATH" for name in fields)
        raise ConfigError(
            f"{where}: was trained with another tokenizer than {files} is now (SHA-256 {wanted[:12]}..., now "
            f"{tokenizer.sha256[:12]}...); name the right one: --tokenizer-type {trained_with.get('type')} {flags}"
            f"{tokenizer.remedy(wanted)}"
        )
    return tokenizer, data


def tokenizer_of_folder(folder: Path, files: Mapping[str, Path]) -> Tokenizer | None:
    """Return the tokenizer that came with an imported model, whose files by name are in `folder`; None without one."""
    if "tokenizer.json" in files or KIMI_FILE in files:
        return _of_hugging_face(folder)
    return SentencePieceTokenizer(files["tokenizer.model"]) if "tokenizer.model" in files else None


def _of_hugging_face(path: Path) -> Tokenizer:
    """Return the tokenizer of a folder or of a file in it: a tokenizer.json, else a tiktoken.model."""
    folder = path if path.is_dir() else path.parent
    is_kimi = path.name == KIMI_FILE or (path.is_dir() and not (path / "tokenizer.json").exists())
    if is_kimi and (folder / KIMI_FILE).is_file():
        return kimi_tokenizer(folder)
    return HuggingFaceTokenizer(path)


def _existing(flag: str, given: str | None, needs_file: str = "") -> Path:
    """Return the path that a flag names, which has to exist; where a type of tokenizer `needs_file`, it is a file."""
    path = Path(str(given))
    require_readable(flag, str(given))
    if not path.exists():
        advice = "give the path of one you have, such as a model's folder, or train one: megatron-moe prepare"
        advice += " --train-tokenizer"
        if flag != "--tokenizer-model":
            advice = f"give the path of {needs_file}'s file"
        elif is_hub_name(str(given)):
            advice = how_to_download(str(given), only='--include "*token*" ')
            if needs_file:
                advice += f"/FILE, the file in it for {needs_file}"
        raise ConfigError(f"{flag} {given} does not exist; {advice}")
    if needs_file and not path.is_file():
        raise ConfigError(f"{flag} {path} is a folder; {needs_file} needs the file itself")
    return path
