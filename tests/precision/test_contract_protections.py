"""Contract 1 on the real modules under every path, and each protection disabled once: then the same check goes red."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine

SUBJECTS = ("router", "MoELayer", "model", "Float16Module", "DistributedDataParallel")


def _bits(module: torch.nn.Module) -> list[torch.Tensor]:
    from megatron_moe.precision.contract import declared_fp32_state

    return [tensor.detach().clone() for _, tensor in declared_fp32_state(module)]


def _kept(module: torch.nn.Module, before: list[torch.Tensor]) -> bool:
    """Whether every declared tensor is fp32 with the bits of before."""
    after = _bits(module)
    return len(after) == len(before) > 0 and all(
        a.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(after, before)
    )


def _through_file(module: torch.nn.Module) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        torch.save(_tensors(module), path)
        module.load_state_dict(torch.load(path, weights_only=True), strict=False)
    return module


def _exported(module: torch.nn.Module) -> torch.nn.Module:
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({name: tensor.clone() for name, tensor in _tensors(module).items()}, path)
        assert all(t.dtype == torch.float32 for name, t in load_file(path).items() if "expert_bias" in name)
        module.load_state_dict(load_file(path), strict=False)
    return module


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _assigned(module: torch.nn.Module) -> torch.nn.Module:
    module.bfloat16().load_state_dict(_tensors(copy.deepcopy(module)), strict=False, assign=True)
    return module


def _through_meta(module: torch.nn.Module) -> torch.nn.Module:
    state = {name: tensor.clone() for name, tensor in _tensors(module).items()}
    counts = [r.local_tokens_per_expert.clone() for r in module.modules() if hasattr(r, "local_tokens_per_expert")]
    module.to("meta").to_empty(device="cpu")
    module.load_state_dict(state, strict=False)
    # Counts are not saved: they are zero between steps, and are put back here by hand.
    for router in (r for r in module.modules() if hasattr(r, "local_tokens_per_expert")):
        router.local_tokens_per_expert.copy_(counts.pop(0))
    return module


def _engine_wrapped(module: torch.nn.Module) -> torch.nn.Module:
    from megatron.core.transformer.module import Float16Module as EngineFloat16Module

    from megatron_moe.model.engine_config import transformer_config

    return EngineFloat16Module(transformer_config(_run(bf16=True)), module)


PATHS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(torch.float16),
    "to device and dtype": lambda m: m.to("cpu", torch.bfloat16),
    "type": lambda m: m.type(torch.bfloat16),
    "engine's Float16Module": _engine_wrapped,
    "deepcopy": lambda m: copy.deepcopy(m),
    "deepcopy, then half": lambda m: copy.deepcopy(m).half(),
    "half, then deepcopy": lambda m: copy.deepcopy(m.half()),
    "load, assign": _assigned,
    "meta, to_empty, load": _through_meta,
    "saved and loaded": lambda m: _through_file(m.bfloat16()),
    "exported and loaded": lambda m: _exported(m.bfloat16()),
    "moved": lambda m: m.to("cpu"),
    "shared": lambda m: m.share_memory(),
}
NO_COPY = {"DistributedDataParallel"}  # the engine's buffers and process groups cannot be copied
CASTS = ("half", "bfloat16", "double", "to dtype", "to device and dtype", "type", "engine's Float16Module")


def _run(**flags: Any) -> Any:
    from megatron_moe.config.presets import PRESETS
    from megatron_moe.config.schema import build

    return build({**PRESETS["tiny"], "mock_data": True, "vocab_size": 100, **flags})


def _subject(name: str, pg_collection: Any) -> torch.nn.Module:
    from megatron_moe.model.build import build_model
    from megatron_moe.model.engine_config import transformer_config
    from megatron_moe.moe.layer import MoELayer
    from megatron_moe.moe.options import MoEOptions
    from megatron_moe.moe.router import TopKRouter

    wrapped = name in ("Float16Module", "DistributedDataParallel")
    run = _run(bf16=wrapped)
    if name == "router":
        module: torch.nn.Module = TopKRouter(transformer_config(run), pg_collection, options=MoEOptions.from_run(run))
    elif name == "MoELayer":
        options = MoEOptions.from_run(run)
        module = MoELayer(transformer_config(run), pg_collection=pg_collection, layer_number=1, options=options)
    else:
        (module,) = build_model(run, pg_collection, 128, wrap=wrapped)
        module = module.module if name == "Float16Module" else module
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in (m for m in module.modules() if isinstance(m, TopKRouter)):
            # Values that bf16 and fp16 cannot hold.
            router.expert_bias.copy_(torch.randn(8, generator=generator) * 1e-3 + 1.0)
            router.local_tokens_per_expert.copy_(torch.randint(65505, 2**24, (8,), generator=generator))
    return module


def walked(
    subjects: tuple[str, ...], paths: tuple[str, ...], disabled: str | None = None, autocast: bool = False
) -> dict[str, bool]:
    """Subject and path -> whether the fp32 state kept its bits, with a protection switched off, or under autocast."""
    from megatron_moe.parallel import groups

    pg_collection = groups.initialize(_run())
    seen = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for subject in subjects:
            for path in paths:
                if subject in NO_COPY and ("deepcopy" in path or path == "load, assign"):
                    continue
                module = _subject(subject, pg_collection)
                before = _bits(module)
                with without(disabled), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    seen[f"{subject}: {path}"] = _kept(PATHS[path](module), before)
    return seen


@contextmanager
def without(protection: str | None) -> Iterator[None]:
    """One of the two protections of a module's fp32 state switched off."""
    from megatron_moe.precision.fp32_state import Fp32State

    if protection is None:
        yield
        return
    method = getattr(Fp32State, protection)
    delattr(Fp32State, protection)
    try:
        yield
    finally:
        setattr(Fp32State, protection, method)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "under autocast"])
