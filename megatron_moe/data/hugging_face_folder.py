"""The tokenizer of a Hugging Face folder, with the ids that transformers' AutoTokenizer gives.

`tokenizer.json` is not all of it: `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` add
tokens, and the class that `tokenizer_config.json` or `config.json` names may put together another tokenizer from the
same vocabulary. Where transformers is installed, it is asked. Where it is not, the tokens are merged here by its rules
(those of transformers 5), and a class that may build something else than the file says is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_moe.config.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

JSON, SETTINGS, SPECIAL, ADDED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
TEMPLATE = "chat_template.jinja"
_MODEL = "config.json"
_LEGACY = ("vocab.json", "tokenizer.model", "vocab.txt")
"""Vocabularies from which transformers builds a tokenizer where there is no tokenizer.json."""
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_AS_WRITTEN = ("PreTrainedTokenizer", "TokenizersBackend")
"""Classes that take tokenizer.json as it is written."""
_MODELS_AS_WRITTEN = ("mixtral", "glm4_moe")
"""Types of models whose tokenizer.json transformers takes as it is written, whatever class the folder names."""
_QWEN_MODELS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2Tokenizer divides a text before its merges (transformers, models/qwen2/tokenization_qwen2.py)."""


def read_folder_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], str, str | None]:
    """Read the tokenizer of a folder, or of a file of the tokenizers library.

    A file that is not called `tokenizer.json` stands for itself, with the roles that the files beside it name.

    Returns:
        The tokenizer without truncation and padding; role, such as `eos_token` -> its token; the SHA-256 of
        tokenizer.json where the other files change none of its ids, else of all that decides them; and that of
        tokenizer.json alone, None where there is none.

    Raises:
        ConfigError: there is none, a file is malformed, or its ids in transformers cannot be known.
    """
    import tokenizers

    folder = path if path.is_dir() else path.parent
    file = path / JSON if path.is_dir() else path
    alone = file.name != JSON or not any((folder / name).is_file() for name in (SETTINGS, SPECIAL, ADDED, _MODEL))
    if not file.is_file():
        if not any((folder / name).is_file() for name in _LEGACY):
            raise ConfigError(f"--tokenizer-model {path} contains no {JSON}; give the file or its folder")
        if not has_transformers():
            raise ConfigError(
                f"--tokenizer-model {path} contains no {JSON}: transformers builds its tokenizer from older files, and "
                "is not installed; run pip install transformers"
            )
        model, roles = _of_transformers(folder)
        return model, roles, _meaning(model), None
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    try:
        model = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ConfigError(f"--tokenizer-model {file} is not a {JSON}: {error}") from error
    padding = model.padding
    _take_whole_texts(model)
    if alone:
        roles = _roles(json_object(folder / SPECIAL) | json_object(folder / SETTINGS))
        return model, roles, digest, digest
    as_written = _meaning(model)
    if has_transformers():
        model, roles = _of_transformers(folder)
    else:
        try:
            model, roles = _with_added_tokens(model, padding, folder)
        except ConfigError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"--tokenizer-model {folder}: its files of settings are malformed: {error}") from error
    meaning = _meaning(model)
    return model, roles, digest if meaning == as_written else meaning, digest


def has_transformers() -> bool:
    """Return whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def _take_whole_texts(model: tokenizers.Tokenizer) -> None:
    model.no_truncation()
    model.no_padding()


def chat_template_of(folder: Path) -> Any:
    """Return the chat template of a tokenizer's folder: a text, or a list of named ones; None where there is none."""
    file = folder / TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return json_object(folder / SETTINGS).get("chat_template")


def json_object(file: Path) -> dict[str, Any]:
    """Return the content of a file of settings; nothing where there is no file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return found


def text_of_token(token: str | dict[str, Any] | None) -> str | None:
    """Return the text of a token, which is written as it is or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _roles(said: dict[str, Any]) -> dict[str, str]:
    return {role: str(token) for role in _ROLES if (token := text_of_token(said.get(role))) is not None}


