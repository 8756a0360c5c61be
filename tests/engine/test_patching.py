"""Patches that no other test would miss: each changes what it says, and the engine, as published, still needs it."""

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer import optimizer as engine_optimizer
from torch.distributed.fsdp._fully_shard import _fsdp_init

from megatron_moe.engine.adam import Adam
from megatron_moe.engine.fully_shard import partition_mesh
from megatron_moe.engine.optimizer import adam_class, cpu_shards_accepted, parts
from tests.engine.stock import small_config
from tests.engine.test_defects_engine import as_published
from tests.engine.test_defects_optimizer import Weights, optimizer_of, wrapped

pytestmark = pytest.mark.engine


def test_the_engine_can_be_given_no_class_of_adam(pg: Any) -> None:
    class OurAdam(Adam):
        pass

    model = wrapped(Weights(small_config()), pg)
    with adam_class(OurAdam):
        (inside,) = {type(part.optimizer) for part in parts(optimizer_of(model, pg))}
    (outside,) = {type(part.optimizer) for part in parts(optimizer_of(model, pg))}
    assert inside is OurAdam is not outside
    names = "config model_chunks config_overrides use_gloo_process_groups pg_collection dump_param_to_param_group_map"
    assert set(inspect.signature(get_megatron_optimizer).parameters) <= set(names.split())


def test_the_engine_refuses_weights_in_host_memory_unless_they_say_that_they_are_on_a_gpu() -> None:
    shard = torch.nn.Parameter(torch.ones(4))
    published = as_published(engine_optimizer)

    def begun(self: Any, optimizer: Any, *_: Any) -> None:
        self.optimizer = optimizer

    with mock.patch.object(published.MixedPrecisionOptimizer, "__init__", begun):  # which needs a GPU for its own
        build = partial(published.Float16OptimizerWithFloat16Params, torch.optim.SGD([shard], lr=0.1), None, None, None)
        with pytest.raises(TypeError, match="Received torch.FloatTensor"):
            build()
        with cpu_shards_accepted([shard]):
            assert build().fp32_from_fp32_groups == [[shard]]


def test_torch_makes_the_groups_of_a_secondary_partition_from_one_groups_ranks(pg: Any) -> None:
    of_one_group = SimpleNamespace(shard_mesh_size=4, mesh=SimpleNamespace(mesh=torch.arange(4), device_type="cpu"))
    with pytest.raises(RuntimeError, match="world size"):  # this process is alone: the groups of four cannot be made
        _fsdp_init._get_post_forward_mesh_info(2, of_one_group)
    mesh: Any = SimpleNamespace(ndim=2, size=lambda _: 2, get_group=lambda _: pg.dp, mesh_dim_names=None)
    mesh.get_local_rank = mesh.size
    with partition_mesh(mesh):
        assert _fsdp_init._get_post_forward_mesh_info(2, of_one_group).mesh is mesh
