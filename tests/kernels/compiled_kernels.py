"""Compile the Triton kernels that a layer and a loss launch, for GPUs that are not here, and show what they take.

    python -m tests.kernels.compiled_kernels          # prints the table, writes tests/kernels/kernel_budget.json

Registers of a thread, bytes of shared memory and of spilled registers, by kernel and architecture, as ptxas allots
them. `--check` compares with the file instead of writing it.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
BUDGET = ROOT / "tests" / "kernels" / "kernel_budget.json"
ARCHITECTURES = (80, 90, 100)
WITHOUT_FP8 = (80,)
"""Architectures that have no conversions to FP8."""
MODULES = ("activation", "adam", "dispatch", "fp8", "loss", "products", "rotary", "routing")
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int64": "i64", "int32": "i32", "bool": "i1"}
_TYPES |= {"uint16": "u16", "int16": "i16", "uint8": "u8", "int8": "i8"}


def all_kernels() -> Any:
    """Return the functions that launch kernels, as attributes, under the names of their operations."""
    modules = [importlib.import_module(f"megatron_moe.kernels.triton_{name}") for name in MODULES]
    own = [(name, value) for one in modules for name, value in vars(one).items() if inspect.isfunction(value)]
    return SimpleNamespace(**{name: value for name, value in own if not name.startswith("_")})


def launched(architecture: int) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return a launch of each kernel: of DeepSeek-V3's MoE layer, attention and loss, on the meta device."""
    import torch

    from megatron_moe.kernels.choice import launches_seen_by
    from megatron_moe.parallel.collectives import room_for_rows, weights_behind
    from megatron_moe.platform import hardware

    fused = all_kernels()
    found: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def see(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        name = f"{kernel.fn.__module__.rpartition('.')[2]}{kernel.fn.__name__}"
        found.setdefault(name, (kernel, arguments, constants))

    bf16, fp32, int64 = (
        partial(torch.empty, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32, torch.int64)
    )
    capability = mock.patch.object(hardware, "capability", lambda _: divmod(architecture, 10))
    with capability, launches_seen_by(see):
        options = SimpleNamespace(topk=8, num_groups=8, group_topk=4, group_score="top2")
        fused.choose_experts(fp32(4096, 256), fp32(256), options)
        fused.expert_weights(fp32(4096, 256), fp32(4096, 256), int64(4096, 8), None, False, True, 2.5)
        fused.expert_weights_backward(fp32(4096, 8), fp32(4096, 256), int64(4096, 8), None, False, True, 2.5)
        fused.count_tokens(int64(4096, 8), 256)
        fused.add_counts(fp32(256), int64(1), int64(4096, 8))
        fused.sort_by_expert(int64(4096, 8), 256, False, int64(256))
        fused.sort_arrived(int64(8, 32), 32768)
        tables, packed = (int64(32768), int64(32768), int64(4096, 8)), room_for_rows(32768, 7168, bf16(0), fp32(0))
        packed_pair = (packed[:, :7168], weights_behind(packed, torch.float32))
        fused.spread_rows(bf16(4096, 7168), fp32(32768), *tables, *packed_pair)
        fused.add_up_rows(*packed_pair, tables[-1], False, 7168)
        ends = torch.empty(32, dtype=torch.int32, device="meta")
        fused.add_grouped_product(fp32(32, 4096, 7168), bf16(32768, 4096), bf16(32768, 7168), ends)
        fused.weighted_swiglu_forward(bf16(32768, 4096), fp32(32768))
        fused.weighted_swiglu_backward(bf16(32768, 2048), bf16(32768, 4096), fp32(32768))
        fused.join_positions(bf16(4096, 1, 128, 128), bf16(4096, 1, 1, 64), fp32(4096, 1, 1, 32), fp32(4096, 1, 1, 32))
        fused.join_positions_backward(bf16(4096, 1, 128, 192), fp32(4096, 1, 1, 32), fp32(4096, 1, 1, 32), 128, True)
        state, step, rounding = packed_state(2**20)
        fused.adam_update([fp32(2**20)], [state], step, [rounding])
        tokens = [fp32(1024) for _ in range(3)]
        fused.add_statistics(fp32(1024, 8192), int64(1024), *tokens)
        fused.gradient_of_tile(fp32(1024, 8192), int64(1024), *tokens, torch.bfloat16)
        if architecture not in WITHOUT_FP8:
            e4m3, rows = torch.float8_e4m3fn, bf16(32768, 7168)
            matrices = fused.cut_matrices(bf16(32, 2, 2048, 7168))
            fused.multiply(fused.cut_rows(rows.unsqueeze(1), e4m3), matrices, ends, (2, 2048), torch.bfloat16)
            fused.cut_copies(rows[:4096], fp32(32768), tables[-1], 32768)
            right, _ = fused.cut_columns(rows[:4096].unsqueeze(1), ends, e4m3, True, tables[1])
            fused.cut_activated(bf16(32768, 4096), fp32(32768))
            (left, _), *_ = fused.cut_activation(bf16(32768, 2048), bf16(32768, 4096), fp32(32768), ends, e4m3)
            fused.multiply_columns(left, right, ends, fp32(32, 4096, 7168), True)
    return found


def packed_state(numel: int) -> tuple[Any, ...]:
    """Return state, step and rounding of a weight with the formats that take most: codes of both kinds."""
    import torch

    from megatron_moe.precision.packed_state import GROUP, AdamState, AdamStep, StochasticRounding

    def meta(dtype: torch.dtype, per: int = 1) -> torch.Tensor:
        return torch.empty(numel // per, dtype=dtype, device="meta")

    exponents = (meta(torch.int8, GROUP), meta(torch.int8, GROUP))
    main = (None, meta(torch.bfloat16), meta(torch.int16), meta(torch.uint8, 8))
    state = AdamState(*main, (meta(torch.float8_e4m3fn), meta(torch.uint8)), exponents)
    places = torch.empty(numel // 1024, dtype=torch.int64, device="meta")
    return state, AdamStep(1e-3, (0.9, 0.95), 1e-8, 0.1, 1), StochasticRounding(places, 1024, 0, (2**31, 2**31))


class StubDriver:
    """What Triton asks a driver for when it compiles, and launches what does nothing: a GPU that is not here."""

    def __init__(self, architecture: int = 90) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", architecture, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 2**18}, load_binary=lambda *_: (1, 1, 32, 0, 1024)
        )
        self.launcher_cls = lambda *_: lambda *_: None

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], architecture: int) -> dict[str, int]:
    """Compile a launch as Triton would on the GPU, and return its budget.

    Registers, shared memory and spilled bytes; and narrow: places in the code that read or write less than 4 bytes of
    global memory at a time.
    """
    import triton

    triton.runtime.driver.set_active(StubDriver(architecture))
    kernel.device_caches.clear()
    built = kernel.warmup(*arguments, grid=(1,), **constants)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", said.stdout + said.stderr)
    assert usage is not None, said.stdout + said.stderr
    registers, stack, local = (int(number) for number in usage.groups())
    ptx, name = built.asm["ptx"], kernel.fn.__name__
    if name.startswith("_cut"):  # to the nearest number, as torch does; the interpreter does not show it
        assert "max.NaN.f32" in ptx, name
        assert set(re.findall(r"cvt\.[a-z.]*e[45]m[23]x2\.f32", ptx)) == {"cvt.rn.satfinite.e4m3x2.f32"}, name
    if name.startswith("_cut_activat"):  # numbers are rounded as where they are written
        assert "cvt.rn.bf16.f32" in ptx, name
    if name.startswith("_multiply"):
        assert re.search(r"wgmma.*f32\.e4m3\.e4m3" if architecture < 100 else r"tcgen05\.mma.*f8f6f4", ptx), name
    narrow = len(re.findall(r"\b(?:ld|st)\.global(?:\.[a-z_:0-9]+)*\.b(?:8|16)\b", ptx))
    return {"registers": registers, "shared": built.metadata.shared, "spilled": stack + local, "narrow": narrow}


def main() -> int:
    """Print and write the table; with --check compare with what is written, and say what takes more."""
    os.environ.pop("TRITON_INTERPRET", None)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for one in ARCHITECTURES:
        for name, launch in launched(one).items():
            found.setdefault(name, {})[f"sm_{one}"] = compiled(*launch, one)
    if "--check" not in sys.argv:
        lines = [f" {json.dumps(name)}: {json.dumps(taken)}" for name, taken in found.items()]
        BUDGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    wanted = json.loads(BUDGET.read_text(encoding="utf-8"))
    print(json.dumps(found))
    over = [
        f"{name}, {one}: {kind} {size}, at most {wanted[name][one][kind]}"
        for name, taken in found.items()
        for one, sizes in taken.items()
        for kind, size in sizes.items()
        if size > wanted[name][one][kind]
    ]
    print("\n".join(over), file=sys.stderr)
    return 1 if over or found.keys() != wanted.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