def test_every_path_keeps_the_bits_of_router_layer_model_and_wrapped_models(gloo, autocast):
    (seen,) = gloo.run(1, walked, subjects=SUBJECTS, paths=tuple(PATHS), autocast=autocast)
    assert len(seen) == len(SUBJECTS) * len(PATHS) - 4
    assert [case for case, kept in seen.items() if not kept] == []


def _pass(module: Any, autocast: bool) -> list[torch.Tensor]:
    """Everything that a training pass through a router or a layer leaves behind."""
    from megatron_moe.moe.state import routers

    (router,) = routers([module])
    router.reset_counts()
    module.zero_grad()
    dtype = router.weight.dtype
    hidden = (
        torch.randn(64, 2, router.weight.shape[1], generator=torch.Generator().manual_seed(5))
        .to(dtype)
        .requires_grad_()
    )
    # torch refuses a backward of fp16 gradients under autocast to bf16.
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    with torch.autocast("cpu", half, enabled=autocast):
        outputs = [one for one in module(hidden) if one is not None]
        outputs[0].double().sin().sum().backward()
    return [*outputs, hidden.grad, *(p.grad for p in module.parameters()), *_bits(module)]


def passes_after(paths: tuple[str, ...]) -> dict[str, bool]:
    """Subject and path -> whether a pass after it, under autocast, is the pass without it to the bit."""
    from megatron_moe.parallel import groups

    pg_collection = groups.initialize(_run())
    seen = {}
    for subject in ("router", "MoELayer"):
        for path in paths:
            if (subject, path) == ("MoELayer", "double"):
                continue  # torch's grouped product has no fp64
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = PATHS[path](_subject(subject, pg_collection)).requires_grad_()
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            results = [_pass(module, autocast) for autocast in (False, True)]
            seen[f"{subject}: {path}"] = all(
                a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*results, strict=True)
            )
    return seen


def test_after_every_path_a_pass_under_autocast_is_the_pass_without_it(gloo):
    (seen,) = gloo.run(1, passes_after, paths=tuple(path for path in PATHS if "engine" not in path))
    assert len(seen) == 2 * (len(PATHS) - 1) - 1
    assert [case for case, same in seen.items() if not same] == []


def test_without_the_shield_of_apply_every_cast_is_seen_to_round(gloo):
    (seen,) = gloo.run(1, walked, subjects=SUBJECTS[:3], paths=CASTS, disabled="_apply")
    assert [case for case, kept in seen.items() if kept] == []


def rounded_state_loads_as_fp32(disabled: str | None) -> bool:
    """Whether a bf16 state dict that is assigned leaves the bias fp32."""
    from megatron_moe.parallel import groups

    module = _subject("MoELayer", groups.initialize(_run()))
    state = {name: tensor.bfloat16() for name, tensor in _tensors(module).items()}
    with without(disabled), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.load_state_dict(state, strict=False, assign=True)
    return module.router.expert_bias.dtype == torch.float32


def test_without_the_shield_of_loading_a_rounded_bias_comes_in_as_it_is(gloo):
    assert gloo.run(1, rounded_state_loads_as_fp32, disabled=None) == [True]
    assert gloo.run(1, rounded_state_loads_as_fp32, disabled="_load_from_state_dict") == [False]


def wrapping_refuses(verified: bool) -> bool:
    """Whether Float16Module notices that the shield of `_apply` is gone."""
    from megatron_moe.model import float16_module
    from megatron_moe.model.engine_config import transformer_config
    from megatron_moe.parallel import groups
    from megatron_moe.precision.contract import PrecisionError

    module = _subject("model", groups.initialize(_run()))
    verify, bits = float16_module.verify_fp32_state, float16_module._bits
    if not verified:
        float16_module.verify_fp32_state = lambda *_: 0
        float16_module._bits = lambda tensor: torch.zeros(1)
    try:
        with without("_apply"):
            float16_module.Float16Module(transformer_config(_run(bf16=True)), module)
    except PrecisionError as error:
        return "expert_bias is torch.bfloat16" in str(error)
    finally:
        float16_module.verify_fp32_state, float16_module._bits = verify, bits
    return False


