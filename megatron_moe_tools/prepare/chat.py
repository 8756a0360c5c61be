"""Turns conversations into token ids and a mask of the trained ones, by a chat template.

A template is rendered by transformers, in its sandbox. What an answer is follows from rendering prefixes: it begins
where the conversation before it, with the prompt for an answer, ends, and ends with its end-of-turn token. Markers in
a template (`{% generation %}`) are not needed; most templates have none, and a mask by markers is then silently empty.

What cannot be trained right is a `BadRecord` that shows the conversation with its trained tokens marked: a template
that renders a turn in another way once others follow, or leaves out what a turn says; a mask of nothing, or of all.
"""

from __future__ import annotations

import importlib.util
import json
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_moe.config.errors import ConfigError
from megatron_moe.data.hugging_face_folder import chat_template_of
from megatron_moe.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megatron_moe_tools.prepare.inputs import BadRecord

ASSISTANT, LAST, ALL = "assistant", "last", "all"
TRAIN_ON = (ASSISTANT, LAST, ALL)
CHAT_KEYS = ("messages", "conversations", "system", "tools", "chat_template_kwargs")
"""Keys of a record that are read; of the first two one."""
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_ROLES_OF_FROM = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
_ROLES_OF_FROM |= {"model": "assistant", "system": "system", "tool": "tool", "observation": "tool"}
"""What `from` says in `conversations` -> role."""
_SAID = {"content": "", **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "thinking")}
_CONTENT = {"assistant": "answer"}
"""Keys of a message with what it says -> what that is; of content by its role."""
_EXCERPT = 60  # characters where two renderings part
_LONGEST_SHOWN = 2000


class Conversation(NamedTuple):
    """A record: messages with `role` and `content`, JSON schemas of tools, and variables of the template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


class ChatIds(NamedTuple):
    """A rendered conversation.

    text: as the template renders it. ids: of all tokens. mask: for each token 1 if it is trained, else 0. spans: for
    each token its first character and the one behind its last.
    """

    text: str
    ids: list[int]
    mask: list[int]
    spans: list[tuple[int, int]]

    def refuse(self, reason: str, problem: str) -> NoReturn:
        """Raise a `BadRecord` that shows the conversation."""
        raise BadRecord(reason, f"{problem}\n{marked(self)}")


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become tokens.

    Attributes:
        template: in Jinja.
        tool_template: for conversations with tools, where a tokenizer has another one for these.
        train_on: which turns are trained, one of `TRAIN_ON`.
        longest: most tokens of a conversation less one, the positions that it takes; None: any number.
        special_tokens: role -> token, variables of templates.
    """

    template: str
    tool_template: str | None
    train_on: str
    longest: int | None
    special_tokens: dict[str, str] = field(default_factory=dict)

    def render(self, conversation: Conversation, turns: int, *, prompt: bool = False) -> str:
        """Return the text of the first `turns` messages, with the `prompt` for an answer behind them.

        Raises:
            BadRecord: the template refuses it.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.template
        if conversation.tools and self.tool_template is not None:
            template = self.tool_template
        try:
            rendered: Any = render_jinja_template(
                conversations=[conversation.messages[:turns]],
                tools=conversation.tools,  # type: ignore[arg-type]
                chat_template=template,
                add_generation_prompt=prompt,
                **{**self.special_tokens, **conversation.variables},
            )
        except Exception as error:  # of the template's own, of Jinja's sandbox, or of what it calls with these values
            problem = f"the chat template refuses its first {turns} messages: {type(error).__name__}: {error}"
            raise BadRecord("refused by the template", problem) from None
        return rendered[0][0]


# ---- records


def conversation_of(record: dict[str, Any], key: str, there: Iterable[str]) -> Conversation:
    """Return the conversation of a JSON object or of a row; `there` names all that the line or table has.

    Raises:
        BadRecord: it is none: a key is missing, or a message has no role that is known, or no content.
    """
    found = record.get(key)
    if found is None and key == CHAT_KEYS[0]:
        found = record.get(CHAT_KEYS[1])
    if found is None:
        names = ", ".join(map(repr, there)) or "no keys"
        raise BadRecord("missing key", f"key {key!r} is missing (it has: {names}); see --json-keys")
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise BadRecord("no conversation", f"{key!r} is no list of messages, but {_shortened(found)}")
    messages = [_message(message, number) for number, message in enumerate(found, 1)]
    if record.get("system"):
        messages.insert(0, _message({"role": "system", "content": record["system"]}, 0))
    tools, variables = _decoded(record, "tools", list), _decoded(record, "chat_template_kwargs", dict)
    tools = [_decoded({"tools": tool}, "tools", dict) for tool in tools or ()]
    return Conversation(messages, tools or None, variables or {})


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a message as templates expect it; a table has None for the keys that a message lacks."""
    found = {key: value for key, value in message.items() if value is not None}
    if "role" not in found and "from" in found:
        role = _ROLES_OF_FROM.get(str(found["from"]))
        found = {"role": role or found["from"], "content": found.get("value")}
    role, content = found.get("role"), found.setdefault("content", None)
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(sorted(_ROLES))
        raise BadRecord("unknown role", f"message {number} has the role {role!r}; roles are {known}")
    if content is None and not found.get("tool_calls"):
        raise BadRecord("no content", f"message {number} ({role}) has no content")
    is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not isinstance(content, str) and not is_parts and content is not None:
        raise BadRecord("no content", f"the content of message {number} ({role}) is {_shortened(content)}, no text")
    if isinstance(content, list) and any(part.get("type", "text") != "text" for part in content):
        raise BadRecord(
            "not text alone", f"message {number} ({role}) has parts that are no text, which nothing here reads"
        )
    texts: list[object] = []
    if isinstance(content, list):
        for part in content:
            texts.append(part.get("text"))
    for key in _SAID.keys() & found.keys() - {"content"}:
        texts.append(found[key])
    if not all(isinstance(text, str) for text in texts):
        raise BadRecord("no content", f"message {number} ({role}) has a value in place of a text")
    calls = found["tool_calls"] = _decoded(found, "tool_calls", list) or []
    if not all(isinstance(call, dict) and isinstance(call.get("function", call), dict) for call in calls):
        raise BadRecord("no conversation", f"the tool calls of message {number} are {_shortened(calls)}, no objects")
    if not calls:  # templates ask whether the key is there
        del found["tool_calls"]
    return found


