"""Compare what a checkpoint computes with what transformers computes from its folder, in fp32 on random tokens.

transformers' model runs first, then ours, so that one of them is in memory at a time. Scores of two implementations
differ in their last bits: where two experts, or two groups of them, have almost the same score, the implementations may
choose differently, and everything computed after that differs by much more than bits. So ours follows the reference in
such a tie, and the tie is counted; a choice that differs by more is an error. Logits and loss can then be compared.

No code in the folder is run: the class of the reference is named by the family, not by the folder. Weights are read by
transformers; those in fp8, which it reads with further libraries only, are scaled here by a few lines that the
converter does not share. The norms' epsilons and the rotary frequencies are compared as numbers: logits show a wrong
epsilon only where activations are small, and a wrong frequency only far into a sequence.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.rotary import amplitude
from megatron_moe.hf.family import Family
from megatron_moe.hf.folder import ALLOW, HFFolder
from megatron_moe.model.mla import LatentAttention
from megatron_moe.model.rotary import Rotation
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.router import TopKRouter
from megatron_moe.moe.routing import Choice, MicroBatch, group_scores, ranked_values
from megatron_moe_tools.models.load_model import LoadedCheckpoint, bytes_needed, load_model, one_process, require_memory
from megatron_moe_tools.models.source import ModelSource, locate
from megatron_moe_tools.models.trace import trace, working_bytes

if TYPE_CHECKING:  # it is imported when a model is loaded
    from transformers import PreTrainedModel

TIE = 1e-4
"""Largest difference of two experts' scores that counts as a tie."""
TOKENS = (2, 64)
"""Number of sequences, and of tokens of each."""
LOGIT_TOLERANCE = 1e-4
"""Largest difference of logits whose absolute values are at most 10; larger logits have a proportional tolerance."""
LOSS_TOLERANCE = 1e-5
"""Largest difference of losses of at most 1; relative to larger ones."""
WEIGHT_TOLERANCE = 1e-4
"""Largest relative difference of an expert's weight."""
SEED = 1234
"""Seed of the tokens."""
FREQUENCY_TOLERANCE = 1e-5
"""Largest relative difference of a rotary frequency: both sides compute them in fp32."""


# ---- The reference.


@dataclass(frozen=True)
class ReferenceResult:
    """What transformers' model computes from some tokens, on the CPU, and its numbers that are no weights.

    logits: [B, S, V] fp32. loss: mean cross entropy. experts: chosen ones, layer -> [B * S, K] int64. weights: theirs,
    layer -> [B * S, K] fp32. epsilons: of the norms, by the name of their weight behind the model's prefix.
    frequencies: rotary, in radians per position, [pairs]. amplitude: factor of the rotation; both are None without a
    known rotary embedding.
    """

    logits: Tensor
    loss: float
    experts: dict[int, Tensor]
    weights: dict[int, Tensor]
    epsilons: dict[str, float]
    frequencies: Tensor | None = None
    amplitude: float | None = None


@torch.no_grad()
def round_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round parameters to the values that another dtype has; the router's biases are not trained and stay."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(parameter.to(dtype))


