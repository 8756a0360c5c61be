"""Adapts megatron-core to this machine while it is imported, above all to one without CUDA.

The engine names the device in its source: `device="cuda"`, `tensor.type() == "torch.cuda.FloatTensor"`,
`torch.cuda.current_device()`. On a machine without CUDA, that source runs unchanged because:

1. An import hook maps the constants of `megatron.core` modules as they are loaded (`_CONSTANTS`). The engine's files
   and its .pyc cache stay as published, and there is no cost per operation.
2. torch.cuda functions that raise without a GPU, or queue what is not run, are replaced by their counterparts for the
   CPU (`_replace_torch_cuda_functions`). `torch.cuda.is_available()` stays False.
3. A few engine modules are adjusted right after they are loaded (`_WITHOUT_CUDA`), and `@torch.compile` compiles
   nothing while they are loaded.

With CUDA none of this happens. Independent of the device (`_ALWAYS`), where the engine finds neither Transformer Engine
nor apex it gets the Adam of `adam.py`, because it cannot resume torch's, its recomputation compiles nothing, and its
timers load no TensorBoard. A Transformer Engine or apex that cannot be used is hidden from it (`hardware.py`).

File names below are relative to `megatron/core/` and are those of megatron-core 0.16.1 and 0.19.2. Both releases need
every change but those that name one; without CUDA a change goes when the engine takes its device from a setting. A
spawned child process needs the hook too: it has it as soon as it unpickles anything of this package.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from megatron_moe.engine.patching import replaced

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor
    from torch.distributed import ProcessGroup

_ENGINE = "megatron.core"
_TIMERS, _TENSORBOARD = "megatron.core.timers", "torch.utils.tensorboard"

Adjust = Callable[[ModuleType], None]
Gather = Callable[..., "Tensor"]
Sizes = Sequence[int] | None
_ALWAYS: dict[str, Adjust] = {}
_WITHOUT_CUDA: dict[str, Adjust] = {}
"""Module of the engine -> what adjusts it right after it is loaded."""


def _adjusts(module: str, always: bool = False) -> Callable[[Adjust], Adjust]:
    """Register what adjusts a module of the engine: always, or only without CUDA."""

    def register(adjust: Adjust) -> Adjust:
        (_ALWAYS if always else _WITHOUT_CUDA)[module] = adjust
        return adjust

    return register


def install() -> None:
    """Register the import hook; calling it again changes nothing. Loads neither torch nor the engine.

    Raises:
        ImportError: there is no CUDA device and `megatron.core` is loaded already, so that it is too late to adapt it.
    """
    if any(isinstance(finder, _EngineFinder) for finder in sys.meta_path):
        return
    if _ENGINE in sys.modules:
        if not _has_cuda():
            raise ImportError(
                "megatron.core was imported before megatron_moe, and without a CUDA device it can only be adapted "
                "while it is being imported: put `import megatron_moe` before the first import of megatron.core"
            )
        for name, adjust in _ALWAYS.items():
            if name in sys.modules:
                adjust(sys.modules[name])
    sys.meta_path.insert(0, _EngineFinder())


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


class _EngineFinder(importlib.abc.MetaPathFinder):
    """A finder of `megatron.core` modules that asks the other finders and has `_EngineLoader` load what they find."""

    def __init__(self) -> None:
        self._without_cuda: bool | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _ENGINE and not fullname.startswith(_ENGINE + "."):
            return None
        if self._without_cuda is None:
            from megatron_moe.platform.hardware import hide_unusable

            self._without_cuda = not _has_cuda()
            _silence_notices(self._without_cuda)
            hide_unusable(cuda=not self._without_cuda)
            if self._without_cuda:
                _replace_torch_cuda_functions()
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if type(spec.loader) is importlib.machinery.SourceFileLoader:
                    spec.loader = _EngineLoader(fullname, spec.loader.path, self._without_cuda)
                return spec
        return None


class _EngineLoader(importlib.machinery.SourceFileLoader):
    """A loader of an engine module that maps its constants (without CUDA), runs it, and adjusts it."""

    def __init__(self, fullname: str, path: str, without_cuda: bool) -> None:
        super().__init__(fullname, path)
        self._without_cuda = without_cuda

    def get_code(self, fullname: str) -> CodeType | None:
        with warnings.catch_warnings():  # invalid escapes in its docstrings, reported where there is no .pyc yet
            warnings.simplefilter("ignore", SyntaxWarning)
            code = super().get_code(fullname)  # reads and writes the .pyc, which therefore stays as published
        return _map_constants(code) if self._without_cuda and code is not None else code

    def exec_module(self, module: ModuleType) -> None:
        # timers.py imports torch's writer for TensorBoard for the class of what it may be given, which costs every
        # process a quarter of a second: the import fails, unless it is loaded already.
        hidden = module.__name__ == _TIMERS and _TENSORBOARD not in sys.modules
        if hidden:
            sys.modules[_TENSORBOARD] = None  # type: ignore[assignment]
        try:
            with _nothing_compiled() if self._without_cuda else nullcontext():
                super().exec_module(module)
        finally:
            if hidden:
                del sys.modules[_TENSORBOARD]
        if module.__name__ in _ALWAYS:
            _ALWAYS[module.__name__](module)
        if self._without_cuda and module.__name__ in _WITHOUT_CUDA:
            _WITHOUT_CUDA[module.__name__](module)


def _nothing_compiled() -> AbstractContextManager[None]:
    """Return a block in which `@torch.compile` returns functions as they are.

    The import of the compiler alone takes more than a second per process.
    """
    import torch

    def uncompiled(model: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
        return model if model is not None else lambda function: function

    return replaced([torch], compile=uncompiled)


# "cuda": device literals in schedules.py, clip_grads.py, optimizer.py, grad_scaler.py, tensor_parallel/data.py,
#   transformer/utils.py, utils.py, exchange_utils.py, state_dict_saver.py, rerun_state_machine.py,
#   param_and_grad_buffer.py, and custom_fwd's device_type in tensor_parallel/layers.py.
# "torch.cuda.*Tensor": tests of tensor.type() in distrib_optimizer.py, optimizer.py and clip_grads.py.
_CONSTANTS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


def _map_constants(constant: Any) -> Any:
    """Return a constant, as the code of a module or a function, with `_CONSTANTS` applied to all within."""
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=tuple(map(_map_constants, constant.co_consts)))
    if isinstance(constant, tuple):
        return tuple(map(_map_constants, constant))
    return _CONSTANTS.get(constant, constant) if isinstance(constant, str) else constant


def _replace_torch_cuda_functions() -> None:
    """Replace torch.cuda functions that raise without a GPU, or whose calls are queued for one."""
    import torch

    class Stream(torch.cpu.Stream):
        """A stream without a queue, for the engine's dispatcher (transformer/moe/token_dispatcher.py)."""

        record_event = staticmethod(torch.cpu.Event)  # type: ignore[assignment]

    cpu = torch.device("cpu")
    # Device of buffers everywhere: param_and_grad_buffer.py, p2p_communication.py, tensor_parallel/mappings.py,
    # rotary_pos_embedding.py, distrib_optimizer.py, grad_scaler.py, timers.py, state_dict_saver.py.
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    # p2p_communication.py, timers.py, filesystem_async.py, async_utils.py, fully_parallel.py.
    torch.cuda.synchronize = lambda device=None: None
    # 0.19.2: param_and_grad_buffer.py asks for the stream before every gradient reduction.
    torch.cuda.current_stream = lambda device=None: torch.cpu.current_stream()  # type: ignore[assignment, return-value]
    torch.cuda.Stream = Stream  # type: ignore[assignment, misc]
    # tensor_parallel/random.py (seeding the tracker) and rerun_state_machine.py: one generator, the CPU's.
    torch.cuda.get_rng_state = lambda device="cpu": torch.get_rng_state()
    torch.cuda.set_rng_state = lambda new_state, device="cpu": torch.set_rng_state(new_state)
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)  # type: ignore[assignment]
    # grad_scaler.py, distrib_optimizer.py, tensor_parallel/data.py, utils.py, exchange_utils.py.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]


