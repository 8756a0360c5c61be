"""What a step of Muon does to every weight: momentum, singular values in fp64, decay; AdamW for the other weights.

Gradients are from autograd alone, as in `test_optimizer_ranks.py`. Momenta are compared with their means; what is made
of a momentum is compared with the singular values' map of the momentum that the step left, because small singular
values make a small error of the gradient large.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch

from megatron_moe.config.schema import Run, replace
from tests.helpers.errors import relative
from tests.numbers import reference_muon
from tests.numbers.reference_adamw import AdamW, clipped
from tests.optim import test_optimizer_ranks as adam_steps
from tests.optim.test_optimizer_ranks import BIASED, DISTRIBUTED, EXPERTS, FLAGS

MUON = {**FLAGS, "optimizer": "muon", "muon_momentum": 0.7, "muon_fp32_matmul_prec": "highest"}
GROUPED = {**EXPERTS, "multi_latent_attention": False, "q_lora_rank": None, "kv_lora_rank": None, "kv_channels": 12}
GROUPED |= {"group_query_attention": True, "num_query_groups": 2}
BY_NAME = {
    "lr_mult": ("*.linear_qkv.weight=2", "*.experts.weight1=0.5"),
    "weight_decay_mult": ("*.linear_qkv.weight=0", "*.experts.weight2=3"),
}
EACH_HEAD = {"muon_split_qkv_per_head": True}
OF_EXPERTS, OF_GROUPS = {**EXPERTS, **MUON}, {**GROUPED, **MUON}
# ranks, flags: each of Muon's options once
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "latent heads, DP2, distributed optimizer": (
        2,
        {**OF_EXPERTS, "mtp_num_layers": 1, **EACH_HEAD, "qk_head_dim": 10, "v_head_dim": 6, **DISTRIBUTED},
    ),
    "heads without a query's latent, fp16": (
        1,
        {**OF_EXPERTS, "q_lora_rank": None, "fp16": True, **EACH_HEAD, "muon_scale_mode": "unit_rms_norm"},
    ),
    "query groups, each head, bf16, distributed optimizer": (
        1,
        {**OF_GROUPS, "bf16": True, "muon_fp32_matmul_prec": "medium", **EACH_HEAD, **DISTRIBUTED},
    ),
    "query groups, DP2, rates and decays by name": (2, {**OF_GROUPS, "muon_nesterov": True, **BY_NAME}),
    "query groups, one matrix": (
        1,
        {**OF_GROUPS, "muon_split_qkv": False, "muon_scale_mode": "shape_scaling", "muon_extra_scale_factor": 1.0},
    ),
    "biases and norms": (1, {**BIASED, **MUON, "muon_coefficient_type": "simple", "muon_num_ns_steps": 4}),
}
# The second step has a momentum; fp16's scale has doubled in the third. The schedule: test_optimizer_ranks.py.
STEPS, FP16_STEPS = 2, 3
TOLERANCE = {"bf16": 2e-3, "fp16": 2e-3}


def rows_of_heads(run: Run) -> dict[str, list[int]]:
    if not run.model.multi_latent_attention:
        return {"linear_qkv": [run.derived.head_size]}
    query = [run.model.qk_head_dim + run.model.qk_pos_emb_head_dim]
    key_value = [run.model.qk_head_dim, run.model.v_head_dim]
    return {"linear_q_proj": query, "linear_q_up_proj": query, "linear_kv_up_proj": key_value}


def multiple(words: Sequence[str] | None, name: str) -> float:
    """The number of the word PATTERN=X that names a parameter, of which there is one at most."""
    pairs = [word.split("=") for word in words or ()]
    return next((float(number) for pattern, number in pairs if fnmatchcase(name, pattern)), 1.0)


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_singular_values(gloo: Any, case: str) -> None:
    ranks, flags = CASES[case]
    run = replace(Run(), **flags)
    options = run.optimizer
    tolerance = next((TOLERANCE[flag] for flag in TOLERANCE if flag in flags), 2e-5)
    unit = 2.0**-9 if options.muon_fp32_matmul_prec == "medium" else 2.0**-24
    steps = {"quintic": reference_muon.QUINTIC, "simple": reference_muon.SIMPLE}[options.muon_coefficient_type]
    steps = steps[: options.muon_num_ns_steps]
    sizes = {"query_groups": run.derived.num_query_groups, "head": run.derived.head_size}
    sizes["split_qkv"] = options.muon_split_qkv
    if options.muon_split_qkv_per_head:
        sizes["of_heads"] = rows_of_heads(run)
    results = gloo.run(ranks, adam_steps.trained, run=run, steps=FP16_STEPS if run.precision.fp16 else STEPS)
    adam_steps.require_same_on_all_ranks(results)
    start = {name: weight.double() for name, weight in results[0]["start"].items()}
    adam = AdamW(start, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3)
    muons = {name for name in start if reference_muon.matrices(name, start[name], **sizes)}
    assert 5 < len(muons) < len(start) - 3
    momenta = {name: torch.zeros_like(start[name]) for name in muons}
    before = start
    for number, step in enumerate(results[0]["steps"]):
        rate = adam_steps.rate_of(number)
        gradients = clipped(step["gradients"], 0.2)
        adam.step(gradients, rate)
        for name, main in step["main param"].items():
            told = f"step {number}: {name}"
            assert torch.equal(step["weights"][name], main.to(step["weights"][name].dtype)), told
            if name not in muons:
                limit = 2 * tolerance * (adam.weights[name] - start[name]).norm() + 1e-6 * main.norm()
                assert (main.double() - adam.weights[name]).norm() < limit, told
                continue
            momenta[name] = 0.7 * momenta[name] + 0.3 * gradients[name]
            assert relative(step["exp_avg"][name], momenta[name]) < tolerance, told
            value = step["exp_avg"][name].double()
            blur = 0.0
            if options.muon_nesterov:
                value = 0.3 * gradients[name] + 0.7 * value
                blur = tolerance
            of_value = reference_muon.matrices(name, value, **sizes)
            of_main = reference_muon.matrices(name, main.double(), **sizes)
            of_before = reference_muon.matrices(name, before[name].double(), **sizes)
            own_rate, decay = (multiple(words, name) for words in (options.lr_mult, options.weight_decay_mult))
            own_rate *= rate
            for matrix, after, earlier in zip(of_value, of_main, of_before):
                rows = (matrix.shape[:-1].numel(), matrix.shape[-1])
                matrix, after, earlier = (one.reshape(rows) for one in (matrix, after, earlier))
                scales = options.muon_scale_mode, options.muon_extra_scale_factor
                factor = own_rate * reference_muon.scale(*rows, *scales)
                wanted = earlier * (1 - own_rate * 0.3 * decay)
                wanted -= factor * reference_muon.orthogonalized(matrix, steps)
                most = 3.0 if unit > 1e-3 else 10.0
                expected = reference_muon.expected_error(matrix, steps, max(unit, blur))
                expected += unit * min(rows) ** 0.5  # the scaled result is rounded once more
                assert (after - wanted).norm() < most * factor * expected + 2e-7 * wanted.norm(), told
        before = step["main param"]