def _written(model: tokenizers.Tokenizer) -> tuple[dict[str, Any], str]:
    """Return what the file of a tokenizer says before its vocabulary, and the rest as it is: that is most of it."""
    text = model.to_str()
    at = text.index('"vocab":')  # inside a string its quotation marks would have backslashes
    return json.loads(text[:at] + '"vocab":null}}'), text[at:]


def _meaning(model: tokenizers.Tokenizer) -> str:
    """Return the SHA-256 of what decides the ids of texts, the same for all that mean the same."""
    said, vocabulary = _written(model)
    settings = {name: value for name, value in said["model"].items() if value not in (None, "") and value is not False}
    tokens = [{name: value for name, value in token.items() if name != "special"} for token in said["added_tokens"]]
    try:
        around = [model.encode("", add_special_tokens=True).ids, model.encode("", "", add_special_tokens=True).ids]
    except Exception:  # bare, for an empty text that the model has no token for
        around = []
    meant = {
        "model": settings, "normalizer": said["normalizer"], "pre_tokenizer": _without_offsets(said["pre_tokenizer"]),
        "around": around, "splits": model.encode_special_tokens,
        "added_tokens": sorted(tokens, key=lambda token: token["id"]),
    }  # fmt: skip
    return hashlib.sha256((json.dumps(meant, sort_keys=True) + vocabulary).encode()).hexdigest()


def _without_offsets(step: object) -> Any:
    """Return a step of a pre-tokenizer without a setting that decides places in the text, not ids."""
    if isinstance(step, list):
        return [_without_offsets(part) for part in step]
    if not isinstance(step, dict):
        return step
    return {name: _without_offsets(value) for name, value in step.items() if name != "trim_offsets"}


def _of_transformers(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return the tokenizer that transformers makes of the folder, and its roles. Runs no code of the folder."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any type: the folder decides which of its code runs
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"--tokenizer-model {folder}: transformers does not read it: {first}; where {JSON} alone is the tokenizer, "
            "copy it into a folder of its own and name that"
        ) from error
    finally:
        logging.set_verbosity(before)
    model = getattr(theirs, "backend_tokenizer", None)
    if model is None:
        raise ConfigError(
            f"--tokenizer-model {folder}: transformers reads it with {type(theirs).__name__}, which is not one of the "
            f"tokenizers library; save it as one ({JSON})"
        )
    _take_whole_texts(model)
    return model, {role: str(token) for role in _ROLES if (token := getattr(theirs, role, None)) is not None}


