"""Rules about `--lr-mult`, `--weight-decay-mult` and `--decoupled-lr`: what they name, and rates that fit together."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from megatron_moe.config import module_names, param_groups
from megatron_moe.config.fields import all_fields, number_meant
from megatron_moe.config.rules.wording import refuse
from megatron_moe.config.schema import Run


def multiples_are_pairs(run: Run, world_size: int) -> None:
    """Require that each multiple is PATTERN=X, with a number that a rate or a decay can be multiplied by."""
    for field in param_groups.MULTIPLES:
        for word in param_groups.words(run, field):
            found = param_groups.pair(word)
            if found is None:
                meant = number_meant(word.rpartition("=")[2], (float,)) or "; write e.g. router=0.5"
                raise refuse(run, (field,), f"{word!r} is not PATTERN=X, with a number X{meant}")
            if not math.isfinite(found[1]) or found[1] < 0:
                raise refuse(
                    run, (field,), f"{word!r}: a multiple is {_least(field)} and finite; use e.g. {found[0]}=0.5"
                )
            if field == "lr_mult" and not found[1]:
                raise refuse(
                    run,
                    (field,),
                    f"{word!r} would compute gradients and moments that change nothing; use --freeze {found[0]}, or a "
                    "multiple above 0",
                )


def _least(field: str) -> str:
    return "above 0" if field == "lr_mult" else "at least 0"


def multiples_decide_something(run: Run, world_size: int) -> None:
    """Require of each multiple a parameter that is trained and for which no later one decides, and a decay above 0."""
    if param_groups.words(run, "weight_decay_mult") and not run.optimizer.weight_decay:
        raise refuse(
            run,
            ("weight_decay_mult", "weight_decay"),
            "multiplies a decay of 0; drop it, or use --weight-decay 0.1, and *=0 as the first word of the multiples to"
            " decay nothing else",
        )
    for field in param_groups.MULTIPLES:
        deciding = set(param_groups.decided(run, field).values())
        for word in param_groups.words(run, field):
            if word not in deciding:
                pattern = word.rpartition("=")[0]
                raise refuse(run, (field,), _reason(run, field, pattern))


def _reason(run: Run, field: str, pattern: str) -> str:
    """Return why a pattern decides for no parameter, and what would."""
    names = param_groups.named(run, pattern)
    if not names:
        if any(fnmatchcase(name, pattern) for name in param_groups.state_names(run)):
            return (
                f"{pattern!r} names no parameter but state that no optimizer updates; expert_bias moves by "
                "--moe-router-bias-update-rate"
            )
        near = ", ".join(module_names.near_names(run, pattern))
        return f"{pattern!r} names no module with parameters and no parameter of this model; use e.g. {near}"
    if names <= module_names.frozen(run):
        return f"{pattern!r} names parameters that --freeze leaves out of the training; drop it, or do not freeze them"
    return (
        f"{pattern!r} decides nothing: the last word that matches a parameter decides, and later ones of "
        f"{all_fields()[field].flag} match all that it names; put it behind them, or drop it"
    )


def an_average_is_saved(run: Run, world_size: int) -> None:
    """Refuse an average that is in no checkpoint: it could neither be gone on with nor exported."""
    if run.optimizer.ema_decay is not None and run.checkpoint.no_save_optim:
        raise refuse(
            run, ("ema_decay", "no_save_optim"), "the average is saved with the optimizer; drop one of the two"
        )


def decoupled_rates_are_ordered(run: Run, world_size: int) -> None:
    """Require of the schedule of the embedding and the output layer what is required of the other one."""
    options = run.optimizer
    if options.decoupled_lr is None:
        if options.decoupled_min_lr is not None:
            raise refuse(
                run, ("decoupled_min_lr",), "it ends the schedule of --decoupled-lr; give that too, or drop it"
            )
        return
    peak, least = param_groups.decoupled_range(run)
    end = "min_lr" if options.decoupled_min_lr is None else "decoupled_min_lr"
    if least > peak:
        raise refuse(run, ("decoupled_lr", end), f"is above the peak at the end; use --decoupled-min-lr {peak} or less")
    if options.lr_warmup_init > peak:
        raise refuse(
            run,
            ("decoupled_lr", "lr_warmup_init"),
            f"all schedules warm up from one rate, which is above this peak; use --lr-warmup-init {peak} or less",
        )
    if module_names.frozen(run).issuperset(param_groups.TABLES):
        raise refuse(
            run, ("decoupled_lr", "freeze"), "the embedding and the output layer are frozen; drop one of the two"
        )