@_adjusts("megatron.core.tensor_parallel.random")
def _adjust_random(module: ModuleType) -> None:
    """Adjust tensor_parallel/random.py: states go to the CPU generator; stock `_set` queues a call that is not run."""
    import torch

    vars(module).update(
        _get_cuda_rng_state=lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state(),
        _set_cuda_rng_state=lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
    )


@_adjusts("megatron.core.tensor_parallel.random", always=True)
def _adjust_recomputation(module: ModuleType) -> None:
    """Adjust tensor_parallel/random.py: recomputed outputs get their storage back without a compiler.

    0.19.2 alone compiles a C++ extension for it at the first recomputation. Every node would need ninja and g++, and
    torch's lock file around the build outlives a job that is killed: later jobs would wait for it without end. Copying,
    as 0.16.1 does, needs the memory of one output twice for a moment.
    """

    def copy_storage(target: Tensor, source: Tensor) -> None:
        target.untyped_storage().resize_(source.untyped_storage().nbytes())
        target.untyped_storage().copy_(source.untyped_storage())

    if hasattr(module, "_get_share_storage"):
        vars(module).update(_get_share_storage=lambda: copy_storage)
    # `fp8 is not None` is tested where the default is False, which asks for Transformer Engine: recomputed norms, MLA.
    module.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