def _with_decoded_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have objects as arguments; OpenAI's have JSON."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (KeyError, TypeError, ValueError):  # none, or not JSON, and thus written as it is
            arguments = None
        if isinstance(arguments, dict):
            function = {**function, "arguments": arguments}
        calls.append({**call, "function": function})
    if not calls:
        return message
    return {**message, "tool_calls": calls}


def _decoded(record: dict[str, Any], key: str, kind: type) -> Any:
    """Return a value that tables may hold as JSON."""
    value = record.get(key)
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRecord("no conversation", f"{key!r} is no JSON ({error})") from None
    if value and not isinstance(value, kind):
        raise BadRecord("no conversation", f"{key!r} is {_shortened(value)}, not a {kind.__name__}")
    return value


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."


# ---- from a conversation to ids and mask


class ChatEncoder:
    """The way from a conversation to ids: a tokenizer, a format, and whether the end of a document is added."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, chat: ChatFormat, *, eod: bool) -> None:
        self.tokenizer, self.chat, self.eod = tokenizer, chat, eod
        # Without the processor, which may take white space out of the places of tokens (`trim_offsets`).
        model = tokenizer.fast_tokenizer()
        self._model = type(model).from_str(model.to_str())
        self._model.encode_special_tokens = tokenizer.splits_special_tokens
        self._model.post_processor = None  # type: ignore[assignment]
        added = self._model.get_added_tokens_decoder().values()
        self._added: list[str] = []
        self.specials: list[str] = []
        for token in sorted(added, key=lambda token: len(token.content), reverse=True):
            self._added.append(token.content)
            if token.special or token.content in tokenizer.roles.values():
                self.specials.append(token.content)

    def last_special(self, text: str, begin: int, end: int) -> tuple[int, int] | None:
        """Return the place of the special token that ends `text[begin:end]`, apart from white space behind it."""
        while end > begin and text[end - 1].isspace():
            end -= 1
        for token in self.specials:
            if text.endswith(token, begin, end):
                return end - len(token), end
        return None

    def end_of_turn(self, text: str, begin: int) -> int:
        """Return where the last turn of a text ends, whose content ends at `begin`: behind its special token.

        Of special tokens with white space between them the first are the turn's; others end a text.
        """
        found, at = len(text), len(text)
        while (place := self.last_special(text, begin, at)) is not None:
            if place[1] < at or at == len(text):
                found = place[1]
            at = place[0]
        without_space = text.rstrip()
        if at == len(text) and without_space.endswith(tuple(self._added)):  # some have it as an ordinary token
            found = max(begin, len(without_space))
        return found

    def __call__(self, conversation: Conversation) -> ChatIds:
        """Return the ids of a conversation and which of them are trained.

        A token is trained if its first character is one of a trained turn. The end of the document is trained where the
        last turn is and has no end-of-turn token of its own.

        Raises:
            BadRecord: see the module.
        """
        rendered = RenderedChat(self, conversation)
        text, turns = rendered.text, rendered.turns
        encoding = self._model.encode(text, add_special_tokens=False)
        ids, spans = list(encoding.ids), list(encoding.offsets)
        mask, firsts = [0] * len(ids), [first for first, _ in spans]
        for begin, end in turns:
            for token in range(bisect_left(firsts, begin), bisect_left(firsts, end)):
                mask[token] = 1
        if not ids:
            raise BadRecord("no tokens", "the conversation gives no tokens")
        if self.eod:
            last = max((token for token, value in enumerate(mask) if value), default=0)
            begin, end = spans[last]
            ids.append(self.tokenizer.eod)
            mask.append(int(mask[last] and text[begin:end].strip() not in self.specials and not text[end:].strip()))
            spans.append((len(text), len(text)))
        found, longest, train_on = ChatIds(text, ids, mask, spans), self.chat.longest, self.chat.train_on
        if sum(mask[1:]) == 0:  # nothing predicts the first token
            found.refuse("empty mask", "no token of it is trained; --train-on all trains all of a conversation")
        if train_on != ALL and all(mask):
            found.refuse("full mask", f"all of its tokens are trained with --train-on {train_on}, prompts too")
        if longest is not None and len(ids) - 1 > longest:
            problem = f"it takes {len(ids) - 1} positions, --seq-length {longest}: an answer would be cut off"
            found.refuse("longer than a sequence", problem)
        return found


class RenderedChat:
    """A conversation as text.

    Attributes:
        text: of all messages.
        turns: the first character, and the one behind the last, of each trained turn.

    Raises:
        BadRecord: turns are rendered in another way once others follow, or something is left out.
    """

    def __init__(self, encoder: ChatEncoder, conversation: Conversation) -> None:
        self._encoder, self._chat, self._conversation = encoder, encoder.chat, conversation
        messages, train_on = list(map(_with_decoded_arguments, conversation.messages)), encoder.chat.train_on
        try:
            self.text = self._chat.render(conversation._replace(messages=messages), len(messages))
            conversation = self._conversation = conversation._replace(messages=messages)
        except BadRecord:  # templates such as DeepSeek-V3's append the JSON to a text
            self.text = self._chat.render(conversation, len(messages))
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise BadRecord("lone surrogate", f"UTF-8 cannot encode what it says ({error.reason})") from None
        self.turns: list[tuple[int, int]] = []
        whole = _squeezed(self.text)
        for number, message in enumerate(messages, 1):
            if message["role"] != "assistant":
                self._require_said(number, whole)
        if conversation.tools and self._chat.render(conversation._replace(tools=None), len(messages)) == self.text:
            self._refuse("dropped tools", "the template leaves out the tools; take them out, or use another template")
        if train_on == ALL:
            self.turns.append((0, len(self.text)))
            return
        answers = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
        for number in answers[-1:] if train_on == LAST else answers:
            begin = self._prefix(self._chat.render(conversation, number - 1, prompt=True), number, "prompt")
            end = self._end_of_turn(self._chat.render(conversation, number), begin, number)
            self.turns.append((begin, end))
            self._require_said(number, _squeezed(self.text[begin:end]))

    def _refuse(self, reason: str, problem: str) -> NoReturn:
        raise BadRecord(reason, f"{problem}\n{_marked(self.text, self.turns)}")

    def _prefix(self, part: str, number: int, what: str) -> int:
        """Return the length of a rendered part of the conversation, with which the text has to begin."""
        if not self.text.startswith(part):
            at = next((at for at, pair in enumerate(zip(self.text, part)) if pair[0] != pair[1]), len(self.text))
            before, now = part[at : at + _EXCERPT], self.text[at : at + _EXCERPT]
            advice = "--train-on last trains the last turn alone"
            if self._chat.train_on == LAST:
                advice = "take out what follows the last answer, or use another template"
            self._refuse(
                "not prefix-stable",
                f"up to the end of the {what} of message {number} the template renders {before!r}, and in the "
                f"conversation {now!r}; {advice}",
            )
        return len(part)

    def _end_of_turn(self, alone: str, begin: int, number: int) -> int:
        """Return where an answer ends: behind its end-of-turn token, which may be another one where it is the last.

        Args:
            alone: the conversation up to this turn. begin: where its answer begins in both.
        """
        if not self.text.startswith(alone):
            alone = self._as_followed(alone, begin, number)
        self._prefix(alone, number, "answer")
        said = begin
        for part in _parts(self._conversation.messages[number - 1]["content"])[-1:]:
            for form in (part, part.strip()):
                if (at := alone.find(form, begin)) >= 0:
                    said = at + len(form)
                    break
        return self._encoder.end_of_turn(alone, said)

    def _as_followed(self, alone: str, begin: int, number: int) -> str:
        """Return `alone` as it is with a turn behind it: Phi ends a text, gpt-oss the last turn, with another token."""
        prompt, followed = self._prompt(number), self._chat.render(self._conversation, number, prompt=True)
        if prompt and followed.endswith(prompt):
            alone = followed.removesuffix(prompt)
        ending = self._encoder.last_special(alone, begin, len(alone))
        if not self.text.startswith(alone) and ending is not None:
            for token in self._encoder.specials:
                if self.text.startswith(alone[: ending[0]] + token):
                    return alone[: ending[0]] + token
        return alone

    def _prompt(self, number: int) -> str:
        """Return the prompt for an answer behind the last turn before `number` that is none; empty: unknown."""
        turns = number - 1
        while turns > 0 and self._conversation.messages[turns - 1]["role"] == "assistant":
            turns -= 1
        if turns == 0:
            return ""
        asked, without = (self._chat.render(self._conversation, turns, prompt=prompt) for prompt in (True, False))
        ending = self._encoder.last_special(without, 0, len(without))
        if not asked.startswith(without) and ending is not None:
            without = without[: ending[0]]
        if not asked.startswith(without):
            return ""
        return asked[len(without) :]

    def _require_said(self, number: int, within: str) -> None:
        """Refuse a rendering, without white space, that lacks what a message says; it may be written as JSON."""
        message = self._conversation.messages[number - 1]
        for key, what in _SAID.items():
            for part in _parts(message.get(key)):
                part = part.strip()
                forms = (part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1])
                if not any(_squeezed(form) in within for form in forms):
                    what = what or _CONTENT.get(message["role"], "message")
                    self._refuse(f"dropped {what}", f"the template leaves out {_shortened(part)} of message {number}")
        if message["content"] is None and "None" in within and "None" not in json.dumps(message, default=str):
            self._refuse("dropped answer", f"the template writes None for message {number}; give it an empty content")
        for call in message.get("tool_calls", ()):
            name = str(call.get("function", call).get("name"))
            if _squeezed(name) not in within:
                self._refuse("dropped answer", f"the template leaves out the call of {name} of message {number}")


def _parts(content: Any) -> list[str]:
    """Return the texts of a content."""
    if isinstance(content, str):
        return [content]
    return list(map(itemgetter("text"), content or ()))


def _squeezed(text: str) -> str:
    """Return a text without white space, which templates take away and add."""
    return "".join(text.split())


# ---- to look at

MARKS = ("\u27e6", "\u27e7")  # white square brackets, which no text has


def marked(found: ChatIds, marks: tuple[str, str] = MARKS, *, longest: int | None = _LONGEST_SHOWN) -> str:
    """Return a conversation with its trained tokens between marks."""
    turns: list[tuple[int, int]] = []
    for is_trained, (begin, end) in zip(found.mask, found.spans):
        if is_trained and turns and turns[-1][1] >= begin:
            turns[-1] = (turns[-1][0], max(end, turns[-1][1]))
        elif is_trained:
            turns.append((begin, end))
    return _marked(found.text, turns, marks, longest)


def _marked(
    text: str,
    turns: list[tuple[int, int]],
    marks: tuple[str, str] = MARKS,
    longest: int | None = _LONGEST_SHOWN,
) -> str:
    pieces, at = [], 0
    for begin, end in turns:
        pieces += [text[at:begin], marks[0], text[begin:end], marks[1]]
        at = end
    whole = "".join([*pieces, text[at:]])
    return whole if longest is None or len(whole) <= longest else f"{whole[:longest]}..."


# ---- the template


def chat_format(
    template: str, tokenizer: Tokenizer, tokenizer_model: str | None, train_on: str, longest: int | None
) -> ChatFormat:
    """Return the format of `--chat-template`: a file in Jinja, or the tokenizer's own where it is empty.

    Raises:
        ConfigError: the tokenizer has none, the file cannot be read, or transformers is not installed.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer_model is None:
        raise ConfigError(
            f"--chat-template, --tokenizer-type {tokenizer.name}: templates name special tokens, which need a "
            "HuggingFaceTokenizer"
        )
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "--chat-template: transformers renders it, and is not installed; pip install 'megatron_moe[hf]'"
        )
    folder = Path(tokenizer_model)
    if not folder.is_dir():
        folder = folder.parent
    own: Any
    if template:
        try:
            own = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {template}: cannot be read ({error}); give a file in Jinja") from error
    else:
        own = chat_template_of(folder)
    named = {"default": own}
    if isinstance(own, list):  # of several
        named = dict(map(itemgetter("name", "template"), own))
    if not isinstance(named.get("default"), str) or not named["default"].strip():
        raise ConfigError(f"--tokenizer-model {tokenizer_model}: has no chat template; give one: --chat-template FILE")
    return ChatFormat(named["default"], named.get("tool_use"), train_on, longest, dict(tokenizer.roles))
