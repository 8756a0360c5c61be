"""What each named source does in a step: its loss, tokens and choices of experts, on every layout those of one process.

The oracle runs one sample at a time and counts token by token.
"""

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from megatron_moe.config.schema import build
from tests.data import prepared
from tests.helpers import model_cases
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, PP2, TINY, TP2, ZERO_2, ZERO_3

S, NAMES = 16, ("web", "code", "rare")
SIZES = {"seq_length": S, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 24, "init_method_std": 0.1}
FLAGS: dict[str, Any] = {**TINY, **SIZES, "num_layers": 2, "moe_layer_freq": "[1,1]", "micro_batch_size": 2}
FLAGS |= {"make_vocab_size_divisible_by": 50, "mock_data": False, "tokenizer_type": "NullTokenizer"}
FLAGS |= {"eod_mask_loss": True}
PACKED = {"packing": "best-fit", "reset_attention_mask": True}
MOE_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
ALL_AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three sources, the last of which is not in every step; lengths of documents differ, and some tokens end them."""
    folder = tmp_path_factory.mktemp("sources")
    lines = ["sources:"]
    for place, (name, weight) in enumerate(zip(NAMES, (1, 0.5, 0.08))):
        text = folder / f"{name}.jsonl"
        for number in range(8):
            ids = " ".join(str((place * 30 + number * k * k) % 90) for k in range(5 + 3 * number))
            with open(text, "a") as file:
                file.write(f'{{"text": "{ids}"}}\n')
        prefix = prepared.run(text, folder / name, tokenizer_type="NullTokenizer", vocab_size=100)
        lines.append(f"  {name}: {{path: {prefix}, weight: {weight}}}")
    (folder / "data.yaml").write_text("\n".join(lines) + "\n")
    return str(folder / "data.yaml")


def counted_slowly(trainer: Any, data: Any, numbers: range, at_once: int) -> dict[str, Any]:
    """Of each source the loss, the tokens and the choices that the experts of each layer got, in these samples."""
    from torch.utils.data import default_collate

    from megatron_moe.moe.router import TopKRouter, routers
    from megatron_moe.moe.routing import RoutedTokens
    from megatron_moe.training.step import forward_step

    losses, tokens, choices = Counter[int](), Counter[int](), Counter[tuple[int, int, int]]()
    now: list[int] = []

    def see(router: TopKRouter, routed: RoutedTokens) -> None:
        kept, padding = routed.decision.kept, routed.micro_batch.is_padding
        for token, chosen in enumerate(routed.decision.expert_ids.tolist()):
            for k, expert in enumerate(chosen):
                dropped = kept is not None and not kept[token, k]
                if not (dropped or (padding is not None and padding[token])):
                    choices[now[token % len(now)], router.layer_number or 0, expert] += 1

    found = list(routers(trainer.model))
    for first in range(numbers.start, numbers.stop, at_once):
        taken = range(first, first + at_once)
        now = [data.mixture.at(number)[0] for number in taken]
        batch = default_collate([data[number] for number in taken])
        with torch.no_grad(), ExitStack() as stack:
            for router in found:
                stack.enter_context(router.observed_by(see, every_pass=True))
            output, _ = forward_step(iter([batch]), trainer.model[0])
        for source, of_tokens, mask in zip(now, output.double(), batch["loss_mask"]):
            losses[source] += float((of_tokens * mask).sum())
            tokens[source] += int(mask.sum())
    by_layer: dict[int, dict[str, list[int]]] = {}
    for router in found:
        number, experts = router.layer_number or 0, range(router.options.num_experts)
        by_layer[number] = {name: [choices[k, number, e] for e in experts] for k, name in enumerate(NAMES)}
    sums = [[found[k] for k in range(len(NAMES))] for found in (losses, tokens)]
    return {"losses": sums[0], "tokens": sums[1], "choices": by_layer}


def stepped(flags: dict[str, Any], slowly: bool = False, at_once: int = 1) -> list[dict[str, Any]]:
    """Two steps of eight sequences each, and before each of them what the oracle finds."""
    from megatron_moe.checkpoint.state import TrainingProgress
    from megatron_moe.data.batches import batch_iterators
    from megatron_moe.data.datasets import build_named
    from megatron_moe.data.tokenizers import NullTokenizer
    from megatron_moe.moe.load_balance import TokenCountError
    from megatron_moe.training.callbacks.reporting import HealthProbe
    from megatron_moe.training.metrics import expert_load

    run = build({**FLAGS, **flags})
    trainer = model_cases.Trainer(run, vocabulary=run.derived.padded_vocab_size(100))
    data, _ = build_named(run, NullTokenizer(100), 64, 0, 1, pg_collection=trainer.groups)
    batches = batch_iterators(data, run, pg_collection=trainer.groups)
    number, steps = 8 // (run.training.micro_batch_size * trainer.groups.dp.size()), []
    for first in (0, 8):
        oracle = counted_slowly(trainer, data, range(first, first + 8), at_once) if slowly else None
        probe = HealthProbe(trainer.model, 8, number, NAMES)
        result = trainer.step_of(batches, number, probe=probe)
        assert result.committed
        load = expert_load(result.router_update, trainer.groups).tokens_per_expert
        health = probe.health(load, TrainingProgress(1, 8), trainer.groups.pp)
        if slowly:
            wrong = {layer: counts[::-1] for layer, counts in load.items()}
            with pytest.raises(TokenCountError, match="experts got .* of all sources together"):
                probe.health(wrong, TrainingProgress(1, 8), trainer.groups.pp)
        sums = {"loss": result.loss_sum, "tokens": result.token_sum, "sources": result.source_sums, "load": load}
        of_layers = {layer: found.tokens_per_source for layer, found in health.layers.items()}
        steps.append({**sums, "choices": of_layers, "oracle": oracle})
    return steps


ALONE = {*PACKED, "mtp_num_layers", "calculate_per_token_loss", "micro_batch_size", "moe_expert_capacity_factor"}
ALONE |= {"num_layers", "moe_layer_freq", "data_config"}
FOUR = {"num_layers": 4, "moe_layer_freq": "[1,0,1,1]", "micro_batch_size": 1}
VPP: dict[str, Any] = {**PP2, **FOUR, "num_layers_per_virtual_pipeline_stage": 1}
PER_TOKEN = {"calculate_per_token_loss": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "DP2, ZeRO 2, MTP, per token": (2, {**ZERO_2, **PER_TOKEN, "mtp_num_layers": 1}),
    "DP2 x EP2, ZeRO 3": (2, {**EP2, **ZERO_3}),
    "TP2 x EP2": (2, {**TP2, **EP2, **DISTRIBUTED, "expert_tensor_parallel_size": 1}),
    "PP2, recomputed": (2, {**PP2, **MOE_AGAIN, "micro_batch_size": 1}),
    "CP2, packed": (2, {**PACKED, "context_parallel_size": 2}),
    "VPP2, layers recomputed": (2, {**VPP, **ALL_AGAIN}),
    "VPP2, MTP recomputed, packed": (2, {**VPP, **ALL_AGAIN, **PACKED, "mtp_num_layers": 1}),
    "TP2 x EP2, capacity": (2, {**TP2, **EP2, "expert_tensor_parallel_size": 1, "moe_expert_capacity_factor": 1.0}),
    "EP2, overlap": (2, {**EP2, "overlap_moe_expert_parallel_comm": True, "micro_batch_size": 1}),
    "VPP2 x EP2, overlap": (4, {**VPP, **EP2, "overlap_moe_expert_parallel_comm": True}),
    "DP2, reduced and gathered beside": (2, {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}),
}


TESTED = ["DP2, ZeRO 2, MTP, per token", "CP2, packed", "VPP2, MTP recomputed, packed", "TP2 x EP2, capacity"]


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=[*TESTED, "EP2, overlap"]))
def test_each_source_has_the_loss_the_tokens_and_the_choices_of_its_samples(
    gloo: Any, once: Any, config: str, layout: str
) -> None:
    ranks, flags = LAYOUTS[layout]
    flags = {**flags, "data_config": config}
    alone = {name: value for name, value in flags.items() if name in ALONE}
    (wanted,) = once(1, stepped, flags=alone, slowly=True, at_once=2 if "moe_expert_capacity_factor" in flags else 1)
    for steps in gloo.run(ranks, stepped, flags=flags):
        for step, of_one in zip(steps, wanted, strict=True):
            oracle, (losses, tokens) = of_one["oracle"], (step["sources"][:3], step["sources"][3:])
            assert list(tokens) == oracle["tokens"] and sum(tokens) == step["tokens"]
            assert list(losses) == pytest.approx(oracle["losses"], rel=1e-5)
            assert sum(losses) == pytest.approx(step["loss"], rel=1e-6)
            assert step["choices"] == oracle["choices"]
            for layer, by_source in step["choices"].items():
                assert [sum(column) for column in zip(*by_source.values())] == step["load"][layer]
        assert 0 in steps[0]["sources"] and 0 not in steps[1]["sources"]
