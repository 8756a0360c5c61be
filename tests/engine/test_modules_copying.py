"""A module that holds process groups is copied with them, and says what to save where it cannot be pickled."""

import copy
import io
import pickle

import pytest
import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build
from megatron_moe.engine.modules import _groups_of
from megatron_moe.model.build import build_model
from megatron_moe.parallel import groups
from tests.helpers.routers import router, tokens
from tests.precision.test_contract import _subject

SAVED = {
    "pickle": pickle.dumps,
    "torch.save": lambda module: torch.save(module, io.BytesIO()),
    "inside a dict": lambda module: torch.save({"model": module, "step": 3}, io.BytesIO()),
}


def test_a_module_with_process_groups_says_what_to_save_instead(one_process: None) -> None:
    flags = {"mock_data": True, "vocab_size": 100, "bf16": True, "mtp_num_layers": 1, "moe_expert_capacity_factor": 1.0}
    run = build({**PRESETS["tiny"], **flags, "moe_pad_expert_input_to_capacity": True})
    (model,) = build_model(run, groups.initialize(Run()), 128)
    kinds = {type(m): m for m in model.modules() if any(_groups_of(m))}
    own = {cls.__name__: m for cls, m in kinds.items() if cls.__module__.startswith("megatron_moe")}
    assert {"TopKRouter", "GroupedExperts", "SharedExperts"} < set(own)
    for name, module in {**own, "the model": model, "the bare model": model.module}.items():
        for way, save in SAVED.items():
            with pytest.raises((TypeError, AttributeError)) as refused:
                save(module)
            assert "state_dict()" in str(refused.value) and "process groups" in str(refused.value), (name, way)


def test_a_copy_shares_the_groups_and_the_state_dict_is_what_a_new_module_loads(one_process: None) -> None:
    pg_collection = groups.initialize(Run())
    layer, fresh = (_subject("MoELayer", pg_collection) for _ in range(2))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    deep, file = copy.deepcopy(layer), io.BytesIO()
    assert copy.copy(layer).router is layer.router
    assert deep.router.weight is not layer.router.weight and deep.router.groups.tp is layer.router.groups.tp
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    assert torch.equal(fresh.experts.weight1, layer.experts.weight1)


def test_a_router_of_a_plain_script_has_no_groups_and_is_pickled() -> None:
    before = router()
    after = pickle.loads(pickle.dumps(before))
    assert torch.equal(before.route(tokens()).probs, after.route(tokens()).probs)
