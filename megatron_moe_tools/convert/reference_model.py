"""Run transformers' model of a folder in fp32, as the reference of a comparison. transformers is imported when needed.

No code in the folder is run: the class is named by the family, not by the folder. Weights are read by transformers;
those in fp8, which it reads with further libraries only, are scaled here by a few lines that the converter does not
share.

The norms' epsilons and the rotary frequencies are compared as numbers: logits show a wrong epsilon only where
activations are small, and a wrong frequency only far into a sequence.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.families import Family
from megatron_moe.hf.folder import HFFolder
from megatron_moe.hf.mapping import Mapping
from megatron_moe.model.mla import LatentAttention

FREQUENCY_TOLERANCE = 1e-5
"""Largest relative difference of a rotary frequency: both sides compute them in fp32."""


_ROUTER = "topkrouter"
"""End of the names of router classes in transformers, in lower case."""


@dataclass(frozen=True)
class Constants:
    """The numbers of a model that are no weights.

    Attributes:
        epsilons: epsilons of the norms, by the name of their weight in a folder.
        frequencies: rotary frequencies in radians per position, [pairs].
        amplitude: factor of the rotation. Both are None for a model without a rotary embedding that is known here.
    """

    epsilons: dict[str, float]
    frequencies: Tensor | None
    amplitude: float | None


def reference_constants(model: Any) -> Constants:
    """Return the constants of transformers' model."""
    epsilons = {}
    for name, module in model.named_modules():
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(epsilon, float) and hasattr(module, "weight"):
            epsilons[f"{name}.weight"] = epsilon
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is None:
        return Constants(epsilons, None, None)
    return Constants(epsilons, rotary.inv_freq.detach().float().cpu(), float(rotary.attention_scaling))


def native_constants(chunk: torch.nn.Module, table: Mapping) -> Constants:
    """Return the constants of our whole model."""
    epsilons = {}
    for piece in table.pieces:
        module = chunk.get_submodule(piece.key.rpartition(".")[0])
        if isinstance(epsilon := getattr(module, "eps", None), float):
            epsilons[piece.hf[0]] = epsilon
    latent = next((module for module in chunk.modules() if isinstance(module, LatentAttention)), None)
    if latent is not None and latent.rotary is not None:
        return Constants(epsilons, latent.rotary.frequencies.cpu(), latent.rotary.amplitude)
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if latent is not None or rotary is None:
        return Constants(epsilons, None, None)
    return Constants(epsilons, rotary.inv_freq.detach().float().cpu(), 1.0)


def differences(ours: Constants, theirs: Constants, depths: set[str]) -> Iterator[str]:
    """Yield the differences between two models' constants, in words.

    Args:
        ours: constants of our model.
        theirs: constants of transformers' model.
        depths: names that only ours has: layers of multi-token prediction.
    """
    names = (ours.epsilons.keys() | theirs.epsilons.keys()) - depths
    wrong = [name for name in sorted(names) if ours.epsilons.get(name) != theirs.epsilons.get(name)]
    if wrong:
        name = wrong[0]
        yield (
            f"epsilon of {len(wrong)} norms: {name}: {ours.epsilons.get(name)} here, {theirs.epsilons.get(name)} there"
        )
    if ours.frequencies is None or theirs.frequencies is None:
        if (ours.frequencies is None) != (theirs.frequencies is None):
            yield "rotary frequencies: on one side only"
        return
    if ours.frequencies.shape != theirs.frequencies.shape:
        yield f"rotary frequencies: {len(ours.frequencies)} pairs here, {len(theirs.frequencies)} there"
    elif not torch.allclose(ours.frequencies, theirs.frequencies, rtol=FREQUENCY_TOLERANCE, atol=0.0):
        apart = ((ours.frequencies - theirs.frequencies).abs() / theirs.frequencies).max()
        yield f"rotary frequencies differ by {float(apart):.2e} of their size"
    if ours.amplitude is not None and abs(ours.amplitude - (theirs.amplitude or 0.0)) > FREQUENCY_TOLERANCE:
        yield f"rotary amplitude is {ours.amplitude:.7f} here, {theirs.amplitude:.7f} there"


# The model.


@dataclass
class ReferenceResult:
    """What transformers' model computes from some tokens, on the CPU.

    Attributes:
        logits: [B, S, V] fp32.
        loss: mean cross entropy.
        experts: chosen experts, layer -> [B * S, K] int64.
        weights: their weights, layer -> [B * S, K] fp32.
        grad_norms: name in the folder -> norm of the loss's gradient; None unless asked for.
        constants: epsilons and rotary frequencies.
    """

    logits: Tensor
    loss: float
    experts: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)
    grad_norms: dict[str, float] | None = None
    constants: Constants | None = None


