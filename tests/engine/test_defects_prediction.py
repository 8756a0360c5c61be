"""The engine's losses, of the next token and of further ones: each known defect shows there, and not in ours."""

from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_moe.config.schema import Run, replace
from megatron_moe.model.build import build_model
from megatron_moe.model.mtp import without_second_table
from megatron_moe.optim.optimizer import build_optimizer
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from tests.engine.stock import present, small_config

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


def test_a_micro_batch_without_further_targets_has_nan_gradients(pg: Any) -> None:
    """N9: only the first position has a loss: no token further on has one."""
    run = replace(
        Run(), num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=SEQUENCE, mtp_num_layers=1,
        ffn_hidden_size=32, make_vocab_size_divisible_by=1,
    )  # fmt: skip
    seed_everything(run)
    ids, positions, future, labels = tokens()
    mask = torch.zeros(1, SEQUENCE)
    mask[:, 0] = 1.0
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    stock, (ours,) = engine_model(pg), build_model(run, pg, VOCABULARY)
    for model, attention_mask in ((stock, future), (ours, None)):
        (model(ids, positions, attention_mask, labels=labels, loss_mask=mask.clone()) * mask).sum().backward()
    assert all(p.main_grad.isfinite().all() for p in ours.parameters())
    finite = all(p.grad.isfinite().all() for p in stock.parameters() if p.grad is not None)
    assert present("N9") == (not finite)


def test_a_tied_output_layer_has_a_table_that_is_never_used(pg: Any) -> None:
    """N10: weights without a gradient on a last pipeline stage with tied embeddings."""
    ids, positions, future, labels = tokens()
    stock, ours = (engine_model(pg, pre_process=False, share_embeddings_and_output_weights=True) for _ in range(2))
    without_second_table(ours)
    unused = []
    for model in (stock, ours):
        model.set_input_tensor(torch.ones(SEQUENCE, 1, 8))
        model(ids, positions, future, labels=labels).sum().backward()
        unused.append([key for key, weight in model.named_parameters() if weight.grad is None])
    assert unused[1] == []
    assert present("N10") == (unused[0] == ["output_layer.weight"])


def test_the_loss_depends_on_the_padding_of_the_vocabulary(pg: Any) -> None:
    """N12: a model's losses with 8 rows of padding behind the vocabulary, and with none."""
    run = replace(Run(), num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=SEQUENCE)
    seed_everything(run)
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
    assert torch.allclose(*losses["ours"])
    assert present("N12") == (not torch.allclose(*losses["stock"]))


def groups_of_the_table() -> dict[str, bool]:
    """Whether this stage's table of the vocabulary is in a group with the decoupled rate: by the engine, and by us."""
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