def test_wrapping_notices_a_model_whose_shield_is_gone_and_only_its_check_does(gloo):
    assert gloo.run(1, wrapping_refuses, verified=True) == [True]
    assert gloo.run(1, wrapping_refuses, verified=False) == [False]


def a_skipped_step_changes(restored: bool) -> list[str]:
    """What a step with a NaN loss changes."""
    from megatron_moe.moe.state import RouterSnapshot
    from tests.helpers.stepped_trainer import Trainer

    trainer = Trainer({})
    trainer.step()
    before = trainer.state()
    restore = RouterSnapshot.restore
    if not restored:
        RouterSnapshot.restore = lambda self: None  # type: ignore[method-assign]
    hook = trainer.model[0].register_forward_hook(lambda _m, _i, losses: losses * float("nan"))
    try:
        assert not trainer.step().committed
    finally:
        RouterSnapshot.restore = restore  # type: ignore[method-assign]
        hook.remove()
    after = trainer.state()
    return [name for name in before if before[name] != after[name]]


def test_without_the_snapshot_a_skipped_step_moves_the_bias(gloo):
    assert gloo.run(1, a_skipped_step_changes, restored=True) == [[]]
    assert gloo.run(1, a_skipped_step_changes, restored=False) == [["weights", "bias"]]  # weights: the state dict


def counted_under_recomputation(guarded: bool) -> tuple[int, int, str]:
    """Tokens x K that went through a router, what it counted, and the error, with the whole MoE layer recomputed."""
    from megatron_moe.moe.load_balance import LostTokens
    from megatron_moe.moe.router import TopKRouter
    from megatron_moe.moe.state import routers
    from megatron_moe.training import step as step_file
    from tests.helpers.stepped_trainer import Trainer

    trainer = Trainer({"recompute_granularity": "selective", "recompute_modules": ("moe",)})
    route, seen = TopKRouter.route, []
    if not guarded:

        def counts_always(self: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad():
                return route(self, *args, **kwargs)

        TopKRouter.route = counts_always  # type: ignore[method-assign]
    finalize = step_file.finalize_model_grads

    def noting(chunks: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(int(router.local_tokens_per_expert.sum()) for router in routers(chunks))
        return finalize(chunks, *args, **kwargs)

    step_file.finalize_model_grads = noting
    error = ""
    try:
        trainer.step()
    except LostTokens as lost:
        error = str(lost)
    finally:
        TopKRouter.route, step_file.finalize_model_grads = route, finalize  # type: ignore[method-assign]
    return 8 * trainer.run.model.seq_length * trainer.run.moe.moe_router_topk, seen[0], error


def test_without_the_test_for_gradients_recomputation_counts_twice(gloo):
    ((tokens, counted, error),) = gloo.run(1, counted_under_recomputation, guarded=True)
    assert counted == tokens and error == ""
    ((tokens, counted, error),) = gloo.run(1, counted_under_recomputation, guarded=False)
    assert counted == 2 * tokens
    assert f"{tokens} choices, but {2 * tokens} were dispatched" in error  # and the step is not applied


def bias_after_close_counts(exact: bool) -> list[float]:
    """The bias step for loads of 257, 256, ... tokens: bf16 has no 257."""
    from megatron_moe.moe.router import TopKRouter
    from megatron_moe.parallel import groups
    from megatron_moe.training import finalize_model_grads as file

    router = _subject("router", groups.initialize(_run()))
    assert isinstance(router, TopKRouter)
    with torch.no_grad():
        router.expert_bias.zero_()
        router.local_tokens_per_expert.copy_(torch.tensor([257.0, 256, 256, 256, 256, 256, 256, 255]))
    router.local_num_tokens.fill_(2048 // router.options.topk)
    counts, conservation = file._global_counts, file._require_conservation
    if not exact:
        rounded = router.local_tokens_per_expert.bfloat16().to(torch.int64)
        file._global_counts = lambda found: ([rounded], [torch.zeros_like(rounded)], [torch.tensor([1024])])
        file._require_conservation = lambda *_: None  # which would see that one is missing
    try:
        file.update_routers([router])
    finally:
        file._global_counts, file._require_conservation = counts, conservation
    return router.expert_bias.tolist()


def test_with_counts_in_bf16_experts_at_the_mean_are_pushed_down(gloo):
    (exact,) = gloo.run(1, bias_after_close_counts, exact=True)
    assert exact == pytest.approx([-1e-3, 0, 0, 0, 0, 0, 0, 1e-3])
    (rounded,) = gloo.run(1, bias_after_close_counts, exact=False)
    assert rounded[1:7] == pytest.approx([-1e-3] * 6)
