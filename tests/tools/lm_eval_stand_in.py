"""A package `lm_eval` for tests: what megatron_moe_tools calls of lm-eval 0.4.13, whose own packages take 300 MB.

A text is asked as there: how it becomes tokens, which windows a long one has, and how a task's options are read.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

TASK = "two questions"


def request(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


class TemplateLM:
    def loglikelihood(self: Any, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        asked = []
        for context, wanted in (each.args for each in requests):
            if context == "":
                ids = self.tok_encode(wanted, add_special_tokens=False)
                pair = ([self.prefix_token_id], ids)
                if ids[0] == self.prefix_token_id:
                    pair = (ids[:1], ids[1:])
            else:
                kept = context.rstrip()
                wanted, context = context[len(kept) :] + wanted, kept
                ids, first = self.tok_encode(context + wanted), self.tok_encode(context)
                pair = (first, ids[len(first) :])
            asked.append(((context, wanted), *pair))
        found: list[tuple[float, bool]] = self._loglikelihood_tokens(asked, disable_tqdm=True)
        return found


def windows(ids: list[int], prefix: int, size: int, context: int) -> Any:
    assert context == 1
    yield [prefix, *ids[: min(size, len(ids)) - 1]], ids[:size]
    for first in range(size, len(ids), size):
        last = min(first + size, len(ids))
        yield ids[last - size - 1 : last - 1], ids[first:last]


def disjoint(pair: Any) -> Any:
    return pair[0][: len(pair[0]) - len(pair[1]) + 1], pair[1]


def options(given: dict[str, Any], most: int) -> dict[str, Any]:
    return {"do_sample": given.get("temperature", 0) > 0, "max_gen_toks": most, **given}


class TaskManager:
    def __init__(self, include_path: str | None) -> None: ...

    def match_tasks(self, names: list[str]) -> list[str]:
        return [name for name in names if name == TASK]


def simple_evaluate(model: Any, tasks: list[str], **given: Any) -> dict[str, Any]:
    assert tasks == [TASK] and given["limit"] == 2
    found = model.loglikelihood([request("", "def"), request("def", " area")])
    return {"results": {TASK: {"alias": TASK, "sum,none": sum(one[0] for one in found), "sum_stderr,none": "N/A"}}}


def install() -> None:
    modules = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.models": {},
        "lm_eval.models.utils": {"normalize_gen_kwargs": options},
        "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.utils": {"get_rolling_token_windows": windows, "make_disjoint_window": disjoint},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(content)
        sys.modules[name] = module