@torch.no_grad()
def run_model(model: PreTrainedModel, tokens: Tensor) -> ReferenceResult:
    """Run a causal language model of transformers on tokens [B, S] int64."""
    experts: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    epsilons: dict[str, float] = {}
    hooks = []
    language = getattr(model.model, "language_model", model.model)
    for name, module in language.named_modules():  # and not those of what sees, which are not here
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(epsilon, float) and hasattr(module, "weight"):
            epsilons[f"{name}.weight"] = epsilon
        if not type(module).__name__.lower().endswith(("topkrouter", "moev1gate")):
            continue

        def record(
            module: object, inputs: object, output: tuple[Tensor, ...], layer: int = _layer_of(f".{name}")
        ) -> None:
            # (logits, weights, experts); older releases leave logits out
            (chosen,) = [part for part in output if not part.is_floating_point()]
            others = [part for part in output if part.is_floating_point() and part.shape == chosen.shape]
            experts[layer], weights[layer] = chosen.long().cpu(), others[-1].float().cpu()

        hooks.append(module.register_forward_hook(record))
    try:
        logits = model(input_ids=tokens.to(next(model.parameters()).device), use_cache=False).logits.float().cpu()
    finally:
        for hook in hooks:
            hook.remove()
    loss = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
    if (rotary := getattr(language, "rotary_emb", None)) is None:
        return ReferenceResult(logits, loss, experts, weights, epsilons)
    frequencies, amplitude = rotary.inv_freq.float().cpu(), float(rotary.attention_scaling)
    return ReferenceResult(logits, loss, experts, weights, epsilons, frequencies, amplitude)


def reference_class(family: Family) -> Any:
    """Return transformers' class of a family. Raises ConfigError: it has none."""
    import transformers

    # transformers may spell the class that a published folder names otherwise (Kimi-K2.5).
    for name in (family.architecture, *family.classes):
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise ConfigError(
        f"--verify: transformers {transformers.__version__} has no {family.architecture} to compare with; leave it out"
    )


def load_reference(folder: HFFolder, family: Family, layers: int | None = None) -> PreTrainedModel:
    """Return transformers' model of a folder's first layers: fp32, evaluation mode. Raises ConfigError: it fails."""
    import transformers

    transformers.utils.logging.set_verbosity_error()  # what matters of its remarks is checked here
    transformers.utils.logging.disable_progress_bar()
    content = dict(folder.config)
    content.pop("quantization_config", None)
    if layers is not None:
        text = dict(content if family.text is None else content[family.text])
        total = text["num_hidden_layers"]
        for key, value in text.items():
            if isinstance(value, list) and len(value) == total:
                text[key] = value[:layers]
        text["num_hidden_layers"] = layers
        content |= text if family.text is None else {family.text: text}
    model_class = reference_class(family)
    try:
        # model_type may be one that transformers does not know, of a class that it does (Kimi-K2).
        config_class = type(transformers.AutoConfig.for_model(family.model_types[0]))
        config = config_class.from_dict({**content, "model_type": family.model_types[0]})
        options: dict[str, Any] = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
        if folder.scales:
            where, options["state_dict"] = None, _dequantised(folder)
        else:
            where, options["local_files_only"], options["use_safetensors"] = folder.path, True, True
        model, info = model_class.from_pretrained(where, output_loading_info=True, **options)
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--verify: transformers {transformers.__version__} does not load {folder.path} as {family.architecture}: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from error
    wrong = [*info["missing_keys"], *map(str, info["mismatched_keys"])]
    if wrong:
        shown = ", ".join(sorted(wrong)[:5])
        raise ConfigError(
            f"--verify: transformers {transformers.__version__} finds no weights in {folder.path} for {len(wrong)} "
            f"tensors of its model: {shown}"
        )
    return model.float().eval().to(platform.device())


def _dequantised(folder: HFFolder) -> dict[str, Tensor]:
    """Return all tensors but scales; a weight in fp8 or MXFP4 becomes number times scale, as bfloat16."""
    found: dict[str, Tensor] = {}
    height, width = folder.block
    for file in set(map(operator.attrgetter("file"), folder.tensors.values())):
        found |= load_file(folder.path / file)
    for name, scale_name in folder.scales.items():
        if name not in found:  # MXFP4
            codes, exponents = found.pop(f"{name}_blocks"), found.pop(scale_name)
            pairs = torch.stack((codes % 16, codes // 16), dim=-1).flatten(-2).long()
            halves = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])[pairs]
            values = halves * 2.0 ** (exponents.double().unsqueeze(-1) - 128)
            found[name] = values.flatten(-2).transpose(1, 2).bfloat16().contiguous()
            continue
        weight, scale = found[name].float(), found.pop(scale_name).float()
        row = torch.arange(weight.shape[0]) // height
        column = torch.arange(weight.shape[1]) // width
        found[name] = (weight * scale[row][:, column]).bfloat16()
    return found