def run_reference(
    folder: HFFolder,
    family: Family,
    tokens: Tensor,
    *,
    layers: int | None = None,
    rounded_to: torch.dtype | None = None,
    gradients: bool = False,
) -> ReferenceResult:
    """Load the folder's model, run it on tokens [B, S] int64 and free it.

    Args:
        folder: the Hugging Face folder.
        family: its family.
        tokens: [B, S] int64.
        layers: number of layers from the first; None: all.
        rounded_to: round the parameters to this dtype first; the router's biases are buffers and stay as they are.
        gradients: compute the norms of the loss's gradient too.

    Raises:
        ConfigError: transformers is missing, or does not load the folder.
    """
    model = load_reference(folder, family, layers)
    try:
        if rounded_to is not None:
            round_parameters(model, rounded_to)
        return run_model(model, tokens, gradients=gradients)
    finally:
        del model
        gc.collect()  # modules and their hooks refer to each other


@torch.no_grad()
def round_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round parameters to the values that another dtype has."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


def run_model(model: Any, tokens: Tensor, *, gradients: bool = False) -> ReferenceResult:
    """Run a causal language model of transformers on tokens [B, S] int64."""
    experts: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith(_ROUTER):
            layer = int(name.split(".layers.")[1].split(".")[0])

            def record(module: Any, inputs: Any, output: Any, layer: int = layer) -> None:
                experts[layer], weights[layer] = _choice(output)

            hooks.append(module.register_forward_hook(record))
    try:
        with torch.set_grad_enabled(gradients):
            logits = model(input_ids=tokens.to(next(model.parameters()).device), use_cache=False).logits.float()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten().to(logits.device))
            if gradients:
                loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    norms = _grad_norms(model) if gradients else None
    return ReferenceResult(logits.detach().cpu(), float(loss), experts, weights, norms, reference_constants(model))


def load_reference(folder: HFFolder, family: Family, layers: int | None = None) -> Any:
    """Return transformers' model of a folder: fp32, evaluation mode, on this machine's device.

    Raises:
        ConfigError: see `run_reference`.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "--verify: transformers is not installed, and it is what the model is compared with; install it with "
            "`pip install transformers`, or leave the flag out"
        ) from None
    content = dict(folder.config)
    content.pop("quantization_config", None)
    if layers is not None:
        total = content["num_hidden_layers"]
        content = {
            key: value[:layers] if isinstance(value, list) and len(value) == total else value
            for key, value in content.items()
        }
        content["num_hidden_layers"] = layers
    try:
        # model_type may be one that transformers does not know, of a class that it does (Kimi-K2).
        config_class = type(transformers.AutoConfig.for_model(family.model_types[0]))
        config = config_class.from_dict({**content, "model_type": family.model_types[0]})
        model_class = getattr(transformers, family.architecture)
        with _quiet(transformers):
            options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
            if folder.scales:
                options = {"state_dict": _dequantised(folder)}
            options |= {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
            where = None if folder.scales else folder.path
            model, info = model_class.from_pretrained(where, output_loading_info=True, **options)
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--verify: transformers {transformers.__version__} does not load {folder.path} as {family.architecture}: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from error
    wrong = [*info["missing_keys"], *(str(entry) for entry in info["mismatched_keys"])]
    if wrong:
        shown = ", ".join(sorted(wrong)[:5])
        raise ConfigError(
            f"--verify: transformers {transformers.__version__} finds no weights in {folder.path} for {len(wrong)} "
            f"tensors of its model: {shown}"
        )
    return model.float().eval().to(platform.device())


def _dequantised(folder: HFFolder) -> dict[str, Tensor]:
    """Return all tensors but scales; a weight in fp8 becomes each number times its block's scale, as bfloat16."""
    found: dict[str, Tensor] = {}
    height, width = folder.block
    for file in sorted({stored.file for stored in folder.tensors.values()}):
        with safe_open(str(folder.path / file), framework="pt") as content:
            found |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  it is no dict
    for name, scale_name in folder.scales.items():
        weight, scale = found[name].float(), found.pop(scale_name).float()
        row = torch.arange(weight.shape[0]) // height
        column = torch.arange(weight.shape[1]) // width
        found[name] = (weight * scale[row][:, column]).bfloat16()
    return found


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence transformers' progress bars and remarks; what matters of them is checked here."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _choice(output: Any) -> tuple[Tensor, Tensor]:
    """Return (experts, weights) of a router's output (logits, weights, experts); older releases leave logits out."""
    indices = [part for part in output if not part.is_floating_point()]
    others = [part for part in output if part.is_floating_point() and part.shape == indices[0].shape]
    return indices[0].detach().long().cpu(), others[-1].detach().float().cpu()


def _grad_norms(model: Any) -> dict[str, float]:
    """Return the norms of the gradients under the folder's names, to which transformers itself converts them back."""
    from transformers.core_model_loading import revert_weight_conversion

    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return {
        name: float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        for name, gradient in revert_weight_conversion(model, gradients).items()
    }
