"""The parameter groups of the optimizer: each parameter's multiples of the learning rate and of the weight decay.

`--lr-mult` and `--weight-decay-mult` take words PATTERN=X, with the patterns of `--freeze`; of several that match a
parameter the last one decides. `--decoupled-lr` gives the tables of the vocabulary a schedule of their own, which
`--lr-mult` multiplies as it does the other one. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_moe.config import module_names
from megatron_moe.config.schema import Run

MULTIPLES = ("lr_mult", "weight_decay_mult")
"""The fields whose words are PATTERN=X."""
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
"""The parameters with `--decoupled-lr`, Megatron-LM's `is_embedding_or_output_parameter`; where tied, one weight."""


@dataclass(frozen=True)
class GroupSettings:
    """What sets a parameter apart from others.

    lr_mult: its rate is this multiple of its schedule's. weight_decay_mult: its decay, as a multiple of
    `--weight-decay`; None leaves it to the rule that norms and biases are not decayed. is_decoupled: its schedule is
    that of `--decoupled-lr`.
    """

    lr_mult: float = 1.0
    weight_decay_mult: float | None = None
    is_decoupled: bool = False


def pair(word: str) -> tuple[str, float] | None:
    """Return the pattern and the number of a word PATTERN=X; None if it is no such word."""
    pattern, _, number = word.rpartition("=")
    try:
        return (pattern, float(number)) if pattern else None
    except ValueError:
        return None


def words(run: Run, field: str) -> tuple[str, ...]:
    """Return the words of one of `MULTIPLES`, none where it is not given."""
    return getattr(run.optimizer, field) or ()


def named(run: Run, pattern: str) -> frozenset[str]:
    """Return the parameters that a pattern names; a tied table has two names, and either one names both."""
    found = set(module_names.parameters_of(run, pattern))
    if not run.model.untie_embeddings_and_output_weights and found.intersection(TABLES):
        found.update(TABLES)
    return frozenset(found)


def decided(run: Run, field: str) -> dict[str, str]:
    """Return parameter -> the word of one of `MULTIPLES` that decides for it, the last one that matches.

    Frozen parameters are left out: they are in no group.
    """
    found: dict[str, str] = {}
    for word in words(run, field):
        found.update(dict.fromkeys(named(run, _pair(word)[0]), word))
    frozen = module_names.frozen(run)
    return {name: word for name, word in found.items() if name not in frozen}


def settings(run: Run) -> dict[str, GroupSettings]:
    """Return the settings of each parameter that has any of its own, by its name in the whole model."""
    rates, decays = (decided(run, field) for field in MULTIPLES)
    tables = TABLES if run.optimizer.decoupled_lr is not None else ()

    def of(name: str) -> GroupSettings:
        return GroupSettings(
            _pair(rates[name])[1] if name in rates else 1.0,
            _pair(decays[name])[1] if name in decays else None,
            name in tables,
        )

    return {name: of(name) for name in (*rates, *decays, *tables)}


def decoupled_range(run: Run) -> tuple[float, float]:
    """Return the peak and the least rate of the schedule of `--decoupled-lr`, which is given."""
    options = run.optimizer
    assert options.decoupled_lr is not None
    least = options.min_lr if options.decoupled_min_lr is None else options.decoupled_min_lr
    return options.decoupled_lr, least


def state_names(run: Run) -> Iterator[str]:
    """Yield the names of buffers, which have no group: `expert_bias` and the router's counts."""
    for name, part in module_names.parts(run).items():
        yield from (f"{name}.{buffer}" for buffer in part.state)


def _pair(word: str) -> tuple[str, float]:
    found = pair(word)
    assert found is not None, f"{word}: not refused by rules/param_groups.py"
    return found