# ---- The comparison.


@dataclass(frozen=True)
class LayerChoices:
    """A comparison of one layer's choices of experts, in tokens.

    equal: with the same experts. ties: with others, within the margin of a tie. largest_margin: of a choice that
    differs. weight_difference: largest relative difference of the weights of the same experts.
    """

    tokens: int
    equal: int
    ties: int
    largest_margin: float
    weight_difference: float


@dataclass(frozen=True)
class Parity:
    """The result of a comparison of two implementations on `shape` random tokens, through `layers` layers.

    logit_difference: the largest. largest_logit: absolute, of the reference. choices: of experts, by layer. failures:
    what is out of tolerance, in words. not_covered: what was not compared.
    """

    seed: int
    shape: tuple[int, int]
    layers: int
    logit_difference: float
    largest_logit: float
    loss: float
    reference_loss: float
    choices: dict[int, LayerChoices]
    failures: tuple[str, ...]
    not_covered: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything is within tolerance."""
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values for a certificate."""
        return {**asdict(self), "passed": self.passed}

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        compared = equal = ties = 0
        for one in self.choices.values():
            compared, equal, ties = compared + one.tokens, equal + one.equal, ties + one.ties
        outcome = "passed" if self.passed else "FAILED"
        return [
            f"parity with transformers, {self.shape[0]} x {self.shape[1]} random tokens through {self.layers} layers: "
            f"{outcome}",
            f"  logits differ by {self.logit_difference:.2e} at most, the largest is {self.largest_logit:.1f}",
            f"  loss {self.loss:.6f}, transformers {self.reference_loss:.6f}",
            *([f"  experts: {equal} of {compared} choices equal, {ties} ties"] if self.choices else []),
            *map("  FAILED: {}".format, self.failures),
            *map("  not covered: {}".format, self.not_covered),
        ]


def compare(
    hf_path: Path,
    native_path: Path,
    *,
    layers: int | None = None,
    batch: int = TOKENS[0],
    length: int = TOKENS[1],
    ckpt_step: int | None = None,
    allow_constant: bool = False,
) -> Parity:
    """Run transformers on a Hugging Face folder and our model on a checkpoint, on the same random tokens.

    Where the two were stored in different dtypes, each side's weights are rounded to the other's first. layers: both
    sides are cut to so many; None: all. batch, length: sequences, and tokens of each; fewer if the model has fewer
    positions. ckpt_step: of a run's folder; None: the newest. allow_constant: pass although the logits are the same for
    all tokens, which compares hardly any weight. Raises ConfigError: transformers does not know the model, a side
    cannot be opened, or there is not enough memory.
    """
    folder, reference_source, source = HFFolder.open(hf_path), locate(hf_path), locate(native_path, ckpt_step)
    run, total, least = source.run, source.run.model.num_layers, _fewest_layers(source)
    if layers is not None and not least <= layers <= total:
        raise ConfigError(
            f"--verify-layers {layers}: the model has {total} layers, and the kinds of all are in the first {least}; "
            f"between {least} and {total} are compared"
        )
    length = min(length, run.derived.max_position_embeddings)
    tokens = torch.randint(0, run.model.vocab_size or 0, (batch, length), generator=torch.Generator().manual_seed(SEED))
    require_memory_to_verify(source, layers, fp8=bool(folder.scales), tokens=tokens.shape)
    model = load_reference(folder, reference_source.family, layers)
    if differ := source.dtype != reference_source.dtype:
        round_parameters(model, getattr(torch, source.dtype))
    reference = run_model(model, tokens)
    del model
    gc.collect()  # modules refer to each other
    with load_model(source, layers=layers) as found:
        if differ:
            round_parameters(found.chunk, getattr(torch, reference_source.dtype))
        return compare_with(reference, found, tokens, allow_constant=allow_constant)