@_adjusts("megatron.core.models.common.embeddings.rope_utils")
def _adjust_rope(module: ModuleType) -> None:
    """Adjust models/common/embeddings/rope_utils.py: the stock function pins memory, which needs a GPU (CP only)."""

    def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: ProcessGroup) -> Tensor:
        """Return chunks r and 2n-1-r of 2n along `seq_dim`, for rank r of the n ranks of `cp_group`."""
        chunks = pos_emb.chunk(2 * cp_group.size(), dim=seq_dim)
        return module.torch.cat((chunks[cp_group.rank()], chunks[-1 - cp_group.rank()]), dim=seq_dim)

    vars(module).update(get_pos_emb_on_this_cp_rank=get_pos_emb_on_this_cp_rank)


@_adjusts("megatron.core.tensor_parallel.layers")
def _adjust_layers(module: ModuleType) -> None:
    """Adjust tensor_parallel/layers.py: half-precision products where the processor has no instructions for them.

    The engine's functions are replaced where they are plain products; with communication in it, one stays as it is. The
    second one is for frozen weights.
    """
    from megatron_moe.platform import cpu_half_gemm

    def adjusted(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)  # with its attributes: the function looks one of them up under its own name
        def linear(input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **options: Any) -> Any:
            communicates = options.get("allreduce_dgrad") or options.get("sequence_parallel")
            if args or communicates or bias is not None or not cpu_half_gemm.multiply_in_fp32(input):
                return stock(input, weight, bias, *args, **options)
            return cpu_half_gemm.linear(input, weight)

        return linear

    for name in ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"):
        vars(module)[name] = adjusted(vars(module)[name])


