"""The engine's losses, of the next token and of further ones: each known defect shows there, and not in ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

from megatron_moe.config.schema import Run, replace
from megatron_moe.model.mtp import without_second_table
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from tests.platform.stock import present
from tests.platform.test_defects_engine import small_config

pytestmark = pytest.mark.engine

VOCABULARY, SEQUENCE = 32, 8


def engine_model(pg: Any, **changes: Any) -> GPTModel:
    """The engine's dense GPT with one layer that predicts a token further."""
    config = small_config(
        num_layers=1, mtp_num_layers=1, hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec()
    further = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    return GPTModel(
        config, layer, VOCABULARY, SEQUENCE, position_embedding_type="rope", mtp_block_spec=further, pg_collection=pg,
        **changes,
    )  # fmt: skip


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions, an attention mask, labels; one sequence."""
    drawn = torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return drawn[:, :-1], torch.arange(SEQUENCE)[None], future, drawn[:, 1:]


def without_targets() -> dict[str, bool]:
    """Whether gradients are finite where only the first position has a loss: no token further on has one."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    from megatron_moe.model.build import build_model

    run = replace(
        Run(), num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=SEQUENCE, mtp_num_layers=1,
        ffn_hidden_size=32, make_vocab_size_divisible_by=1,
    )  # fmt: skip
    pg = groups.initialize(run)
    seed_everything(run)
    ids, positions, future, labels = tokens()
    mask = torch.zeros(1, SEQUENCE)
    mask[:, 0] = 1.0
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    stock = engine_model(pg)
    (stock(ids, positions, future, labels=labels, loss_mask=mask.clone()) * mask).sum().backward()
    (ours,) = build_model(run, pg, VOCABULARY)
    (ours(ids, positions, None, labels=labels, loss_mask=mask.clone()) * mask).sum().backward()
    return {
        "stock": all(bool(p.grad.isfinite().all()) for p in stock.parameters() if p.grad is not None),
        "ours": all(bool(p.main_grad.isfinite().all()) for p in ours.parameters()),
    }


def test_a_micro_batch_without_further_targets_has_nan_gradients(gloo: Any) -> None:
    (finite,) = gloo.run(1, without_targets)
    assert finite["ours"] and present("N9") == (not finite["stock"])


def unused_weights() -> dict[str, Any]:
    """Weights without a gradient on a last pipeline stage with tied embeddings."""
    pg = groups.initialize(Run())
    ids, positions, future, labels = tokens()
    found = {}
    for name in ("stock", "ours"):
        model = engine_model(pg, pre_process=False, share_embeddings_and_output_weights=True)
        if name == "ours":
            without_second_table(model)
        model.set_input_tensor(torch.ones(SEQUENCE, 1, 8))
        model(ids, positions, future, labels=labels).sum().backward()
        found[name] = [key for key, weight in model.named_parameters() if weight.grad is None]
    return found


def test_a_tied_output_layer_has_a_table_that_is_never_used(gloo: Any) -> None:
    (found,) = gloo.run(1, unused_weights)
    assert found["ours"] == []
    assert present("N10") == (found["stock"] == ["output_layer.weight"])


def losses_by_padding() -> dict[str, bool]:
    """Whether a model's losses are the same with 8 rows of padding behind the vocabulary as with none."""
    from megatron_moe.model.build import build_model

    run = replace(Run(), num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=SEQUENCE)
    pg = groups.initialize(run)
    ids, positions, future, labels = tokens()
    losses: dict[str, list[torch.Tensor]] = {"stock": [], "ours": []}
    for rows in (VOCABULARY, VOCABULARY + 8):
        config = small_config(num_layers=1, hidden_dropout=0.0, attention_dropout=0.0, masked_softmax_fusion=False)
        stock = GPTModel(
            config, get_gpt_layer_local_spec(), rows, SEQUENCE, position_embedding_type="rope", pg_collection=pg
        )
        (ours,) = build_model(run, pg, VOCABULARY, wrap=False, padded_vocab_size=rows)
        for model, mask, name in ((stock, future, "stock"), (ours, None, "ours")):
            for weight in model.parameters():
                weight.data.fill_(0.1)
            losses[name].append(model(ids, positions, mask, labels=labels).detach())
    return {name: torch.allclose(*both) for name, both in losses.items()}


def test_the_loss_depends_on_the_padding_of_the_vocabulary(gloo: Any) -> None:
    (same,) = gloo.run(1, losses_by_padding)
    assert same["ours"] and present("N12") == (not same["stock"])


def groups_of_the_table() -> dict[str, bool]:
    """Whether this stage's table of the vocabulary is in a group with the decoupled rate: by the engine, and by us."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_moe.model.build import build_model
    from megatron_moe.training.optimizer import build_optimizer

    run = replace(
        Run(), num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=SEQUENCE, mtp_num_layers=1,
        ffn_hidden_size=32, untie_embeddings_and_output_weights=True, pipeline_model_parallel_size=2, decoupled_lr=0.5,
    )  # fmt: skip
    pg = groups.initialize(run)
    model = build_model(run, pg, VOCABULARY)
    table = next(weight for name, weight in model[0].named_parameters() if name.endswith("word_embeddings.weight"))
    config = OptimizerConfig(lr=0.1, decoupled_lr=0.5)
    optimizers = {
        "stock": get_megatron_optimizer(config, model, use_gloo_process_groups=False, pg_collection=pg),
        "ours": build_optimizer(run, model, pg),
    }
    return {
        name: any(one is table for group in optimizer.param_groups if group["max_lr"] == 0.5 for one in group["params"])
        for name, optimizer in optimizers.items()
    }


def test_a_copy_of_the_table_is_not_marked_for_the_decoupled_rate(gloo: Any) -> None:
    first, last = gloo.run(2, groups_of_the_table)
    assert first == {"stock": True, "ours": True} and last["ours"]
    assert present("N13") == (not last["stock"])