def compare_with(
    reference: ReferenceResult, found: LoadedCheckpoint, tokens: Tensor, *, allow_constant: bool = False
) -> Parity:
    """Run our model on the tokens [B, S] of a reference and compare the two."""
    with force_routing_on_ties(found.chunk, reference.experts, tokens.shape[0]) as margins:
        ours = trace(found, tokens, routing=True)
    layers, loss = found.run.model.num_layers, float(ours.loss)
    choices, failures = {}, []
    mine, theirs = sorted(ours.routing.keys() & set(range(layers))), sorted(reference.experts)
    if theirs and mine != theirs:
        failures.append(f"layers with experts are {mine} here, {theirs} there")
    for layer in sorted(ours.routing.keys() & reference.experts.keys()):
        here, there, margin = ours.routing[layer], reference.experts[layer], margins[layer]
        if here.topk_idx.shape != there.shape:
            choices[layer] = LayerChoices(len(here.topk_idx), 0, 0, 0.0, 0.0)
            failures.append(f"layer {layer}: {here.topk_idx.shape[-1]} experts per token here, {there.shape[-1]} there")
            continue
        same = (here.topk_idx.sort(dim=-1).values == there.sort(dim=-1).values).all(-1)
        weights, wanted, apart = here.probs.gather(1, there)[same], reference.weights[layer][same], 0.0
        if len(wanted):
            apart = _largest((weights - wanted).abs() / wanted.abs().clamp(min=float(wanted.abs().max()) * 1e-2))
        ties = sum(map(TIE.__ge__, margin))
        one = LayerChoices(len(same), int(same.sum()) - ties, ties, max(margin, default=0.0), apart)
        choices[layer] = one
        if one.equal + one.ties < one.tokens:
            failures.append(
                f"layer {layer}: {one.tokens - one.equal - one.ties} of {one.tokens} tokens go to other experts, by "
                f"margins up to {one.largest_margin:.2e}; a tie is {TIE:.0e}"
            )
        elif one.weight_difference > WEIGHT_TOLERANCE:
            failures.append(f"layer {layer}: weights of the same experts differ by {apart:.2e} of their size")

    vocab_size = min(ours.logits.shape[-1], reference.logits.shape[-1])
    difference = _largest(ours.logits[..., :vocab_size] - reference.logits[..., :vocab_size])
    largest = float(reference.logits.abs().max())
    allowed = LOGIT_TOLERANCE * max(1.0, largest / 10)
    if ours.logits.shape != reference.logits.shape:
        failures.append(f"logits: {list(ours.logits.shape)} here, {list(reference.logits.shape)} there")
    if not difference <= allowed:
        failures.append(f"logits differ by {difference:.2e}, more than {allowed:.1e}")
    if not abs(loss - reference.loss) <= LOSS_TOLERANCE * max(1.0, abs(reference.loss)):
        failures.append(f"losses are {loss:.7f} here, {reference.loss:.7f} there")
    rows = reference.logits.flatten(0, 1)
    if not allow_constant and (bool((rows == rows[:1]).all()) or bool((rows == rows[:, :1]).all())):
        failures.append(
            f"logits are the same for all tokens ({float(rows[0, 0]):.4g}): the weights that make them are damaged or "
            f"were never trained, and equal logits show nothing; {ALLOW} passes that"
        )
    failures += _other_constants(found, reference, tokens.shape[1])
    whole, not_covered = found.source.run.model, []
    if whole.mtp_num_layers:
        not_covered.append(f"multi-token prediction, {whole.mtp_num_layers} layers: transformers has none")
    if layers < whole.num_layers:
        not_covered.append(f"layers {layers} to {whole.num_layers - 1}: left out by --verify-layers {layers}")
    every, chosen = (found.run.moe.num_experts or 0) * len(reference.experts), 0
    for experts in reference.experts.values():
        chosen += len(experts.unique())
    if chosen < every:
        not_covered.append(f"the weights of {every - chosen} of {every} experts, which none of the tokens chose")
    if not reference.experts and found.run.moe.num_experts is not None:
        not_covered.append("the experts chosen: this release of transformers has no routers of their own to ask")
    return Parity(
        seed=SEED,
        shape=(tokens.shape[0], tokens.shape[1]),
        layers=layers,
        logit_difference=difference,
        largest_logit=largest,
        loss=loss,
        reference_loss=reference.loss,
        choices=choices,
        failures=tuple(failures),
        not_covered=tuple(not_covered),
    )


