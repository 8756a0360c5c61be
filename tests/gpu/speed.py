"""Stages 7 to 9: host syncs and graph capture, speed of the layer and its operators, Transformer Engine."""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import Bound, engine_config, ours
from benchmarks.problem import Problem, Shape, make_problem, oracle, relative_error
from megatron_moe import platform
from megatron_moe.model.cuda_graphs import replay_graphs
from megatron_moe.moe.experts import weighted_swiglu
from megatron_moe.moe.grouped_gemm import TorchProduct
from megatron_moe.moe.grouped_gemm_fp8 import fp8_products, why_not_by_triton
from megatron_moe.moe.layer import MoELayer
from megatron_moe.moe.rows import copy_rows, sum_copies
from megatron_moe.parallel import groups
from tests.gpu.operators import error_of, one_rank
from tests.gpu.stage import Stage, milliseconds
from tests.helpers.errors import worst

BASELINES = Path(__file__).with_name("baselines")
SLOWER = 1.10
"""A time above this multiple of the baseline's fails; NVIDIA's own gate is 1.02 on a quiet machine of its own."""
SYNCS_PER_STEP = 3
"""Host syncs in a step of the tiny model, as torch warns of them; docs/internals/gpu_paths.md has the table."""

# (T, H, E, K, F): NVIDIA's two regression cases with all experts on one card, Qwen3-30B-A3B, DeepSeek-V3.
SHAPES = {
    "DEEPSEEK_PROXY": (4096, 7168, 32, 8, 2048),
    "MIXTRAL_PROXY": (4096, 4096, 8, 2, 14336),
    "Qwen3-30B-A3B": (4096, 2048, 128, 8, 768),
    "DeepSeek-V3 E256": (4096, 7168, 256, 8, 2048),
}
DRY_SHAPES = {"dry": (64, 32, 8, 2, 16)}


def layer_of(
    stage: Stage, shape: tuple[int, ...], dtype: Any, balanced: bool = True, fp8_format: str | None = None
) -> Any:
    """Return a MoE layer of these sizes with random weights, without a shared expert."""
    tokens, hidden, experts, topk, width = shape
    changes = {"moe_shared_expert_intermediate_size": None, "moe_router_force_load_balancing": balanced}
    config = engine_config(Shape(tokens, hidden, experts, topk, width, 0), dtype, **changes)
    config.moe_expert_backend, config.fp8_format = "grouped_mm", fp8_format
    layer = MoELayer(config, layer_number=1).to(stage.device).train()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02)
    return layer


# ---- stage 7


def waits(stage: Stage) -> None:
    """Stage 7: no host sync in the layer of one rank, a known number in a step, and the layer as a CUDA graph."""
    shape = DRY_SHAPES["dry"] if stage.dry else (2048, 1024, 32, 4, 512)
    with one_rank():
        layer = layer_of(stage, shape, torch.bfloat16, balanced=False)
        hidden = torch.randn(shape[0], 1, shape[1], device=stage.device, dtype=torch.bfloat16, requires_grad=True)

        def forward_backward() -> None:
            layer.router.reset_counts()
            layer(hidden)[0].sum().backward()

        # On the CPU tests/platform/test_host_syncs.py counts.
        does = "runs" if stage.dry else "makes the host wait nowhere"
        with stage.attempt(f"the layer of one rank, forward and backward, {does}"):
            forward_backward()
            torch.cuda.synchronize()
            with contextlib.nullcontext() if stage.dry else _waiting_is("error"):
                forward_backward()
            stage.holds(f"the layer of one rank, forward and backward, {does}", True)
        if stage.dry:
            stage.impossible("the layer as a CUDA graph", "there is no CUDA; the same calls ran eagerly")
        else:
            with stage.attempt("the layer as a CUDA graph"):
                _captured(stage, layer, shape)
    with stage.attempt("steps that replay CUDA graphs"):
        _graphs_in_steps(stage)
    with stage.attempt("host syncs per step"):
        _step_waits(stage)


