"""Which layouts and which transformers models let documents of a sequence see each other, and the report of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import flatten
from megatron_moe.io.program import say
from megatron_moe_tools.doctor.documents import (
    PACKINGS,
    Change,
    Leak,
    Tokens,
    WatchedOutputs,
    changes,
    first_leak,
    first_tensor,
    first_tokens,
    probe_into,
)
from megatron_moe_tools.doctor.layouts import LayoutChoice, mixed_by_routing
from megatron_moe_tools.doctor.small_copy import PADDED_VOCABULARY
from megatron_moe_tools.launch import local_ranks

_SHOWN = 6
ROUNDING = 1e-5
"""Largest difference, of an output's largest element, that is rounding in fp32."""


@dataclass
class LeakFinding:
    """The outcome of one layout or model; `error` is the ranks' report where it could not be probed."""

    name: str
    ranks: int
    seconds: float
    leaks: list[Leak] = field(default_factory=list)
    compared: int = 0
    passes: int = 0
    error: str | None = None
    allowed: float = 0.0

    @property
    def good(self) -> bool:
        """Whether it was probed and nothing leaks."""
        return self.error is None and not self.leaks

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain values for JSON."""
        plain = asdict(self)
        plain["leaks"] = [{**asdict(leak), "error": str(leak.error), "shown": leak.shown()} for leak in self.leaks]
        return {**plain, "apart": self.good, "leaks_at": leaks_at(self.leaks) if self.leaks else None}

    def line(self) -> str:
        """Return the log's line."""
        head, tail = f"{self.name:<28} {self.ranks} ranks ", f" ({self.seconds:.1f} s)"
        if self.error is not None:
            return f"{head} FAILED{tail}"
        if self.leaks:
            return f"{head} LEAKS: {leaks_at(self.leaks)}{tail}"
        how = "to the bit"
        if self.allowed:
            how = f"to {self.allowed:.0e}"
        return f"{head} apart: {self.compared} outputs and gradients in {self.passes} passes, {how}{tail}"


def leaks_at(leaks: Sequence[Leak]) -> str:
    """Return words for the place of a leak that the others follow from."""
    first = first_leak(leaks)
    return f"backward, from what reads {first.name}" if first.backward else first.name


def find_leaks(choice: LayoutChoice, seconds: float) -> list[LeakFinding]:
    """Probe every layout, and say what was found as soon as it is.

    Args:
        choice: of `layouts.documents_choice`.
        seconds: a layout that takes longer has hung.
    """
    ranks = max(layout.ranks for layout in choice.layouts)
    say(f"starting {ranks} processes for {len(choice.layouts)} layouts; nothing leaves this machine, no GPU is used")
    findings = []
    with local_ranks.LocalRanks(probe_into, ranks, seconds=seconds, threads=1) as pool:
        for number, layout in enumerate(choice.layouts, start=1):
            began = time.monotonic()
            argument = {"flags": flatten(layout.run), "padded_vocab_size": PADDED_VOCABULARY}
            try:
                found = pool.call(argument, layout.ranks)
            except local_ranks.RankFailure as failure:
                finding = LeakFinding(layout.name, layout.ranks, time.monotonic() - began, error=str(failure))
            else:
                finding = finding_of(layout.name, found, time.monotonic() - began)
            findings.append(finding)
            say(f"[{number:{len(str(len(choice.layouts)))}}/{len(choice.layouts)}] {finding.line()}")
    for layout, rule in choice.refused:
        say(f"not tried: {layout.name}: {rule}")
    return findings


def finding_of(name: str, records: Sequence[dict[str, Any]], seconds: float = 0.0) -> LeakFinding:
    """Return what the ranks of a layout found together."""
    leaks = []
    for record in records:
        for leak in record["leaks"]:
            change = leak["change"]
            leaks.append(Leak(**{**leak, "change": Change(*change)}))
    compared = sum(record["compared"] for record in records)
    return LeakFinding(name, len(records), seconds, leaks, compared, records[0]["passes"])


