"""Transformer Engine's own Python over a stub of its C++ extension, which computes with torch on the CPU.

`install` loads the package `transformer_engine` that `make setup` leaves in a folder of the environment, outside of
`sys.path`, and puts this module in the place of its extension `transformer_engine_torch`. Signatures are those by which
the pinned releases call the extension. A product is summed in fp32 and rounded once. Whatever is not here raises
NotImplementedError with its name when it is called, and can be named in an annotation.

It shows what Transformer Engine's modules and optimizers do in Python: names, shapes, dtypes, states, gradients. It
does not show its kernels, fused attention, communication that overlaps, or what a build for CUDA needs. Of FP8 it has
scales per block: which tiles its Python asks for, and of which operand each product reads rows or columns.
"""

import enum
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(sys.prefix) / "transformer_engine_python"
EXTENSION = "transformer_engine_torch"


class DType(enum.IntEnum):
    """The extension's element types; members, and not their numbers, are what Python relies on."""

    kByte = 0
    kInt32 = 1
    kFloat32 = 2
    kFloat16 = 3
    kBFloat16 = 4
    kFloat8E4M3 = 5
    kFloat8E5M2 = 6
    kFloat4E2M1 = 7


_TORCH_DTYPES = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}


_FORWARD = [f"GEMM{number}_{what}" for number in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")]
_BACKWARD = [f"GRAD_{what}{number}" for number in (1, 2, 3) for what in ("OUTPUT", "INPUT")]
FP8FwdTensors = enum.IntEnum("FP8FwdTensors", _FORWARD, start=0)
FP8BwdTensors = enum.IntEnum("FP8BwdTensors", _BACKWARD, start=0)


class _Members(type):
    """A class of the extension whose members are asked for by name, as those of its enumerations are: numbers."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return vars(cls)[name]


# ---- matrix products


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _product(a: Tensor, transa: bool, b: Tensor, transb: bool) -> Tensor:
    """Return op(b) op(a) in fp32: the extension's matrices are in columns, so its operands are the other way round.

    With a weight `a` [out, in]: "TN" is rows weight^T, "NN" the rows' gradient, and "NT", of rows `a`, the weight's.
    """
    shape = b.size()[:-1]
    left, right = _operand(b, rowwise=not transb), _operand(a, rowwise=transa)
    result = (left.t() if transb else left) @ (right.t() if transa else right)
    return result if transb else result.unflatten(0, shape)


def _operand(operand: Any, rowwise: bool) -> Tensor:
    """Return a matrix in fp32; of one in FP8, the copy whose tiles lie along its rows, or along its columns."""
    if isinstance(operand, Tensor) and not hasattr(operand, "_rowwise_data"):
        return _wide(operand).flatten(0, -2)
    side = "_rowwise" if rowwise else "_columnwise"
    bits, scales = getattr(operand, f"{side}_data"), getattr(operand, f"{side}_scale_inv")
    kind = torch.float8_e5m2 if int(operand._fp8_dtype) == DType.kFloat8E5M2 else torch.float8_e4m3fn
    numbers = bits.view(kind).float().flatten(0, -2) if rowwise else bits.view(kind).float().flatten(1)
    scales = scales if operand._is_2D_scaled else scales.t()
    scales = scales.repeat_interleave(_BLOCK, 1)[:, : numbers.shape[1]]
    if operand._is_2D_scaled:
        scales = scales.repeat_interleave(_BLOCK, 0)
    values = numbers * scales[: numbers.shape[0]]
    return values if rowwise else values.t()


_BLOCK = 128


def _in_blocks(
    values: Tensor, high: int, largest: float, kind: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Return a matrix [M, N] in tiles of high x 128 as bytes, and the scales [M / high, N / 128], which are padded."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % _BLOCK, 0, -rows % high))
    tiles = padded.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, high))
    scales = (tiles.abs().amax((1, 3)) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    if power_of_two:
        scales = torch.exp2(scales.log2().ceil())
    numbers = (tiles / scales[:, None, :, None]).to(kind).flatten(2).flatten(0, 1)[:rows, :columns]
    if high == 1:  # what a product reads has the scales of rows in columns
        return numbers.contiguous().view(torch.uint8), torch.nn.functional.pad(scales.t(), (0, -rows % 4))
    return numbers.contiguous().view(torch.uint8), torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Return a matrix in FP8 with a scale per block, with the copies along rows and columns that are asked for."""
    import inspect

    from transformer_engine.pytorch.tensor import float8_blockwise_tensor as own

    if type(quantizer) is not own.Float8BlockQuantizer or output is not None:
        raise NotImplementedError(f"a quantizer {type(quantizer).__name__}, or one that writes into a given tensor")
    e5m2 = int(quantizer.dtype) == DType.kFloat8E5M2
    kind, largest = (torch.float8_e5m2, 57344.0) if e5m2 else (torch.float8_e4m3fn, 448.0)
    high, flat, copies = 1 if quantizer.block_scaling_dim == 1 else _BLOCK, _wide(tensor).flatten(0, -2), {}
    for side, values in (("rowwise", flat), ("columnwise", flat.t())):
        bits = scales = None
        if getattr(quantizer, f"{side}_usage"):
            bits, scales = _in_blocks(values, high, largest, kind, quantizer.force_pow_2_scales)
            bits = bits.view(tensor.shape if side == "rowwise" else quantizer.get_columnwise_shape(tensor.shape))
            assert tuple(scales.shape) == tuple(quantizer.get_scale_shape(tensor.shape, side == "columnwise"))
        copies |= {f"{side}_data": bits, f"{side}_scale_inv": scales}
    options = {**copies, "fp8_dtype": quantizer.dtype, "quantizer": quantizer, "is_2D_scaled": high == _BLOCK}
    storage = own.Float8BlockwiseQTensorStorage
    if "data_format" in inspect.signature(storage.__new__).parameters:  # 2.11
        options["data_format"] = _class("Float8BlockScaleTensorFormat").GEMM_READY
    if quantizer.internal:
        return storage(**options)
    return own.Float8BlockwiseQTensor(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, **options)


def split_quantize(tensor: Tensor, splits: list[int], quantizers: list[Any], **_: Any) -> list[Any]:
    """Return the parts of a matrix's rows in FP8."""
    return [quantize(part, one) for part, one in zip(tensor.split(splits), quantizers)]


def generic_gemm(
    A: Tensor, transA: bool, B: Tensor, transB: bool, D: Tensor | None, quantizer: Any, out_dtype: DType | None,
    bias: Tensor | None, bias_type: DType, gelu: bool, gelu_in: Tensor | None, grad: bool, workspace: Tensor,
    workspaceSize: int, accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None, comm_type: Any = None,
    extra_output: Tensor | None = None, bulk_overlap: bool = False, alpha: float = 1.0, beta: float | None = None,
) -> list[Any]:  # fmt: skip
    """Return [product, gradient of the bias, None, None]."""
    _require_plain(quantizer, gelu, comm_overlap)
    result = _product(A, transA, B, transB) * alpha
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = _wide(B).flatten(0, -2).sum(0).to(bias.dtype)
        else:
            result = result + _wide(bias)
    if D is None:
        D = torch.empty_like(result, dtype=A.dtype if out_dtype is None else _TORCH_DTYPES[DType(int(out_dtype))])
    _write(D, result, accumulate)
    return [D, bias_grad, None, None]


def te_general_grouped_gemm(
    A: list[Tensor], transa: bool, B: list[Tensor], transb: bool, D: list[Tensor], D_type: DType, m_splits: list[int],
    bias: list[Tensor], bias_type: DType, single_output: bool, pre_gelu_out: list[Tensor], grad: bool,
    workspace: list[Tensor], workspaceSize: int, accumulate: bool, use_split_accumulator: bool, math_sm_count: int,
) -> list[Tensor]:  # fmt: skip
    """Write the products of the groups into `D`: one tensor of all rows with `single_output`, one per group without."""
    _require_plain(None, any(one.numel() for one in pre_gelu_out), None)
    if any(one.numel() for one in bias):
        raise NotImplementedError("te_general_grouped_gemm with a bias")
    if not any(m_splits):
        raise NotImplementedError("te_general_grouped_gemm without any row: what the extension does then is not known")
    outputs = D[0].split(m_splits) if single_output else D
    for a, b, out in zip(A, B, outputs):
        _write(out, _product(a, transa, b, transb), accumulate)  # of no rows: zeros, as the extension writes them
    return bias


def _require_plain(quantizer: Any, gelu: bool, overlap: Any) -> None:
    if quantizer is not None or gelu or overlap is not None:
        raise NotImplementedError("a product with a quantizer, an activation or overlapped communication")


def _write(out: Tensor, result: Tensor, accumulate: bool) -> None:
    out.copy_((_wide(out) + result if accumulate else result).view_as(out))


# ---- norms: rows are flattened, statistics are fp32


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, out_dtype: DType, sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:  # fmt: skip
    """Return [normed rows, None, 1 / root mean square of each row]."""
    _require_plain(quantizer, False, None)
    rsigma = torch.rsqrt(_wide(input).pow(2).mean(-1) + eps)
    normed = _wide(input) * rsigma.unsqueeze(-1) * (_wide(weight) + zero_centered_gamma)
    return [_into(out, normed, out_dtype), None, rsigma]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return the gradients of the rows and of the weight."""
    unit = _wide(x) * rsigma.unsqueeze(-1)
    scaled = _wide(dz) * (_wide(gamma) + zero_centered_gamma)
    dx = rsigma.unsqueeze(-1) * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (_wide(dz) * unit).sum(0).to(gamma.dtype)]


def _into(out: Tensor | None, result: Tensor, dtype: DType) -> Tensor:
    if out is None:
        return result.to(_TORCH_DTYPES[DType(int(dtype))])
    return out.copy_(result)


# ---- softmax of unfused attention, [batch, heads, queries, keys], under a mask


def scaled_masked_softmax_forward(inputs: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the probabilities; True masks a score."""
    return torch.softmax((_wide(inputs) * scale).masked_fill(mask.bool(), -10000.0), -1).to(inputs.dtype)


def scaled_masked_softmax_backward(grad: Tensor, result: Tensor, scale: float) -> Tensor:
    """Return the gradient of the scores."""
    weighted = _wide(grad) * _wide(result)
    return ((weighted - _wide(result) * weighted.sum(-1, keepdim=True)) * scale).to(grad.dtype)


# ---- operations over lists of tensors


def multi_tensor_scale(
    chunk_size: int, is_infinite: Tensor, tensor_lists: Sequence[list[Tensor]], scale: float
) -> None:
    """Write the first list's tensors, scaled, into the second's, and 1 into `is_infinite` where one is not finite."""
    for source, target in zip(*tensor_lists):
        target.copy_(_wide(source) * scale)
        if not source.isfinite().all():
            is_infinite.fill_(1)


def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], lr: float, beta1: float, beta2: float,
    epsilon: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Update (gradients, parameters, first moments, second moments[, fp32 masters]); mode 1 is AdamW, 0 adds L2."""
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for grad, parameter, first, second, *masters in zip(*tensor_lists):
        value = masters[0] if masters else _wide(parameter)
        wide = _wide(grad) if mode else _wide(grad) + weight_decay * value
        first.copy_(beta1 * _wide(first) + (1 - beta1) * wide)
        second.copy_(beta2 * _wide(second) + (1 - beta2) * wide * wide)
        update = (_wide(first) / correction1) / ((_wide(second) / correction2).sqrt() + epsilon)
        value = value - lr * (update + weight_decay * value if mode else update)
        parameter.copy_(value)
        for master in masters:
            master.copy_(value)


# ---- what the machine has


def get_num_cublas_streams() -> int:
    """Return the extension's number of streams."""
    return 4