@contextlib.contextmanager
def _waiting_is(mode: str) -> Iterator[None]:
    """Let torch answer with "error" or "warn" in the block where the host waits for the device."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _captured(stage: Stage, layer: Any, shape: tuple[int, ...]) -> None:
    """Capture forward and backward in a graph, replay it on other tokens, and compare with the layer called eagerly."""
    static = torch.randn(shape[0], 1, shape[1], device=stage.device, dtype=torch.bfloat16, requires_grad=True)

    def pass_() -> tuple[Any, Any, Any]:
        layer.router.reset_counts()
        output = layer(static)[0]
        (gradient,) = torch.autograd.grad(output.float().square().sum(), static)
        return output.detach(), gradient, layer.router.local_tokens_per_expert

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            pass_()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = pass_()
    with torch.no_grad():
        static.copy_(torch.randn_like(static))
    graph.replay()
    torch.cuda.synchronize()
    replayed = [one.clone() for one in captured]
    eager = pass_()
    errors = {name: error_of(a, b) for name, a, b in zip(("output", "gradient"), replayed, eager)}
    stage.within("the layer as a CUDA graph, replayed on other tokens", errors[worst(errors)], 1e-2, **errors)
    stage.holds("token counts of a replay", torch.equal(replayed[2], eager[2]), f"{replayed[2]}, not {eager[2]}")
    eager_ms, graph_ms = (milliseconds(stage, lambda _, call=call: call(), 20) for call in (pass_, graph.replay))
    stage.figure("time of the layer, eager and as a graph", eager_ms=eager_ms, graph_ms=graph_ms)


def _graphs_in_steps(stage: Stage) -> None:
    """Train models with graphs of parts, of whole layers, and without: the same bits, and the time of a step."""
    from tests.helpers.recorded_graphs import RecordedGraph
    from tests.helpers.stepped_trainer import Trainer  # which needs pytest

    found, times = {}, {}
    layers = (
        {} if stage.dry else {"hidden_size": 1024, "moe_ffn_hidden_size": 512, "num_experts": 32, "seq_length": 1024}
    )
    balance = {"moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.01,)}
    dropping = {
        "moe_expert_capacity_factor": 1.0,
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "layernorm", "moe_act"),
    }
    parts = {"no": None, "parts": ("attn", "mlp", "moe_router", "moe_preprocess"), "layers": ("attn", "mlp", "moe")}
    for name, modules in {**parts, "no, dropping": None, "layers, dropping": parts["layers"]}.items():
        captured = {"cuda_graph_impl": "none" if modules is None else "local", "cuda_graph_modules": modules}
        trainer = Trainer(
            {"bf16": True, "hidden_dropout": 0.1, "cuda_graph_warmup_steps": 1, **layers, **balance, **captured}
            | (dropping if "dropping" in name else {})
        )
        graphs = replay_graphs(trainer.run, trainer.model, RecordedGraph if stage.dry else None)
        # Otherwise the embedding's gradient is added up in any order.
        torch.use_deterministic_algorithms(True, warn_only=True)
        steps = [trainer.step(graphs=graphs) for _ in range(4)]
        torch.use_deterministic_algorithms(False)
        found[name] = [(repr(one.loss), repr(one.grad_norm), one.expert_bias_hash) for one in steps]
        repeats = 1 if stage.dry else 8
        times[name] = milliseconds(stage, lambda _, one=trainer, its=graphs: one.step(graphs=its), repeats, 0)
        groups.destroy()
    for name, plain in (("parts", "no"), ("layers", "no"), ("layers, dropping", "no, dropping")):
        stage.holds(f"steps that replay CUDA graphs of {name}", found[name] == found[plain], f"{found}")
    stage.figure("time of a step, without graphs and with them", **{f"{name}_ms": ms for name, ms in times.items()})


def _step_waits(stage: Stage) -> None:
    if stage.dry:
        stage.impossible("host syncs per step", "torch counts them on CUDA alone; the suite counts them on its own")
        return
    from tests.helpers.stepped_trainer import Trainer  # which needs pytest

    trainer = Trainer({"bf16": True})
    for _ in range(3):
        trainer.step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught, _waiting_is("warn"):
        warnings.simplefilter("always")
        trainer.step()
    places = [f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]
    said = ", ".join(f"{place} x{places.count(place)}" for place in dict.fromkeys(places))
    stage.within("host syncs per step", len(places), SYNCS_PER_STEP, said)


# ---- stage 8


def benchmark(stage: Stage) -> None:
    """Stage 8: times of whole layers and of their operators, against bounds that are measured in the same run."""
    figures: dict[str, dict[str, float]] = {}
    with one_rank():
        bounds(stage, figures)
        for name, shape in (DRY_SHAPES if stage.dry else SHAPES).items():
            tokens, hidden, experts, topk, width = shape
            needed = 2 * 3 * experts * hidden * width * 2 + 12 * tokens * topk * (hidden + 3 * width)
            free = torch.cuda.mem_get_info()[0]
            if needed > 0.9 * free:
                stage.impossible(name, f"needs about {needed / 2**30:.0f} GiB, free are {free / 2**30:.0f}")
            elif stage.left < 25 and not stage.dry:
                stage.impossible(name, "no time is left")
            else:
                for fp8_format, forms in ((None, ""), ("e4m3", ", FP8")):
                    if fp8_format is None or (name == next(iter(SHAPES)) and why_not_by_triton() is None):
                        with stage.attempt(name + forms):
                            _layer_times(stage, name + forms, shape, figures, fp8_format)
                        torch.cuda.empty_cache()
        with stage.attempt("operators"):
            first = next(iter((DRY_SHAPES if stage.dry else SHAPES).values()))
            _operator_times(stage, first, figures)
    _against_baseline(stage, figures)


def bounds(stage: Stage, figures: dict[str, dict[str, float]]) -> None:
    """Measure what no layer can beat here: a dense product, and a copy."""
    size, length = (64, 1 << 16) if stage.dry else (8192, 1 << 28)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        a, b = (torch.randn(size, size, device=stage.device, dtype=dtype) for _ in range(2))
        ms = milliseconds(stage, lambda _, a=a, b=b: torch.mm(a, b), 3 if stage.dry else 20)
        figures[f"dense product {name}"] = {"ms": ms, "tflops": 2 * size**3 / ms / 1e9}
    source = torch.empty(length, dtype=torch.float32, device=stage.device).normal_()
    target = torch.empty_like(source)
    ms = milliseconds(stage, lambda _: target.copy_(source), 3 if stage.dry else 20)
    figures["copy"] = {"ms": ms, "gb_per_s": 8 * length / ms / 1e6}
    for name, measured in figures.items():
        stage.figure(f"bound: {name}", **measured)


def _layer_times(
    stage: Stage, name: str, shape: tuple[int, ...], figures: dict[str, dict[str, float]], fp8_format: str | None
) -> None:
    tokens, hidden, experts, topk, width = shape
    layer = layer_of(stage, shape, torch.bfloat16, fp8_format=fp8_format)
    fresh = [torch.randn(tokens, 1, hidden, device=stage.device, dtype=torch.bfloat16) for _ in range(4)]
    upper = torch.randn(tokens, 1, hidden, device=stage.device, dtype=torch.bfloat16)
    repeats = 2 if stage.dry else 10

    def forward(number: int) -> Any:
        layer.router.reset_counts()
        return layer(fresh[number % 4].detach().requires_grad_())[0]

    def both(number: int) -> None:
        layer.zero_grad(set_to_none=True)
        forward(number).backward(upper)

    torch.cuda.reset_peak_memory_stats()
    whole = milliseconds(stage, both, repeats, warmup=3)
    peak = torch.cuda.max_memory_allocated() / 2**30
    layer.zero_grad(set_to_none=True)
    with torch.no_grad():  # what autograd keeps is freed at once; the kernels are the same
        first = milliseconds(stage, forward, repeats)
    tflop = 18 * tokens * topk * hidden * width / 1e12
    # The layer's six products as dense ones.
    like = torch.empty(0, device=stage.device, dtype=torch.bfloat16)
    bound = Bound(Problem(Shape(tokens, hidden, experts, topk, width, 0), *[like] * 7))
    dense = milliseconds(stage, lambda _: bound.step(), repeats)
    figures[name] = {"forward_ms": first, "forward_backward_ms": whole, "tflops": 1e3 * tflop / whole}
    figures[name] |= {"x_dense": whole / dense, "peak_gib": peak}
    stage.figure(f"layer {name}: T{tokens} H{hidden} E{experts} top-{topk} F{width}", **figures[name])


def _operator_times(stage: Stage, shape: tuple[int, ...], figures: dict[str, dict[str, float]]) -> None:
    """Time each operator of the layer on the first shape: its bytes by what it has to read and write once."""
    tokens, hidden, experts, topk, width = shape
    rows, like = tokens * topk, {"device": stage.device, "dtype": torch.bfloat16}
    order = torch.randperm(rows, device=stage.device)
    source, slots = order // topk, order.argsort().view(tokens, topk)
    offsets = (torch.arange(1, experts + 1, device=stage.device) * (rows // experts)).to(torch.int32)
    x, copies = torch.randn(tokens, hidden, **like), torch.randn(rows, hidden, **like)
    gate_up, probs = torch.randn(rows, 2 * width, **like).requires_grad_(), torch.rand(rows, device=stage.device)
    weight = torch.randn(experts, 2 * width, hidden, **like)
    upper = torch.randn(rows, width, **like)
    activated = weighted_swiglu(gate_up, probs)
    # Name -> (call, bytes, FLOPs).
    calls: dict[str, tuple[Callable[[int], object], float, float]] = {
        "copy_rows": (lambda _: copy_rows(x, source, slots), 2 * hidden * (tokens + rows), 0),
        "sum_copies": (lambda _: sum_copies(copies, source, slots), 2 * hidden * (tokens + rows), 0),
        "weighted SwiGLU": (lambda _: weighted_swiglu(gate_up.detach(), probs), 2 * rows * 3 * width, 0),
        "weighted SwiGLU backward": (
            lambda _: torch.autograd.grad(activated, gate_up, upper, retain_graph=True),
            2 * rows * 5 * width,
            0,
        ),
        "grouped product": (lambda _: TorchProduct()(copies, weight, offsets), 0, 4 * rows * hidden * width),
    }
    flops_of_product, ends = calls["grouped product"][2], offsets.cpu()
    forms = {"triton": (why_not_by_triton(), offsets), "scaled": (platform.why_no_fp8_products(), ends)}
    for form, (why, read) in forms.items():
        if why is None:
            in_fp8 = partial(fp8_products("e4m3", form)[0], copies, weight, read)
            calls[f"grouped product, FP8 {form}"] = (lambda _, call=in_fp8: call(), 0, flops_of_product)
        else:
            stage.impossible(f"operator grouped product, FP8 {form}", why)
    for name, (call, moved, flops) in calls.items():
        ms = milliseconds(stage, call, 2 if stage.dry else 10)
        figures[name] = {"ms": ms}
        if moved:
            rate = moved / ms / 1e6
            figures[name] |= {"gb_per_s": rate, "of_copy": rate / figures["copy"]["gb_per_s"]}
        if flops:
            rate = flops / ms / 1e9
            figures[name] |= {"tflops": rate, "of_dense": rate / figures["dense product bf16"]["tflops"]}
        stage.figure(f"operator {name}", **figures[name])


def _against_baseline(stage: Stage, figures: dict[str, dict[str, float]]) -> None:
    device = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name(0))
    measured = stage.folder / f"{device}.json"
    measured.write_text(json.dumps(figures, indent=1) + "\n")
    committed = BASELINES / measured.name
    if not committed.exists():
        said = f"no baseline of this device is committed: {measured} is one, for {BASELINES.name}/"
        stage.impossible("speed against the baseline", said)
        return
    before = json.loads(committed.read_text())
    for name in sorted(before.keys() & figures.keys()):
        for key in sorted(before[name].keys() & figures[name].keys()):
            if key.endswith("ms"):
                stage.within(f"{name} {key} over the baseline's", figures[name][key] / before[name][key], SLOWER)


# ---- stage 9


def transformer_engine(stage: Stage) -> None:
    """Stage 9: Transformer Engine's grouped product against ours, in value and in time."""
    if (why := platform.why_no_transformer_engine()) is not None:
        stage.impossible("--moe-expert-backend te", why)
        return
    with stage.attempt("--moe-expert-backend te"), one_rank():
        shape = Shape(64, 32, 8, 2, 16, 16) if stage.dry else Shape(4096, 2048, 32, 4, 768, 768)
        problem = make_problem(shape, torch.bfloat16, stage.device)
        truth = oracle(problem)
        for backend in ("grouped_mm", "te"):
            layer = ours(problem, backend)
            layer.step()
            errors = {key: relative_error(value, truth[key]) for key, value in layer.results().items()}
            stage.within(f"--moe-expert-backend {backend} against fp32", errors[worst(errors)], 1e-2, **errors)
            layer.clear()
            ms = milliseconds(stage, lambda _, layer=layer: layer.step(), 10)
            stage.figure(f"--moe-expert-backend {backend}, forward and backward", ms=ms)