def details_of_leaks(findings: Sequence[LeakFinding]) -> Iterator[str]:
    """Yield the lines about what leaks, then the overall result."""
    bad = [finding for finding in findings if not finding.good]
    for finding in bad:
        yield f"\n{finding.name}"
        if finding.error is not None:
            yield finding.error
            continue
        yield f"  it leaks at {leaks_at(finding.leaks)}; later outputs follow from it"
        first = first_leak(finding.leaks)
        shown = [first, *(leak for leak in finding.leaks if leak is not first)]
        for leak in shown[:_SHOWN]:
            yield f"  {leak.shown()}"
        if len(shown) > _SHOWN:
            yield f"  and {len(shown) - _SHOWN} more"
    if bad:
        yield f"\ndocuments see each other, or were not tested, in {len(bad)} of {len(findings)}"
    else:
        yield f"\nno document sees another in any of {len(findings)}"


def exempted(choice: LayoutChoice) -> Iterator[str]:
    """Yield a line about each flag that the probe leaves out; the layouts are those before `documents_choice`."""
    named: dict[str, None] = {}
    for layout in choice.layouts:
        named.update(dict.fromkeys(mixed_by_routing(layout.copy)))
    for flag in named:
        yield f"{flag}: tokens of all documents compete for experts, so documents do affect each other; left out here"


# ---- A model of transformers.


def leaks_of_folder(folder: Path) -> LeakFinding:
    """Probe the transformers model of a folder, with its weights if it has any, in fp32 on the CPU.

    Documents are told as a padding-free collator tells them: position_ids start again, and there is no attention_mask.

    Raises:
        ConfigError: transformers is missing or does not load the folder.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(f"--hf {folder}: needs the package transformers") from None
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        if any([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        else:
            config = AutoConfig.from_pretrained(folder, **options)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--hf {folder}: {error}") from error
    return leaks_of_model(model)


def leaks_of_model(model: Any) -> LeakFinding:
    """Probe a transformers model in training's form; see `leaks_of_folder`.

    A document that chooses other experts changes the shapes of their products, so a model with experts is compared to
    rounding. Gradients have to be zero in any model.
    """
    began, name = time.monotonic(), type(model).__name__
    model.eval()  # without dropout
    has_experts = any(getattr(module, "experts", None) is not None for module in model.modules())
    found = WatchedOutputs(allowed=has_experts * ROUNDING)
    length = sum(PACKINGS[0])
    documents = torch.stack([first_tokens(lengths, length) for lengths in PACKINGS])
    tokens = Tokens(list(range(len(PACKINGS))), documents, torch.arange(length))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, documents.shape, generator=generator)
    # transformers has no padding here: what is left of a sequence is one more document
    begins = torch.where(documents < 0, documents.amax(1, keepdim=True) + PACKINGS[-1][-1], documents)
    positions = torch.arange(length) - begins

    def watched(of: str) -> Callable[..., None]:
        def see(_: object, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
            tensor = first_tensor(output)
            if not isinstance(tensor, Tensor) or tensor.shape[:2] != ids.shape:
                return
            rows = tensor.transpose(0, 1)
            found.see((of,), rows, tokens)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: found.see_gradient(of, gradient.transpose(0, 1), tokens))

        return see

    hooks = [model.get_input_embeddings().register_forward_hook(watched("embedding"))]
    for path, module in model.named_modules():
        parts = path.split(".")
        if len(parts) > 1 and (parts[-1].isdigit() or parts[-2].isdigit()) and parts[-1] != "experts":
            hooks.append(module.register_forward_hook(watched(path)))
    passes = list(changes())
    try:
        for change in (None, *passes):
            found.change, changed = change, ids.clone()
            if change is not None:
                row = changed[change.sample]
                row[change.changed] = (row[change.changed] + 7) % model.config.vocab_size
            logits = model(input_ids=changed, position_ids=positions, use_cache=False).logits
            found.see(("output_layer",), logits.transpose(0, 1), tokens)
            if change is not None:
                of = logits[change.sample, change.trained]
                of.float().log_softmax(-1)[..., 0].sum().backward()
                model.zero_grad()
    finally:
        for hook in hooks:
            hook.remove()
    return LeakFinding(
        name, 1, time.monotonic() - began, found.leaks, found.compared, len(passes), allowed=found.allowed
    )
