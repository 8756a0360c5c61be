"""A module that holds process groups is copied with them, and says what to save where it cannot be pickled."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine

SAVED = {
    "pickle": pickle.dumps,
    "torch.save": lambda module: torch.save(module, io.BytesIO()),
    "inside a dict": lambda module: torch.save({"model": module, "step": 3}, io.BytesIO()),
}


def refusals(wrap: bool) -> dict[str, str]:
    """What each module of this package that has a process group of its own says to each way of pickling it whole."""
    from megatron_moe.config.presets import PRESETS
    from megatron_moe.config.schema import build
    from megatron_moe.model.build import build_model
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.copying import _groups_of

    flags = {"mock_data": True, "vocab_size": 100, "bf16": True, "mtp_num_layers": 1}
    run = build(
        {**PRESETS["tiny"], **flags, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    )
    (model,) = build_model(run, groups.initialize(run), 128, wrap=wrap)
    kinds = {type(m): m for m in model.modules() if any(_groups_of(m))}
    own = {cls.__name__: m for cls, m in kinds.items() if cls.__module__.startswith("megatron_moe")}
    told = {}
    for name, module in {**own, "the model": model}.items():
        for way, save in SAVED.items():
            try:
                save(module)
                told[f"{name}: {way}"] = "saved"
            except (TypeError, AttributeError) as error:
                told[f"{name}: {way}"] = str(error)
    return told


@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "wrapped"])
def test_a_module_with_process_groups_says_what_to_save_instead(gloo: Any, wrap: bool) -> None:
    (told,) = gloo.run(1, refusals, wrap=wrap)
    assert {"TopKRouter: pickle", "GroupedExperts: pickle", "SharedExperts: pickle"} < set(told)
    assert [case for case, text in told.items() if "state_dict()" not in text or "process groups" not in text] == []


def copies() -> list[bool]:
    from megatron_moe.moe.layer import MoELayer
    from megatron_moe.parallel import groups
    from tests.precision.test_contract_protections import _run, _subject

    pg_collection = groups.initialize(_run())
    layer, fresh = (_subject("MoELayer", pg_collection) for _ in range(2))
    assert isinstance(layer, MoELayer)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    shallow, deep = copy.copy(layer), copy.deepcopy(layer)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    return [
        shallow.router is layer.router,
        deep.router.weight is not layer.router.weight and deep.router.groups.tp is layer.router.groups.tp,
        torch.equal(fresh.experts.weight1, layer.experts.weight1),
    ]


def test_a_copy_shares_the_groups_and_the_state_dict_is_what_a_new_module_loads(gloo: Any) -> None:
    assert gloo.run(1, copies) == [[True, True, True]]


def test_a_router_of_a_plain_script_has_no_groups_and_is_pickled() -> None:
    from tests.helpers.routers import router, tokens

    before = router()
    after = pickle.loads(pickle.dumps(before))
    assert torch.equal(before.route(tokens()).probs, after.route(tokens()).probs)
