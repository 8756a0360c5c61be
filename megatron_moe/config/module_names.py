"""Names of the model's modules and parameters, from a run alone, and the patterns of flags that name them.

Names are those of the whole model, as in a checkpoint: layers are numbered from 0 over all pipeline stages. They follow
from the records of `model_parts.py`. No torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from megatron_moe.config.model_parts import ModelPart, placed
from megatron_moe.config.schema import Run

EMBEDDING, OUTPUT_LAYER = "embedding", "output_layer"


def parts(run: Run) -> dict[str, ModelPart]:
    """Return every module by name, with its kind; a module comes before those inside it.

    These are the modules that have weights or contain one that has, and core attention. The chain of layers as a whole
    is not among them: each layer computes for itself.
    """

    def inside(name: str, part: ModelPart) -> Iterator[tuple[str, ModelPart]]:
        yield name, part
        for child, kind in part.parts.items():
            if kind.when(run):
                yield from inside(f"{name}.{child}", kind)

    return {name: part for outermost in placed(run) for name, part in inside(*outermost)}


def modules(run: Run) -> dict[str, tuple[str, ...]]:
    """Return every module with the names of its own parameters, without those of modules inside it."""
    return {
        name: tuple(parameter for parameter, when in part.parameters.items() if when(run))
        for name, part in parts(run).items()
    }


def aliases(run: Run) -> dict[str, tuple[str, ...]]:
    """Return the words of `--keep-fp32` that name something in this model, and the modules they stand for."""
    found: dict[str, tuple[str, ...]] = {}
    for name, part in parts(run).items():
        if part.alias is not None:
            found[part.alias] = (*found.get(part.alias, ()), name)
    first, last = "decoder.layers.0", f"decoder.layers.{run.model.num_layers - 1}"
    return {**found, "first_layer": (first,), "last_layer": (last,)}


def kept_in_fp32(run: Run) -> tuple[str, ...]:
    """Return the modules that `--keep-fp32` keeps in fp32, outermost only: modules inside one are kept with it.

    A pattern names modules or parameters. For a parameter it keeps the parameter's module, because a module computes in
    one dtype.
    """
    chosen: set[str] = set()
    for pattern in run.precision.keep_fp32 or ():
        chosen.update(matches(run, pattern))
    return tuple(name for name in (parts(run) if chosen else ()) if name in chosen and not is_inside(name, chosen))


def matches(run: Run, pattern: str) -> tuple[str, ...]:
    """Return the modules that one pattern of `--keep-fp32` names, which may be none."""
    if pattern in (words := aliases(run)):
        return words[pattern]
    return tuple(
        name
        for name, own in modules(run).items()
        if fnmatchcase(name, pattern) or any(fnmatchcase(f"{name}.{parameter}", pattern) for parameter in own)
    )


def patterns_of(run: Run, parameters: Collection[str]) -> tuple[str, ...]:
    """Return patterns of `--keep-fp32` that keep the modules of these parameters, and no others, in fp32."""
    owners = {f"{name}.{parameter}": name for name, own in modules(run).items() for parameter in own}
    chosen = {owners[name] for name in parameters}
    found: list[str] = []
    covered: set[str] = set()
    names = sorted(chosen)
    for pattern in dict.fromkeys((*aliases(run), *(f"*.{name.rpartition('.')[2]}" for name in names), *names)):
        named = set(matches(run, pattern))
        inside = {name for name in owners.values() if name in named or is_inside(name, named)}
        if inside - covered and inside <= chosen:
            found.append(pattern)
            covered |= inside
    if EMBEDDING in found and not run.model.untie_embeddings_and_output_weights:
        found.append(OUTPUT_LAYER)
    return tuple(found)


def parameters_of(run: Run, pattern: str) -> tuple[str, ...]:
    """Return the parameters that one pattern of `--freeze` names, which may be none.

    A module stands for all parameters inside it.
    """
    named = set(aliases(run).get(pattern, ()))
    own = modules(run)
    named.update(name for name in own if fnmatchcase(name, pattern))
    every = (f"{name}.{parameter}" for name, parameters in own.items() for parameter in parameters)
    return tuple(name for name in every if fnmatchcase(name, pattern) or is_inside(name, named))


def frozen(run: Run) -> frozenset[str]:
    """Return the parameters that `--freeze` names, by their names in the whole model."""
    patterns = run.optimizer.freeze or ()
    return frozenset(name for pattern in patterns for name in parameters_of(run, pattern))


def near_names(run: Run, pattern: str) -> list[str]:
    """Return up to three names or words similar to a pattern without a match; all words if none is."""
    words = list(aliases(run))
    names = [*words, *parts(run)]
    found = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    last = pattern.rsplit(".", 1)[-1].strip("*")
    tails = sorted({name.rsplit(".", 1)[-1] for name in names if not name[-1].isdigit()})
    return found or [f"*.{tail}" for tail in difflib.get_close_matches(last, tails, n=3, cutoff=0.5)] or words


def multiplied_in_fp8(run: Run) -> tuple[str, ...]:
    """Return the modules whose products are in FP8: routed experts and single linear layers."""
    precision, found = run.precision, []
    if precision.fp8_format is None:
        return ()
    every, in_bf16 = parts(run), {f"decoder.layers.{layer}" for layer in run.derived.bf16_layers}
    for name, part in every.items():
        if part.fp8 not in precision.fp8_modules or is_inside(name, in_bf16):
            continue
        linear = [f"{name}.{child}" for child in part.parts if child.startswith("linear_")]
        found += [child for child in linear if child in every] if part.parts else [name]
    return tuple(found)


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Return whether a module or parameter is inside one of these modules."""
    path = name.split(".")
    return any(".".join(path[:length]) in modules for length in range(1, len(path)))