def get_cudnn_version() -> int:
    """Return a version that no feature is refused for."""
    return 91300


def get_fused_attn_backend(*_: Any) -> int:
    """Return that fused attention has no kernel for the arguments, so that the unfused attention is chosen."""
    return _class("NVTE_Fused_Attn_Backend").NVTE_No_Backend


# ---- loading


def _class(name: str) -> Any:
    if name not in _CLASSES:
        _CLASSES[name] = _Members(name, (), {"__new__": _refusing(f"{EXTENSION}.{name}")})
    return _CLASSES[name]


_CLASSES: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _class(name)


def install(folder: Path = FOLDER) -> None:
    """Make `import transformer_engine` work in this process, which has the pretended CUDA of `cuda_on_cpu`.

    Raises:
        FileNotFoundError: `make setup` has not put Transformer Engine's Python into `folder`.
    """
    if not (folder / "transformer_engine").is_dir():
        raise FileNotFoundError(f"{folder} has no transformer_engine; `make setup` installs it")
    sys.path.append(str(folder))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch for an import without its libraries
    this = sys.modules[__name__]
    this.__spec__ = ModuleSpec(EXTENSION, None)
    sys.modules[EXTENSION] = this
    importlib.import_module("torch._dynamo")  # which uses triton if it finds one
    for name in _NOT_NEEDED:
        if "." in name or importlib.util.find_spec(name) is None:
            _stand_in(name)
    # The package is imported in the order of its own __init__, but its extension is not looked for in a file.
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(folder / "transformer_engine")]
    sys.modules["transformer_engine"] = package
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _framework: None
    del sys.modules["transformer_engine"]
    importlib.import_module("transformer_engine.pytorch")
    sys.modules["transformer_engine"].common = common
    if not hasattr(sys.modules["triton"], "__version__"):
        del sys.modules["triton"]  # torch would take the stand-in for the compiler


# What it imports without using it here. All names of a module that is absent are functions that refuse.
_NOT_NEEDED = (
    "einops",
    "triton",
    "transformer_engine.pytorch.onnx_extensions",
    "transformer_engine.common.triton.cross_entropy",
    "transformer_engine.common.triton.grouped_dbias_dscales",
    "transformer_engine.common.triton.mhc",
    "transformer_engine.common.triton.pad",
    "transformer_engine.common.triton.permutation",
)


def _stand_in(name: str) -> None:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__getattr__ = lambda attribute: _refusing(f"{name}.{attribute}")  # type: ignore[method-assign]
    sys.modules[name] = module


def _refusing(name: str) -> Callable[..., Any]:
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name}: the stub of tests/helpers/te_stub.py does not have it")

    return refuse
