"""How the MLPs of a dense model become experts, and under which routers it computes the same. No torch.

An MLP is a sum over its F hidden units. The first S become the shared expert. The other F - S are cut into G parts, and
each expert has one of them: of E = G N experts, expert e has part e % G and belongs to copy e // G of the MLP. A token
chooses K = G k experts, which are k whole copies:

- The experts of a copy have equal rows in the router, so that a token chooses all of them or none, with equal weights
  (virtual groups, arXiv 2410.07524). G = 1 are plain copies (sparse upcycling, arXiv 2212.05055).
- The weights of a token sum to a known W. Each part is then weighed W / G in total, and `scale` = G / W, a factor of
  the experts' down projections, makes the sum the dense MLP's output.

With S = F the shared expert is the whole MLP and `scale` is 0: the routed experts add nothing until they are trained,
and any router will do.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from megatron_moe.config import rules, schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run

PROMISED = 1e-5
"""Largest difference of logits in fp32, relative to a token's largest, where they are to be the dense model's."""
FLAG = "--upcycle"
_SCORES_OF_ZERO = {"softmax": lambda experts: 1 / experts, "sigmoid": lambda experts: 0.5}
"""Score function -> the score of an expert whose logits are all zero."""


@dataclass(frozen=True)
class Upcycling:
    """The experts that each MLP of width `dense_width` becomes.

    shared: S, units of the shared expert; 0: none. width: units of an expert. parts: G. copies: N. copies_per_token: k.
    scale, shared_scale: factors of the down projections. router_std: of the router's rows; 0: zeros. noise: standard
    deviation of what is added to the experts' matrices, relative to their root mean square.
    """

    dense_width: int
    shared: int
    width: int
    parts: int
    copies: int
    copies_per_token: int
    scale: float
    shared_scale: float
    router_std: float
    noise: float
    seed: int

    @property
    def promised(self) -> float | None:
        """The bound that the logits have to keep; None where noise makes another model."""
        if self.noise:
            return None
        return PROMISED

    def units(self, expert: int) -> tuple[int, int]:
        """Return the first and the last but one hidden unit of an expert."""
        first = expert % self.parts * self.width
        if self.scale:
            first += self.shared
        return first, first + self.width

    def facts(self) -> dict[str, Any]:
        """Return the plan for a certificate, with what each expert was made of."""
        experts = []
        for expert in range(self.parts * self.copies):
            made_of = {"expert": expert, "copy": expert // self.parts, "part": expert % self.parts}
            experts.append({**made_of, "hidden_units": self.units(expert)})
        return {**asdict(self), "promised": self.promised, "experts_of_a_layer": experts}

    def words(self) -> str:
        """Return the plan in a line."""
        if not self.scale:
            return f"the MLP is the shared expert; {self.parts * self.copies} experts of {self.width} add nothing yet"
        text = f"{self.copies} copies of the MLP"
        if self.shared:
            text += f", without the {self.shared} units of the shared expert"
        if self.parts > 1:
            text += f", each cut into {self.parts} parts of {self.width}"
        text += f"; {self.copies_per_token} copies per token"
        if self.scale != 1:
            text += f"; down projections times {self.scale:g}"
        return text


@dataclass(frozen=True)
class UpcycleFlags:
    """The flags of `--upcycle` that are no settings of the model; None: not given."""

    granularity: int | None = None
    router: str | None = None
    noise: float | None = None
    seed: int | None = None


def require_sound(run: Run) -> None:
    """Check the settings of a new model. Raises ConfigError: no run can train it.

    A run chooses its length and the backend of its experts; there are some that any model works with.
    """
    rules.check_model(schema.replace(run, seq_length=run.derived.max_position_embeddings, moe_expert_backend="loop"), 1)


def upcycled_run(dense: Run, given: dict[str, Any], flags: UpcycleFlags, where: str) -> tuple[Run, Upcycling]:
    """Return the run of the upcycled model, and how its experts are made.

    given: the settings on the command line, by field. where: the dense model, as messages name it. Raises ConfigError:
    it is a mixture of experts, the sizes do not go together, or the router cannot make the sum the dense MLP's output.
    """
    if dense.moe.num_experts is not None:
        raise ConfigError(
            f"{FLAG}: {where} has {dense.moe.num_experts} experts already; --prune-experts, --merge-experts and "
            "--reinit-experts change those"
        )
    if given.get("num_experts") is None:
        raise ConfigError(f"{FLAG}: --num-experts is missing: say how many experts a layer is to have")
    depths = given.get("mtp_num_layers", dense.model.mtp_num_layers)
    if dense.model.mtp_num_layers and depths != dense.model.mtp_num_layers:
        raise ConfigError(
            f"--mtp-num-layers {depths}: {where} has {dense.model.mtp_num_layers} such layers, which are kept; leave "
            "the flag out"
        )
    width, shared = dense.derived.ffn_hidden_size, given.get("moe_shared_expert_intermediate_size") or 0
    parts, expert = _cut(width, shared, given.get("moe_ffn_hidden_size"), flags.granularity)
    run = schema.replace(dense, **{**given, "moe_ffn_hidden_size": expert})
    require_sound(run)
    moe, experts = run.moe, given["num_experts"]
    if experts % parts:
        raise ConfigError(
            f"--num-experts {experts}: each MLP is cut into {parts} parts, and every part needs as many experts as the "
            f"others; a multiple of {parts} works, e.g. {-(-experts // parts) * parts}"
        )
    zeros, std, seed = flags.router == "zeros", run.model.init_method_std, flags.seed
    if zeros:
        std = 0.0
    if seed is None:
        seed = 1234
    scale, copies_per_token = 0.0, max(moe.moe_router_topk // parts, 1)
    if shared < width:
        _require_whole_copies(run, parts, zeros)
        scale = parts / _sum_of_weights(run, zeros)
    plan = Upcycling(
        dense_width=width,
        shared=shared,
        width=expert,
        parts=parts,
        copies=experts // parts,
        copies_per_token=copies_per_token,
        scale=scale,
        shared_scale=1.0 + moe.moe_shared_expert_gate,  # the gate is zero, and its sigmoid a half
        router_std=std,
        noise=flags.noise or 0.0,
        seed=seed,
    )
    return run, plan


def require_exact_scale(plan: Upcycling, dtype: str, scaling: float | None) -> None:
    """Check that half precision does not round what is scaled. Raises ConfigError: it does."""
    if plan.noise or dtype == "float32" or not plan.scale or math.frexp(plan.scale)[0] == 0.5:
        return
    factor = (scaling or 1.0) * plan.scale
    raise ConfigError(
        f"{FLAG}: the experts' down projections are multiplied by {plan.scale:g}, which {dtype} rounds, since it is no "
        f"power of two; --moe-router-topk-scaling-factor {factor:g} puts it into the router, --dtype fp32 is exact"
    )


def _cut(width: int, shared: int, expert: int | None, granularity: int | None) -> tuple[int, int]:
    """Return how many parts an MLP is cut into beside the shared expert, and the units of each."""
    if shared > width:
        raise ConfigError(
            f"--moe-shared-expert-intermediate-size {shared}: is made of the dense MLP, which has {width} hidden units"
        )
    routed = width - shared or width
    parts = granularity or max(routed // (expert or routed), 1)
    if routed % parts or routed // parts != (expert or routed // parts):
        if expert is not None and granularity is not None:
            raise ConfigError(
                f"--moe-ffn-hidden-size {expert}, --moe-upcycling-granularity {granularity}: {granularity} parts of "
                f"{expert} are not the {routed} hidden units that are cut; leave one of the two out"
            )
        shown = f"--moe-ffn-hidden-size {expert}"
        if expert is None:
            shown = f"--moe-upcycling-granularity {parts}"
        raise ConfigError(
            f"{shown}: does not divide the {routed} hidden units of an MLP that the experts share; "
            f"--moe-upcycling-granularity {_divisor(routed, parts)} does"
        )
    return parts, routed // parts


def _divisor(number: int, near: int) -> int:
    """Return the largest divisor up to a number."""
    return next(one for one in range(min(near, number), 0, -1) if number % one == 0)


def _require_whole_copies(run: Run, parts: int, zeros: bool) -> None:
    """Check that a token's choice is whole copies of the MLP. Raises ConfigError: it need not be."""
    moe, topk = run.moe, run.moe.moe_router_topk
    if parts == 1:
        return
    if topk % parts:
        raise ConfigError(
            f"--moe-router-topk {topk}: an MLP is cut into {parts} parts, and a token needs each of them equally often;"
            f" a multiple of {parts} works, e.g. {-(-topk // parts) * parts}"
        )
    groups, copies = moe.moe_router_num_groups, (moe.num_experts or 0) // parts
    if groups is not None and copies % groups:
        raise ConfigError(
            f"--moe-router-num-groups {groups}: cuts through the {copies} copies of an MLP, whose {parts} parts a "
            f"token chooses together; {_divisor(copies, groups)} groups hold whole copies"
        )
    if zeros and (groups != copies or moe.moe_router_group_topk != topk // parts):
        raise ConfigError(
            f"--upcycle-router zeros: all experts have one score, and a choice among equals need not have all {parts} "
            f"parts; --moe-router-num-groups {copies} --moe-router-group-topk {topk // parts} chooses whole copies, or "
            "use --upcycle-router random"
        )


def _sum_of_weights(run: Run, zeros: bool) -> float:
    """Return the sum of a token's K weights. Raises ConfigError: it depends on the token."""
    moe, factor = run.moe, run.moe.moe_router_topk_scaling_factor or 1.0
    if run.derived.norm_topk_prob:
        return factor
    name = moe.moe_router_score_function
    if zeros and name in _SCORES_OF_ZERO:
        return factor * moe.moe_router_topk * _SCORES_OF_ZERO[name](moe.num_experts or 0)
    raise ConfigError(
        f"{FLAG}: with --moe-router-score-function {name} and these settings a token's weights do not sum to one, so "
        "that the sum of the experts is not the dense MLP's output; --moe-router-norm-topk-prob makes them, "
        "--upcycle-router zeros makes all weights equal, or a --moe-shared-expert-intermediate-size of the dense "
        f"MLP's {run.derived.ffn_hidden_size} leaves it whole"
    )