def _with_added_tokens(
    model: tokenizers.Tokenizer, padding: dict[str, Any] | None, folder: Path
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Add the tokens of a folder's other files to the tokenizer of its `tokenizer.json`; return it and its roles."""
    import tokenizers

    written, _ = _written(model)
    said = json_object(folder / SETTINGS)
    model_type = json_object(folder / _MODEL).get("model_type")
    defaults = _class_defaults(said, model_type, written, folder)
    if not said.get("extra_special_tokens"):
        said["extra_special_tokens"] = said.get("additional_special_tokens") or []
    if "added_tokens_decoder" in said:
        known = {int(number): _token(token) for number, token in said["added_tokens_decoder"].items()}
    else:  # an older folder, with its special tokens in a file of their own
        special = json_object(folder / SPECIAL)
        if "additional_special_tokens" in special:
            special.setdefault("extra_special_tokens", special.pop("additional_special_tokens"))
        for role in _ROLES:
            if isinstance(special.get(role), dict):
                special[role] = {**special[role], "__type": "AddedToken"}
        said |= special
        named = {*_roles(said).values(), *map(text_of_token, _extra(said))}
        known = {
            number: tokenizers.AddedToken(token, normalized=token not in named, special=token in named)
            for token, number in json_object(folder / ADDED).items()
        }
        known |= {token["id"]: _token(token) for token in written["added_tokens"]}
    if defaults:  # the class keeps the vocabulary and adds the listed tokens anew: they have to get the same ids
        vocabulary = model.get_vocab(with_added_tokens=False)
        beyond = sorted(number for number, token in known.items() if token.content not in vocabulary)
        kept = beyond == list(range(len(vocabulary), len(vocabulary) + len(beyond)))
        if not kept or not model.get_added_tokens_decoder().keys() <= known.keys():
            raise _unknown(said, model_type, folder)
    for token in (*map(said.get, _ROLES), *_extra(said)):
        if isinstance(token, dict) and "__type" not in token:
            raise ConfigError(f"--tokenizer-model {folder}: transformers cannot read the token {token}; give its text")
    roles: dict[str, Any] = {**defaults, **{role: said[role] for role in _ROLES if role in said}}
    if padding is not None:
        roles.setdefault("pad_token", padding["pad_token"])
    others = [said[key] for key in said if key.endswith("_token") and key not in _ROLES and isinstance(said[key], str)]
    present = list(model.get_added_tokens_decoder().values())
    added = [token for _, token in sorted(known.items()) if repr(token) not in set(map(repr, present))]
    texts = {token.content for token in (*present, *added)}
    by_text = {token.content: token for token in known.values()}
    # The order decides the ids of those that the vocabulary does not have.
    for one in (*(roles.get(role) for role in _ROLES), *others, *_extra(said)):
        if one is not None and text_of_token(one) not in texts:
            # As the list of added tokens describes it where it is there.
            token = by_text.get(str(text_of_token(one)))
            if token is None:
                token = tokenizers.AddedToken(one, special=True) if isinstance(one, str) else _token(one)
            token.special = True
            added.append(token)
            texts.add(token.content)
    model.add_tokens(added)
    for number, token in known.items():
        if model.token_to_id(token.content) != number:
            raise ConfigError(
                f"--tokenizer-model {folder}: says that {token.content!r} has the id {number}, but the next free id of "
                f"{JSON} is {model.token_to_id(token.content)}, which transformers gives it; correct {SETTINGS}"
            )
    model.encode_special_tokens = bool(said.get("split_special_tokens", False))
    return model, _roles(roles)


def _extra(said: dict[str, Any]) -> Iterator[Any]:
    """Yield the special tokens without a role: a list, or an object by name."""
    extra = said.get("extra_special_tokens") or []
    yield from extra.values() if isinstance(extra, dict) else extra


def _token(said: dict[str, Any]) -> tokenizers.AddedToken:
    from tokenizers import AddedToken

    return AddedToken(**{name: value for name, value in said.items() if name not in ("id", "__type")})


def _class_defaults(
    said: dict[str, Any], model_type: str | None, written: dict[str, Any], folder: Path
) -> dict[str, str]:
    """Return the roles that the class of the folder fills, having checked that it takes the file as written."""
    name = (said.get("tokenizer_class") or "").removesuffix("Fast")
    by_bytes = '"ByteLevel"' in json.dumps(written["pre_tokenizer"])
    is_qwen = name == "Qwen2Tokenizer" or model_type == "qwen2" or (not name and model_type in _QWEN_MODELS)
    code = said.get("auto_map") or {}
    builds_it = not (code.get("AutoTokenizer") if isinstance(code, dict) else code) and not said.get(
        "fix_mistral_regex"
    )
    if builds_it and is_qwen and model_type not in _MODELS_AS_WRITTEN:
        space = bool(said.get("add_prefix_space"))
        steps = [
            {"type": "Split", "pattern": {"Regex": _QWEN_SPLIT}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": space, "use_regex": False},
        ]
        found = _without_offsets(written["pre_tokenizer"])
        if written["normalizer"] == {"type": "NFC"} and found == {"type": "Sequence", "pretokenizers": steps}:
            return dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    elif builds_it and (
        name in _AS_WRITTEN
        or model_type in _MODELS_AS_WRITTEN
        or (name == "LlamaTokenizer" and by_bytes)
        or (not name and model_type is None)
    ):
        return {}
    raise _unknown(said, model_type, folder)


def _unknown(said: dict[str, Any], model_type: str | None, folder: Path) -> ConfigError:
    what = said.get("tokenizer_class") or f"model_type {model_type}"
    return ConfigError(
        f"--tokenizer-model {folder}: {what} may build another tokenizer than {JSON} says, and transformers, which "
        f"would tell, is not installed; run pip install transformers, or, where {JSON} alone is the tokenizer, copy it "
        "into a folder of its own and name that"
    )
