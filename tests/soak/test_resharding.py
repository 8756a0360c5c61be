"""R5, R6 and R12 at full size: every pair of layouts, data-parallel sizes, fifty incarnations."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import reshard_cases as cases
from tests.helpers.errors import largest

Flags = dict[str, Any]
Layout = tuple[int, Flags]
"""Ranks, and the flags that spread a model over them."""
PAIRS = list(itertools.product(cases.LAYOUTS, repeat=2))


def go(gloo: Any, place: Path, flags: Flags, source: Path, layout: Layout) -> Flags:
    """Load step 2 of `source` on a layout, save it at once into `place`, train step 3; the record of that."""
    ranks, sizes = layout
    here = {**flags, **sizes, "load": str(source), "ckpt_step": 2, "save": str(place), "train_iters": 3}
    return gloo.run(ranks, cases.moved, flags=here)[0][-1]


def begin(gloo: Any, place: Path, flags: Flags, layout: Layout) -> Flags:
    """Train three steps, saving step 2; the record of the third."""
    ranks, sizes = layout
    gloo.run(ranks, cases.trained, flags={**flags, **sizes, "train_iters": 3, "save_interval": 2, "save": str(place)})
    return cases.state_of(place / "iter_0000003")["records"][-1]


@pytest.mark.parametrize("mode", cases.MODES)
def test_every_pair_of_layouts(gloo, tmp_path, mode, scaled, figure):
    flags = {**cases.MODES[mode], "data_path": (cases.corpus(tmp_path),)}
    chosen = random.Random(5).sample(PAIRS, scaled(len(PAIRS)))
    wrong, sources, furthest = [], {}, 0.0
    for number, (first, second) in enumerate(chosen):
        source = tmp_path / f"from {first}"
        if first not in sources:
            sources[first] = begin(gloo, source, flags, cases.LAYOUTS[first])
        target = tmp_path / str(number)
        record = go(gloo, target, flags, source, cases.LAYOUTS[second])
        found = cases.compared(source / "iter_0000002", target / "iter_0000002")
        found += cases.next_step_differs(sources[first], record, to_the_bit=first == second, fp32=mode == "fp32")
        one, other = (float.fromhex(r["loss_hex"]) for r in (sources[first], record))
        furthest = largest((furthest, abs(one - other) / one))
        if found:
            wrong.append(f"{first} to {second}: {found}")
    figure(f"R5 pairs, {mode}", trials=len(chosen), failures=len(wrong), furthest_next_loss=furthest)
    assert wrong == []


FOUR = {"num_layers": 4, "moe_layer_freq": "[1,1,1,1]"}
THREE = {"num_layers": 3, "moe_layer_freq": "[1,1,1]"}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
TIED = {"untie_embeddings_and_output_weights": False}
DISTRIBUTED = {"use_distributed_optimizer": True}
ALONE, TP2, PP2, EP2 = (1, cases.layout()), (2, cases.layout(tp=2)), (2, cases.layout(pp=2)), (2, cases.layout(ep=2))
LOOP = (1, cases.layout(moe_expert_backend="loop"))
# Model, and two ways to train it: from the first to the second and back.
OTHERS: dict[str, tuple[Flags, Layout, Layout]] = {
    "interleaved stages": (FOUR, (2, cases.layout(pp=2, num_layers_per_virtual_pipeline_stage=1)), EP2),
    "experts not split by TP": (FOUR, (2, cases.layout(tp=2, expert_tensor_parallel_size=1)), TP2),
    "TP2 EP2 ETP1": (FOUR, (2, cases.layout(tp=2, ep=2, expert_tensor_parallel_size=1)), ALONE),
    "context parallel": (FOUR, (2, cases.layout(context_parallel_size=2)), TP2),
    "uneven stages": (THREE, (2, cases.layout(pp=2, decoder_first_pipeline_num_layers=1)), ALONE),
    "first stage without experts": ({**FOUR, "moe_layer_freq": "[0,0,1,1]"}, PP2, ALONE),
    "multi-token prediction": ({**FOUR, **MTP}, PP2, TP2),
    "one table for both ends": ({**FOUR, **TIED}, PP2, TP2),
    "grouped products or a loop": (FOUR, (2, cases.layout(ep=2, moe_expert_backend="grouped_mm")), LOOP),
}


@pytest.mark.parametrize("optimizers", ["whole", "distributed", "distributed to whole"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_axes_models_and_optimizers(gloo, tmp_path, name, dtype, optimizers, figure):
    model, first, second = OTHERS[name]
    flags = {**model, "data_path": (cases.corpus(tmp_path),), "bf16": dtype == "bf16"}
    first = (first[0], {**first[1], "use_distributed_optimizer": optimizers != "whole"})
    second = (second[0], {**second[1], "use_distributed_optimizer": optimizers == "distributed"})
    recorded = begin(gloo, tmp_path / "0", flags, first)
    away = go(gloo, tmp_path / "1", flags, tmp_path / "0", second)
    back = go(gloo, tmp_path / "2", flags, tmp_path / "1", first)
    wrong = cases.compared(tmp_path / "0" / "iter_0000002", tmp_path / "1" / "iter_0000002")
    wrong += cases.compared(tmp_path / "0" / "iter_0000002", tmp_path / "2" / "iter_0000002")
    wrong += cases.next_step_differs(recorded, away, to_the_bit=False, fp32=dtype == "fp32")
    wrong += cases.next_step_differs(recorded, back, to_the_bit=True, fp32=True)
    figure(f"R5 {name}, {dtype}, {optimizers}", trials=2, failures=len(wrong))
    assert wrong == []


def test_every_pair_of_data_parallel_sizes_reads_one_order(gloo, tmp_path, figure):
    """R6. The hash of a step covers the numbers and the content of its samples; the order in it is another matter,
    which tests/data/test_batches.py looks at."""
    ramp = {"rampup_batch_size": (4, 4, 24), "global_batch_size": 12}
    wrong, trials = [], 0
    for flags in ({}, ramp):
        flags = {**flags, "data_path": (cases.corpus(tmp_path),), "train_iters": 8}
        for before, after in itertools.permutations((1, 2, 4), 2):
            place = tmp_path / f"{trials}"
            for ranks, more in ((before, {"exit_interval": 3}), (after, {"load": str(place / "steps")})):
                files = {"save": str(place / "steps"), "metrics_file": str(place / "log.jsonl")}
                gloo.run(ranks, cases.trained, flags={**flags, **files, **more})
            alone = tmp_path / f"alone{len(flags)}.jsonl"
            if not alone.exists():
                gloo.run(1, cases.trained, flags={**flags, "metrics_file": str(alone)})
            told = [[(r["iteration"], r["consumed_samples"], r["data_hash"]) for r in cases.lines(path)]
                    for path in (alone, place / "log.jsonl")]  # fmt: skip
            wrong += [] if told[0] == told[1] else [f"{before} to {after} ranks, {flags}"]
            trials += 1
    figure("R6 data-parallel sizes", trials=trials, failures=len(wrong))
    assert wrong == []


RUNS: list[Layout] = [
    (1, {"bf16": True}),
    (2, {**cases.layout(ep=2), "bf16": True, **DISTRIBUTED, "rampup_batch_size": (4, 2, 200)}),
    (2, {**cases.layout(tp=2), "fp16": True, "initial_loss_scale": 65536.0, "loss_scale_window": 5}),
    (2, {**cases.layout(pp=2), "moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.01,)}),
    (4, {**cases.layout(tp=2, ep=2), "bf16": True, **DISTRIBUTED, "overlap_grad_reduce": True}),
]


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_fifty_incarnations(gloo, tmp_path, number, scaled, figure):
    """R12."""
    ranks, flags = RUNS[number]
    draw = random.Random(number)
    lengths = [draw.randint(1, 3) for _ in range(scaled(50, 2))]
    data = {"data_path": (cases.corpus(tmp_path, documents=16),)}
    flags = {**flags, **data, "hidden_dropout": 0.1, "attention_dropout": 0.1, "lr_decay_style": "cosine"}
    wrong = cases.incarnations(gloo, tmp_path, ranks, flags, lengths)
    figure(f"R12 run {number}", trials=len(lengths), failures=len(wrong), steps=sum(lengths), ranks=ranks)
    assert wrong == []