def _other_constants(found: LoadedCheckpoint, theirs: ReferenceResult, length: int) -> Iterator[str]:
    """Yield the differences between two models' numbers that are no weights; depths of prediction are ours alone.

    length: of the sequences that transformers' model was run on.
    """
    chunk, epsilons, prefix = found.chunk, {}, found.source.family.names.model
    for piece in found.mapping.pieces:
        epsilon = getattr(chunk.get_submodule(piece.key.rpartition(".")[0]), "eps", None)
        if isinstance(epsilon, float) and _layer_of(piece.hf[0]) < found.run.model.num_layers:
            epsilons[piece.hf[0].removeprefix(prefix)] = epsilon
    wrong = sorted(dict(epsilons.items() ^ theirs.epsilons.items()))
    if wrong:
        here, there = epsilons.get(wrong[0]), theirs.epsilons.get(wrong[0])
        yield f"epsilon of {len(wrong)} norms: {prefix}{wrong[0]}: {here} here, {there} there"
    latent = next((module for module in chunk.modules() if isinstance(module, LatentAttention)), None)
    rotary = getattr(chunk, "rotary_pos_emb", None) if latent is None else latent.rotary
    wanted = theirs.frequencies
    if rotary is None or wanted is None:
        if rotary is not wanted:
            yield "rotary frequencies: on one side only"
        return
    rotation: Rotation = rotary.rotation
    ours, factor = rotation.frequencies(length), amplitude(rotation.model)
    if ours.shape != wanted.shape:
        yield f"rotary frequencies: {len(ours)} pairs here, {len(wanted)} there"
    elif not torch.allclose(ours, wanted, rtol=FREQUENCY_TOLERANCE, atol=0.0):
        yield f"rotary frequencies differ by {float(((ours - wanted).abs() / wanted).max()):.2e} of their size"
    if abs(factor - (theirs.amplitude or 0.0)) > FREQUENCY_TOLERANCE:
        yield f"rotary amplitude is {factor:.7f} here, {theirs.amplitude:.7f} there"


def _layer_of(name: str) -> int:
    """Return the number of the layer that a tensor or a module is in, by its name in a folder; 0 outside of layers."""
    return int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else 0


def _largest(values: Tensor) -> float:
    """Return the largest absolute value; infinite where there is a NaN, which no comparison would notice."""
    return float(torch.nan_to_num(values, nan=torch.inf, posinf=torch.inf, neginf=torch.inf).abs().max())


def _fewest_layers(source: ModelSource) -> int:
    """Return the number of layers up to the first with experts, if any."""
    pattern = source.run.derived.moe_layer_pattern
    return pattern.index(1) + 1 if 1 in pattern else 1