@_adjusts("megatron.core.distributed.param_and_grad_buffer")
def _adjust_buffers(module: ModuleType) -> None:
    """Adjust distributed/param_and_grad_buffer.py: nothing is sent within a group of one rank.

    gloo copies a whole bucket of gradients, or of weights, to add up or gather the parts of one rank. They are in
    their place already: the rank's part is the bucket itself.
    """

    def adjusted(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def collective(output: Tensor, input: Tensor, *, group: ProcessGroup, **options: Any) -> Any:
            if group.size() == 1 and output.data_ptr() == input.data_ptr():
                return None
            return stock(output, input, group=group, **options)

        return collective

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        vars(module)[name] = adjusted(vars(module)[name])


@_adjusts("megatron.core.transformer.moe.moe_utils")
def _adjust_moe_utils(module: ModuleType) -> None:
    """Adjust transformer/moe/moe_utils.py, for the engine's own MoE layer, with which ours is compared."""

    def maybe_move_tensor_to_cpu(tensor: Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Return an array: stock makes one only of what it moved, and all_to_all_single takes no tensor."""
        return tensor.numpy() if as_numpy and module.torch.is_tensor(tensor) else tensor

    vars(module).update(maybe_move_tensor_to_cpu=maybe_move_tensor_to_cpu)
    # 0.16.1 alone does not define this name where Transformer Engine is absent, and then tests it.
    vars(module).setdefault("te_general_gemm", None)


@_adjusts("megatron.core.optimizer", always=True)
@_adjusts("megatron.core.optimizer.distrib_optimizer", always=True)
def _adjust_optimizer(module: ModuleType) -> None:
    """Adjust optimizer/__init__.py and distrib_optimizer.py: our Adam where they fell back to torch's.

    It is called in the way of apex's, and its step is in the parameter group, as apex's is. Until torch's can be
    resumed (defect S7).
    """
    from megatron_moe.engine.adam import Adam

    if getattr(module, "USING_PYTORCH_OPTIMIZER", False):
        vars(module).update(Adam=Adam, USING_PYTORCH_OPTIMIZER=False)
    elif not getattr(module, "HAVE_APEX_OR_TE", True):
        vars(module).update(Adam=Adam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)


@_adjusts("megatron.core.jit")
def _adjust_jit(module: ModuleType) -> None:
    """Adjust jit.py: torch.compile needs a C++ compiler and seconds per process, for element-wise functions."""
    module.disable_jit_fuser()


class _OfTensorboard(type):
    """A class whose instances are torch's writers for TensorBoard. There are none while their module is not loaded."""

    def __instancecheck__(cls, writer: object) -> bool:
        loaded = sys.modules.get(_TENSORBOARD)
        return loaded is not None and isinstance(writer, loaded.SummaryWriter)


@_adjusts(_TIMERS, always=True)
def _adjust_timers(module: ModuleType) -> None:
    """Adjust timers.py: it knows a writer for TensorBoard without having imported its class."""
    vars(module).update(SummaryWriter=_OfTensorboard("SummaryWriter", (), {}))


# Notices of the engine and of torch that are left out of a run's log. They appear at every start, about the engine's
# own code or about GPU libraries where there is no GPU: the reader of a run's log cannot act on them. Each is (module
# that logs, start of the message).
_NOTICES = (
    ("megatron.core.transformer.transformer_config", "full scope is deprecated"),  # its own default
    ("megatron.core.models.mimo.config.base_configs", "MimoModelConfig is experimental"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),  # 0.19.2 alone, as the next
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel: full_param_layout not provided"),
    ("megatron.core.optimizer.optimizer", "The .grad attribute of a Tensor that is not a leaf"),  # it tests views
    ("torch.distributed.c10d_logger", "`torch.distributed.reduce_scatter_tensor` is deprecated"),
    ("torch.distributed.c10d_logger", "`torch.distributed.all_gather_into_tensor` is deprecated"),
)
_NO_LIBRARY = "Transformer Engine and Apex are not installed"
_NOTICES_ABOUT_GPU_LIBRARIES = (
    ("megatron.core.optimizer", _NO_LIBRARY),
    ("megatron.core.optimizer.optimizer", _NO_LIBRARY),
    ("megatron.core.optimizer.clip_grads", _NO_LIBRARY),
    ("megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision", _NO_LIBRARY),
    ("megatron.core.models.backends", "Apex is not installed"),
    ("megatron.core.models.gpt.gpt_layer_specs", "Apex is not installed"),
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),  # 0.19.2 imports it
    # The random state tracker moves the CPU generator, as it should here; stock warns at every dropout.
    ("megatron.core.tensor_parallel.random", "CPU RNG state changed within GPU RNG context"),
)


def _silence_notices(without_cuda: bool) -> None:
    """Drop the notices, as warnings and as log records; with CUDA, keep those about GPU libraries."""
    for module, text in _NOTICES + (_NOTICES_ABOUT_GPU_LIBRARIES if without_cuda else ()):
        warnings.filterwarnings("ignore", message=re.escape(text), module=re.escape(module))
        logging.getLogger(module).addFilter(_OtherThan(text))


class _OtherThan(logging.Filter):
    """Lets records pass whose message does not start with a text."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.name)


# ---- The engine's own layers, which a run of ours has in other forms.


@contextmanager
def its_own_layers_run() -> Iterator[None]:
    """Return a block in which the engine's model can be built and run without Transformer Engine, and with gloo.

    torch's norm refuses sequence parallelism (transformer/torch_norm.py), and does not mark its weight for the sum over
    TP ranks as Transformer Engine's does. gloo exchanges no parts of different sizes (tensor_parallel/mappings.py).
    Latent attention tells its core the sizes of keys and values, which only Transformer Engine's takes; values have the
    size that the core expects, `kv_channels`. Its whole projections are not found without Transformer Engine, which
    release 0.16.1 takes for present there.
    """
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    parts = {
        "_gather_along_first_dim": functools.partial(_gathered_parts, gather),
        "_reduce_scatter_along_first_dim": functools.partial(_scattered_parts, scatter),
    }
    core = functools.partialmethod(_core_of_latent_attention, DotProductAttention.__init__)
    with (
        replaced([WrappedTorchNorm], __new__=_marked_norm),
        replaced([mappings], **parts),
        replaced([DotProductAttention], __init__=core),
        replaced([multi_latent_attention], HAVE_TE=False, Linear=Linear),
    ):
        yield


def _marked_norm(
    _: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **__: object
) -> torch.nn.Module:
    import torch

    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm = kind(hidden_size, eps=eps)
    for weight in norm.parameters():
        weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # a mark that the engine reads
    return norm


def _core_of_latent_attention(
    core: torch.nn.Module,
    stock: Callable[..., None],
    *given: object,
    k_channels: int | None = None,
    v_channels: int | None = None,
    **named: object,
) -> None:
    stock(core, *given, **named)


def _gathered_parts(stock: Gather, own: Tensor, group: ProcessGroup, sizes: Sizes = None, *rest: bool) -> Tensor:
    import torch

    if sizes is None:
        return stock(own, group, None, *rest)
    found = own.new_zeros(sum(sizes), *own.shape[1:])
    found.split(list(sizes))[group.rank()].copy_(own)
    torch.distributed.all_reduce(found, group=group)
    return found


def _scattered_parts(stock: Gather, own: Tensor, group: ProcessGroup, sizes: Sizes = None, *rest: bool) -> Tensor:
    import torch

    if sizes is None:
        return stock(own, group, None, *rest)
    total = own.clone()
    torch.distributed.all_reduce(total, group=group)
    return total.split(list(sizes))[group.rank()].clone()
