"""Conversations: masks are those of transformers by markers in the template, and what cannot be right is named."""

import hashlib
import json
import math
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest
import tokenizers
import torch
import yaml
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import build, flatten
from megatron_moe.data.checks import check_data, data_fingerprint, require_same_samples
from megatron_moe.data.datasets import build_datasets, build_named
from megatron_moe.data.index_file import MASK, SUFFIXES
from megatron_moe.data.tokenizers import HuggingFaceTokenizer
from megatron_moe.training.callback import Callback
from megatron_moe_tools.convert.cli import main as convert
from megatron_moe_tools.prepare.chat import ChatEncoder, chat_format, conversation_of, marked
from megatron_moe_tools.prepare.inputs import BadRecord
from megatron_moe_tools.prepare.merge import merge
from megatron_moe_tools.prepare.preprocess import PreprocessOptions, main, preprocess
from tests.data.prepared import byte_level_bpe, dataset_bytes
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import EP2, TP2
from tests.helpers.tiny_tokenizers import published
from tests.helpers.trained_steps import SMALL, lines, trained

TEMPLATES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("chat_templates.yaml").read_text())
MARKERS = re.compile(r"\{%-? (?:end)?generation %\}")
WORDS = "the a model token naïve  \n\n- 1. <b> {x} [INST] 数学 \U0001f680 it's user assistant end".split(" ")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def tokenizer_of(folder: Path, name: str) -> HuggingFaceTokenizer:
    special = TEMPLATES[name]["special"]
    model = byte_level_bpe(["the model answers the user's question about tokens"] * 4)
    model.add_special_tokens(special)
    model.add_tokens(TEMPLATES[name].get("ordinary", []))
    model.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)  # as GPT-NeoX and OLMoE
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": special[0], "eos_token": special[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    (folder / "chat_template.jinja").write_text(MARKERS.sub("", TEMPLATES[name]["template"]))
    return HuggingFaceTokenizer(folder)


def text(random_: random.Random) -> str:
    return " ".join(random_.choices(WORDS, k=random_.randint(1, 12))).strip() or "x"


def conversation(seed: int, plain: bool) -> dict[str, Any]:
    """Some turns, perhaps a system message, tools with a call and its result, and no answer at the end."""
    draw = random.Random(seed)
    messages = [{"role": "system", "content": text(draw)}] if draw.random() < 0.4 else []
    record: dict[str, Any] = {"messages": messages}
    if not plain and draw.random() < 0.4:
        record["tools"] = [TOOL]
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": text(draw)})
        if "tools" in record and draw.random() < 0.5:
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": draw.randint(0, 9), "b": "é"}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": text(draw)})
        messages.append({"role": "assistant", "content": text(draw)})
    if draw.random() < 0.2:
        messages.append({"role": "user", "content": text(draw)})
    return record


def marked_characters(name: str, tokenizer: HuggingFaceTokenizer, record: dict[str, Any]) -> tuple[str, numpy.ndarray]:
    """The text, and for each character whether it is between markers, as transformers finds them."""
    (rendered,), (turns,) = render_jinja_template(
        conversations=[record["messages"]],
        tools=record.get("tools"),
        chat_template=TEMPLATES[name]["template"],
        return_assistant_tokens_mask=True,
        **tokenizer.roles,
    )
    trained = numpy.zeros(len(rendered), dtype=bool)
    for begin, end in turns:
        trained[begin:end] = True
    return rendered, trained


FEW = [("gpt-oss", 20), ("qwen-3", 20)]
COUNTS = [*((name, 200) for name in TEMPLATES), *FEW]