def require_memory_to_verify(
    source: ModelSource, layers: int | None, *, fp8: bool = False, tokens: Sequence[int] = TOKENS
) -> None:
    """Check, before anything is loaded, that either model fits into memory. Raises ConfigError: it does not."""
    run, width = one_process(source.run, layers=layers), 4 + 2 * fp8  # with fp8, bfloat16 is in memory beside fp32
    working = 2 * working_bytes(run, tokens[0], tokens[1], False)
    least, fitting = _fewest_layers(source), (layers or source.run.model.num_layers) - 1
    available = platform.available_memory_bytes()
    while fitting >= least and bytes_needed(one_process(source.run, layers=fitting), width, working) > available:
        fitting -= 1
    remedy = f"--verify-layers {fitting} compares as many as fit; or leave the verification out"
    if fitting < least:
        remedy = f"not even the first {least} layers would fit; leave the verification out"
    require_memory(source, run, width, working, remedy)


# ---- Ties between experts.


@contextmanager
def force_routing_on_ties(
    chunk: torch.nn.Module, experts: dict[int, Tensor], num_sequences: int
) -> Iterator[dict[int, list[float]]]:
    """Have the routers take given choices, layer -> [B * S, K], in place of their own where the two differ by a tie.

    Yields layer -> the margins of the choices that differ.
    """
    margins: dict[int, list[float]] = {}
    before: list[tuple[TopKRouter, Choice | None]] = []

    def wrapped(router: TopKRouter, theirs: Tensor, found: list[float]) -> Callable[..., Tensor]:
        choose = router.choice()

        def chosen(logits: Tensor, scores: Tensor, expert_bias: Tensor | None, micro_batch: MicroBatch) -> Tensor:
            ours = choose(logits, scores, expert_bias, micro_batch)
            wanted = theirs.unflatten(0, (num_sequences, -1)).transpose(0, 1).flatten(0, 1).to(ours.device)
            if wanted.shape != ours.shape or int(wanted.max()) >= scores.shape[-1]:
                return ours  # the comparison of shapes reports it
            differs = (wanted.sort(dim=-1).values != ours.sort(dim=-1).values).any(-1)
            ranked = ranked_values(logits, scores, router.options).detach()
            margin = choice_margin(ranked, expert_bias, router.options, wanted)
            found.extend(margin[differs].tolist())
            return torch.where((differs & (margin <= TIE)).unsqueeze(-1), wanted, ours)

        return chosen

    for router in chunk.modules():
        if isinstance(router, TopKRouter) and (layer := (router.layer_number or 0) - 1) in experts:
            before.append((router, router.choose))
            router.choose = wrapped(router, experts[layer], margins.setdefault(layer, []))
    try:
        yield margins
    finally:
        for router, choose in before:
            router.choose = choose


def choice_margin(scores: Tensor, expert_bias: Tensor | None, options: MoEOptions, wanted: Tensor) -> Tensor:
    """Return [T], by how much scores would have to change for a choice to be the best one; 0 where it is.

    scores: [T, E], what the router ranks by before its bias. expert_bias: [E], or None. wanted: the choice [T, K].
    """
    scores = scores if expert_bias is None else scores + expert_bias.to(scores.dtype)
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, wanted, True)
    pool, margin = torch.ones_like(inside), scores.new_zeros(scores.shape[0])
    if options.num_groups is not None and options.group_topk is not None:
        grouped = scores.unflatten(-1, (options.num_groups, -1))
        best = group_scores(scores, options)
        used = inside.unflatten(-1, (options.num_groups, -1)).any(-1)
        last = best.topk(options.group_topk, dim=-1).values[:, -1:]
        margin = (last - best).masked_fill(~used, 0.0).amax(-1).clamp(min=0.0)
        # A group's experts are available where it is used, or ahead of the first group left out by more than a tie.
        is_all = options.group_topk == options.num_groups
        out = best.topk(options.group_topk + (not is_all), dim=-1).values[:, -1:]
        pool = (used | (best > out + TIE) | is_all).unsqueeze(-1).expand_as(grouped).flatten(-2)
    worst = scores.masked_fill(~inside, torch.inf).amin(-1)
    left_out = scores.masked_fill(inside | ~pool, -torch.inf).amax(-1)
    return torch.maximum(margin, (left_out - worst).clamp(min=0.0))