@pytest.mark.parametrize(("name", "count"), rows(COUNTS, test=FEW))
def test_trained_tokens_are_those_between_markers(name, count, tmp_path):
    tokenizer = tokenizer_of(tmp_path / "folder", name)
    everything = chat_format("", tokenizer, str(tmp_path / "folder"), "assistant", None)
    last = chat_format("", tokenizer, str(tmp_path / "folder"), "last", None)
    seen = 0
    for seed in range(count):
        record = conversation(seed, TEMPLATES[name].get("plain", False))
        whole, trained = marked_characters(name, tokenizer, record)
        answers = [message["role"] for message in record["messages"]].count("assistant")
        for chat in (everything, last):
            encode = ChatEncoder(tokenizer, chat, eod=False)
            if chat is last:  # the last run of trained characters
                ends = numpy.flatnonzero(numpy.diff(trained, append=False) & trained)
                begins = numpy.flatnonzero(numpy.diff(trained, prepend=False) & trained)
                trained = trained & (numpy.arange(len(whole)) >= begins[-1])
                assert len(ends) == answers
            try:
                found = encode(conversation_of(record, "messages", record))
            except BadRecord as bad:
                # It leaves out the thinking, here an empty one, of turns that others follow.
                followed = (answers > 1 and chat is everything) or record["messages"][-1]["role"] == "user"
                assert TEMPLATES[name].get("thinks") and followed and bad.reason == "not prefix-stable"
                continue
            seen += 1
            assert found.text == whole
            wanted = [bool(trained[begin]) if begin < len(trained) else False for begin, _ in found.spans]
            assert found.mask == wanted, marked(found, longest=None)
    assert seen > 0.9 * count


def ask(answer: dict[str, Any], *more: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Why?"}, {"role": "assistant", **answer}, *more]


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # reason: template, record, options of the format
    "empty mask": ("phi", {"messages": ask({})[:1]}, {}),
    "full mask": ("bare", {"messages": ask({"content": "So."})[1:]}, {}),
    "unknown role": ("phi", {"messages": [{"role": "bot", "content": "So."}]}, {}),
    "no content": ("phi", {"messages": ask({"content": None})}, {}),
    "no conversation": ("phi", {"messages": []}, {}),
    "no conversation: calls": ("phi", {"messages": ask({"content": "So.", "tool_calls": ["add"]})}, {}),
    "no content: thinking": ("phi", {"messages": ask({"content": "So.", "thinking": ["Hm."]})}, {}),
    "unknown role: list": ("phi", {"messages": [{"role": ["user"], "content": "Why?"}]}, {}),
    "lone surrogate": ("phi", {"messages": ask({"content": "\ud800"})}, {}),
    "missing key": ("phi", {"text": "Why?"}, {}),
    "not text alone": ("phi", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}),
    "refused by the template": ("mixtral", {"messages": ask({"content": "So."}, {"role": "tool", "content": "x"})}, {}),
    "dropped thinking": ("phi", {"messages": ask({"content": "So.", "reasoning_content": "Hm."})}, {}),
    "dropped answer": ("cut", {"messages": ask({"content": "Because of it."})}, {}),
    "dropped message": (
        "deepseek-v3",
        {"messages": [{"role": "developer", "content": "Be."}, *ask({"content": "x"})]},
        {},
    ),
    "dropped tools": ("phi", {"messages": ask({"content": "So."}), "tools": [TOOL]}, {}),
    "longer than a sequence": ("phi", {"messages": ask({"content": "So." * 30})}, {"longest": 20}),
    "not prefix-stable": (
        "qwen-3",
        {"messages": ask({"content": "So."}, *ask({"content": "x"}))},
        {},
    ),
}
TEMPLATES["bare"] = {"special": ["<s>"], "template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
TEMPLATES["cut"] = {
    "special": ["<s>"],
    "template": "{% for m in messages %}{{ m.role + m.content[:7] }}{% endfor %}",
}


RECORDS = [conversation(seed, plain=True) for seed in range(60)]
SHORT = [record for record in RECORDS if len(str(record)) < 400][:12]
LAYOUTS = [(1, {}), (2, {"context_parallel_size": 2}), (2, {"pipeline_model_parallel_size": 2})]
PACKED = {"packing": "best-fit", "reset_attention_mask": True}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> tuple[Path, HuggingFaceTokenizer, list[str]]:
    """Conversations in a file, and what prepares them but the prefix."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = tokenizer_of(folder / "tokenizer", "gpt-oss")
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    chosen = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    return folder, tokenizer, ["--input", str(folder / "chats.jsonl"), *chosen, "--chat-template"]


def test_packed_samples_have_a_loss_on_trained_tokens_alone(prepared, shards_of):
    folder, tokenizer, flags = prepared
    assert main([*flags, "--output-prefix", str(folder / "one"), "--workers", "1"]) == 0
    shards_of(2000)
    assert main([*flags, "--output-prefix", str(folder / "two"), "--workers", "2"]) == 0
    prefix = str(folder / "one_messages_document")
    assert dataset_bytes(prefix, *SUFFIXES) == dataset_bytes(folder / "two_messages_document", *SUFFIXES)
    chat = chat_format("", tokenizer, str(folder / "tokenizer"), "assistant", None)
    wanted = [
        ChatEncoder(tokenizer, chat, eod=False)(conversation_of(record, "messages", record)) for record in RECORDS
    ]
    run = build({"data_path": (prefix,), "split": "1,0,0", "seq_length": 512, "eval_iters": 0, **PACKED})
    assert len(check_data(run, tokenizer)) == 1
    samples, _, _ = build_datasets(run, tokenizer, 1, 0, 0)
    found = Counter(
        (tuple(sample["tokens"][inside].tolist()), tuple(sample["loss_mask"][inside].tolist()))
        for sample in map(samples.__getitem__, range(len(samples)))
        for first in sample["documents"].unique().tolist()
        if first >= 0
        for inside in [sample["documents"] == first]
    )
    assert found == Counter((tuple(one.ids[:-1]), tuple(map(float, one.mask[1:]))) for one in wanted)


def test_a_conversation_is_shown_with_what_is_trained_between_brackets(prepared, capsys):
    _, _, flags = prepared
    assert main([*flags, "--output-prefix", "unused", "--show", "2", "--train-on", "last"]) == 0
    first, second, _ = re.split(r"^conversation \d: .*\n", capsys.readouterr().out, flags=re.M)[1:] + [""]
    for shown, record in zip((first, second), RECORDS):
        (answer,) = re.findall("\u27e6(.*?)\u27e7", shown, flags=re.S)
        last = [message["content"] for message in record["messages"] if message["role"] == "assistant"][-1]
        assert last in answer and answer.endswith(("<|return|>", "<|end|>"))


@pytest.fixture(scope="module")
def mixed(prepared, tmp_path_factory) -> tuple[str, str, dict[str, Any]]:
    """Prefixes of conversations and of text, and the settings of a tiny run on such data."""
    folder, _, flags = prepared
    place = tmp_path_factory.mktemp("mixed")
    (place / "text.jsonl").write_text("".join(json.dumps({"text": str(record)}) + "\n" for record in RECORDS[:20]))
    assert main([*flags, "--output-prefix", str(place / "chat"), "--workers", "1"]) == 0
    of_text = ["--input", str(place / "text.jsonl"), *flags[2:-1], "--output-prefix", str(place / "text")]
    assert main([*of_text, "--append-eod", "--workers", "1"]) == 0
    chosen = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "tokenizer")}
    run = {**SMALL, **PACKED, **chosen, "mock_data": False, "seq_length": 512, "global_batch_size": 4, "train_iters": 3}
    return str(place / "chat_messages_document"), str(place / "text_text_document"), run


def trained_tokens(flags: dict[str, Any]) -> list[int]:
    """Train; of each step how many tokens have a loss."""
    found: list[Any] = []
    trained(flags, Noting(found, "tokens"))
    return found


SPREAD = {**TP2, "context_parallel_size": 2}
TRAINED = [(2, TP2, True), (2, EP2, False), (4, SPREAD, False), (4, SPREAD, True)]


@pytest.mark.parametrize(("ranks", "layout", "per_token"), rows(TRAINED, test=TRAINED[:1]))
def test_conversations_mixed_with_text_train_alike_on_every_layout(gloo, mixed, tmp_path, ranks, layout, per_token):
    """Routers count all tokens but padding, K times; the trained ones alone have a loss."""
    chat, text, flags = mixed
    (tmp_path / "data.yaml").write_text(
        f"sources:\n  chat: {{path: {chat}, weight: 3, split: '8,2,0'}}\n  text: {{path: {text}, weight: 1}}\n"
        f"validation:\n  chat: {{path: {chat}, split: '8,2,0'}}\n"
    )
    flags = {**flags, "data_config": str(tmp_path / "data.yaml"), "eval_iters": 1, "lr": 1e-3}
    flags |= {"moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (1e-2,)}
    flags |= {"calculate_per_token_loss": per_token}
    found, steps = {}, {}
    for number, more in ((1, {}), (ranks, layout)):
        metrics = tmp_path / f"{number}.jsonl"
        counts = gloo.run(number, trained_tokens, flags={**flags, **more, "metrics_file": str(metrics)})[0]
        steps[number] = lines(metrics)
        (evaluated,) = lines(metrics.with_suffix(".eval.jsonl"))
        found[number] = counts, evaluated["tokens"], evaluated["loss"]
    tokenizer = HuggingFaceTokenizer(flags["tokenizer_model"])
    samples, _ = build_named(build(flags), tokenizer, 12, 0, 1)
    assert samples is not None and {samples.mixture.at(number)[0] for number in range(12)} == {0, 1}
    masks = [int(samples[number]["loss_mask"].sum()) for number in range(12)]
    assert found[1][0] == found[ranks][0] == [sum(masks[first : first + 4]) for first in (0, 4, 8)]
    assert found[ranks][1:] == pytest.approx(found[1][1:], rel=1e-5)
    for one, many, count in zip(steps[1], steps[ranks], found[1][0], strict=True):
        assert one["tokens_per_expert"] == many["tokens_per_expert"] and one["data_hash"] == many["data_hash"]
        assert sum(one["tokens_per_expert"]["2"]) == 2 * one["tokens"] and count < one["tokens"] < 4 * 512
        for name in ("loss", "grad_norm", "aux_losses"):
            assert many[name] == pytest.approx(one[name], rel=1e-5)


def test_training_and_validation_of_one_dataset_share_no_conversation(mixed, tmp_path):
    chat, _, flags = mixed
    (tmp_path / "data.yaml").write_text(
        f"sources:\n  a: {{path: {chat}, weight: 1, split: '7,3,0'}}\n"
        f"validation:\n  a: {{path: {chat}, split: '7,3,0'}}\n"
    )
    run = build({**flags, "data_config": str(tmp_path / "data.yaml"), "eval_iters": 1})
    train, sets = build_named(run, HuggingFaceTokenizer(flags["tokenizer_model"]), 10**4, 10**4, 1)
    assert train is not None
    parts = []
    for data, count in ((train, train.mixture.epoch_samples[0]), (sets["valid/a"], sets["valid/a"].count)):
        found = Counter()
        for sample in map(data.__getitem__, range(count)):
            for first in set(sample["documents"].tolist()) - {-1}:
                found[tuple(sample["tokens"][sample["documents"] == first].tolist())] += 1
        parts.append(found)
    assert parts[0].total() + parts[1].total() == len(RECORDS) and not parts[0] & parts[1]
    assert parts[1].total() == 18


def planted(folder: Path, chat: str, mask: bytes) -> str:
    """A copy of a dataset of conversations with another mask, which its sidecar knows; its prefix."""
    for suffix in SUFFIXES:
        if Path(chat + suffix).exists():
            shutil.copy(chat + suffix, folder / f"planted{suffix}")
    (folder / f"planted{MASK}").write_bytes(mask)
    sidecar = json.loads((folder / "planted.json").read_text())
    (folder / "planted.json").write_text(json.dumps({**sidecar, "mask_sha256": hashlib.sha256(mask).hexdigest()}))
    return str(folder / "planted")


def test_a_mask_that_trains_nothing_is_refused_and_a_batch_without_trained_tokens_is_left_out(gloo, mixed, tmp_path):
    chat, _, flags = mixed
    mask = numpy.fromfile(chat + MASK, dtype=numpy.uint8)
    run = {**flags, "data_path": (planted(tmp_path, chat, bytes(len(mask))),), "split": "1,0,0", "train_iters": 8}
    tokenizer = HuggingFaceTokenizer(flags["tokenizer_model"])
    with pytest.raises(ConfigError, match="planted.mask: no token is trained"):
        check_data(build(run), tokenizer)
    mask[: len(mask) // 2] = 0
    planted(tmp_path, chat, mask.tobytes())
    metrics = tmp_path / "metrics.jsonl"
    for batch in (1, 2):  # whole batches, or one of two micro-batches
        gloo.run(1, trained, flags={**run, "global_batch_size": batch, "metrics_file": str(metrics)})
        steps = lines(metrics)
        samples, _, _ = build_datasets(build(run), tokenizer, 16, 0, 0)
        masks = [bool(samples[number]["loss_mask"].any()) for number in range(16)]
        assert not all(masks[: 8 * batch])
        empty = [not any(masks[batch * step : batch * step + batch]) for step in range(8)]
        assert [step["skipped"] for step in steps] == empty and any(empty) == (batch == 1)
        told = [
            event["text"] for event in lines(metrics.with_suffix(".events.jsonl")) if "no token of" in event["text"]
        ]
        assert len(told) == sum(empty)
        assert all(math.isfinite(step["grad_norm"]) for step in steps if not step["skipped"])
        metrics.unlink()
        metrics.with_suffix(".events.jsonl").unlink()


def test_a_resume_with_another_mask_names_its_file(prepared, mixed, tmp_path):
    _, tokenizer, flags = prepared
    _, _, fields = mixed
    place = [*flags, "--output-prefix", str(tmp_path / "chat"), "--workers", "1", "--overwrite"]
    run = build({**fields, "data_path": (str(tmp_path / "chat_messages_document"),), "eval_iters": 0})
    saved = []
    for turns in ("assistant", "last"):
        assert main([*place, "--train-on", turns]) == 0
        check_data(run, tokenizer)
        saved.append(data_fingerprint(run))
    with pytest.raises(
        ConfigError, match=r"chat_messages_document\.mask is not the file that STEP was trained on: SHA"
    ):
        require_same_samples(run, saved[1], flatten(run), saved[0], "STEP")


CHATML = """{% for one in messages %}{{ '<|bos|>' + one.role + ': ' + one.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|bos|>assistant: ' }}{% endif %}"""


def first_loss(folder: str, flags: dict[str, Any]) -> float:
    """The loss of the first step of a run that starts from a Hugging Face folder."""
    from megatron_moe.hf.config import filled_in
    from megatron_moe.training.run import pretrain

    records: list[Any] = []
    pretrain(build(filled_in({"load_hf": folder, **flags})), callbacks=[Noting(records)])
    return records[0]


class Noting(Callback):
    def __init__(self, found: list[Any], name: str = "loss") -> None:
        self.found, self.name = found, name

    def after_step(self, step: Any, result: Any) -> None:
        self.found.append(getattr(result, self.name))


@pytest.mark.parametrize(("ranks", "layout"), rows(list(LAYOUTS), test=list(LAYOUTS)[:1]))
def test_the_loss_on_trained_tokens_is_transformers_own(gloo, ranks, layout, tmp_path):
    model, folder = published("qwen3-moe", 3, tmp_path / "model"), str(tmp_path / "model")
    template, source = tmp_path / "chat.jinja", tmp_path / "chats.jsonl"
    template.write_text(CHATML)  # not the one of the folder
    source.write_text("".join(json.dumps(record) + "\n" for record in SHORT))
    chosen = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": folder}
    options = PreprocessOptions((str(source),), str(tmp_path / "chat"), chat_template=str(template), **chosen)
    (prefix,), tokenizer = preprocess(options, show_progress=False), HuggingFaceTokenizer(folder)
    fields = {"data_path": (prefix,), "split": "1,0,0", "seq_length": 512, "eval_iters": 0, **PACKED}
    samples, _, _ = build_datasets(build(fields), tokenizer, 1, 0, 0)
    fields |= {"train_iters": 1, "global_batch_size": len(samples), "micro_batch_size": 1, "lr": 1e-30, **chosen}
    fields |= {"calculate_per_token_loss": True, "reset_position_ids": True, "save": str(tmp_path / "steps")}
    losses = gloo.run(ranks, first_loss, folder=folder, flags={**fields, **layout})
    total = count = 0.0
    encode = ChatEncoder(tokenizer, chat_format(str(template), tokenizer, folder, "assistant", None), eod=False)
    for record in SHORT:
        found = encode(conversation_of(record, "messages", record))
        ids, mask = torch.tensor([found.ids]), torch.tensor(found.mask[1:], dtype=torch.bool)
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits[mask], ids[0, 1:][mask], reduction="sum"))
        count += int(mask.sum())
    assert losses[-1] == pytest.approx(total / count, rel=1e-5)
    exporting = ["--from", "native", "--to", "hf", "--load", fields["save"], "--save", str(tmp_path / "exported")]
    assert convert(exporting) == 0
    assert (tmp_path / "exported" / "chat_template.jinja").read_text() == CHATML


CHANGED = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes for"),
    "gone": (Path.unlink, "is missing"),
    "other bytes": (lambda path: path.write_bytes(path.read_bytes()[::-1]), "SHA-256"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_mask_that_is_not_the_datas_is_refused(prepared, change, tmp_path):
    _, tokenizer, flags = prepared
    assert main([*flags, "--output-prefix", str(tmp_path / "chat"), "--workers", "1"]) == 0
    prefix, (damage, message) = tmp_path / "chat_messages_document", CHANGED[change]
    fields = {"data_path": (str(prefix),), "seq_length": 512}
    with pytest.raises(ConfigError, match="--packing best-fit"):
        check_data(build(fields), tokenizer)
    packed = {**fields, **PACKED}
    with pytest.raises(ConfigError, match=r"longer than --seq-length 64"):
        check_data(build({**packed, "seq_length": 64}), tokenizer)
    with pytest.raises(ConfigError, match="--document-boundaries eod"):
        check_data(build({**packed, "document_boundaries": "eod"}), tokenizer)
    damage(prefix.with_suffix(MASK))
    with pytest.raises(ConfigError, match=message):
        check_data(build(packed), tokenizer)
    prefix.with_suffix(".json").unlink()
    if change != "gone":
        with pytest.raises(ConfigError, match="json is missing"):
            merge([str(prefix)], str(tmp_path / "merged"))


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_trained_right_is_named(reason, tmp_path):
    name, record, options = REFUSED[reason]
    tokenizer = tokenizer_of(tmp_path, name)
    chat = chat_format("", tokenizer, str(tmp_path), **{"train_on": "assistant", "longest": None, **options})
    with pytest.raises(BadRecord) as refused:
        ChatEncoder(tokenizer, chat, eod=False)(conversation_of(record, "messages", record))
    assert refused.value.reason == reason.partition(":")[0]


CALL = {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
ANSWERS: list[tuple[str, list[dict[str, Any]], list[str]]] = [
    # template, answers, what is trained
    (
        "gpt-oss",
        [{"content": " \n"}, {"content": ""}, CALL, {"content": "x"}],
        [
            "<|channel|>final<|message|> \n<|end|>",
            "<|channel|>final<|message|><|end|>",
            ' to=functions.add<|channel|>commentary<|message|>{"a": 1}<|call|>',
            "<|channel|>final<|message|>x<|return|>",
        ],
    ),
    ("qwen-2.5", [{"content": "<|im_end|>\n"}, {"content": " a "}], ["<|im_end|>\n<|im_end|>", " a <|im_end|>"]),
    ("mini", [{"content": ""}, {"content": "a"}], ["<|end|>", "a<|end|></s>"]),
    ("ordinary", [{"content": ""}, {"content": "<think>a</think>b"}], ["<end>", "<think>\na</think>b<end>"]),
]
TEMPLATES["mini"] = {  # as of Phi-4-mini: a text ends with one more token, right behind the answer's
    "special": ["<|user|>", "<|assistant|>", "<|end|>", "</s>"],
    "template": "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}</s>{% endif %}",
}
TEMPLATES["ordinary"] = {
    "special": ["<s>"],
    "ordinary": ["<end>"],
    "template": "{% for m in messages %}{{ m.role + ': ' + m.content.replace('k>a', 'k>\na') + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
}


@pytest.mark.parametrize(("name", "answers", "trained"), ANSWERS)
def test_an_answer_is_trained_with_its_white_space_and_its_end_of_turn_token(name, answers, trained, tmp_path):
    tokenizer = tokenizer_of(tmp_path, name)
    encode = ChatEncoder(tokenizer, chat_format("", tokenizer, str(tmp_path), "assistant", None), eod=False)
    record = {"messages": [message for answer in answers for message in ask(answer)]}
    shown = marked(encode(conversation_of(record, "messages", record)), longest=None)
    assert re.findall("\u27e6(.*?)\u27e7", shown, flags=re.S) == trained


def test_keys_that_other_rows_of_a_table_have_are_not_written(prepared, tmp_path, capsys):
    _, _, flags = prepared
    calls = [{"function": {"name": "add", "arguments": {key: 1}}} for key in "ab"]
    records = [{"messages": ask({"content": "", "tool_calls": [call]})} for call in calls]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "chats.parquet")
    reading = ["--input", str(tmp_path / "chats.parquet"), *flags[2:]]
    assert main([*reading, "--output-prefix", "unused", "--show", "2"]) == 0
    assert re.findall(r"\{.*\}", capsys.readouterr().out) == ['{"a": 1}', '{"b": 1}']
