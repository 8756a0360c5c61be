"""Steps of a model on ranks: multi-token prediction, auxiliary losses, overlapped micro-batches."""

from typing import Any

import torch

from megatron_moe.config.schema import Run
from tests.helpers import model_cases

SEQUENCES = model_cases.SEQUENCES
PACKED = [[9, 4], [16], [3, 7, 2], [12]]
PACKED_OTHERWISE = [[12, 3], [2, 9], [7, 4], [16]]
APART = {
    "reset_attention_mask": True,
    "program_data": True,  # whose samples may have padding
    "moe_seq_aux_loss_per": "document",
    "calculate_per_token_loss": True,
}


def steps(
    run: Run, count: int = 1, loss_mask: torch.Tensor | None = None, packed: list[list[int]] = PACKED
) -> dict[str, Any]:
    """Build the model and take a step of Adam, or more on the same global batch.

    Args:
        loss_mask: [4, S] of the global batch; None: as in `global_batch`.
        packed: documents of the sequences, where these are kept apart.

    Returns:
        losses, mtp_losses, grad_norms of each step; counts: layer number -> tokens per expert in the last step.
        aux, dropped: the same for this rank's layers' auxiliary losses and dropped choices. biases: of their routers.
        tables: class of each embedding table on this rank.
        tensors: global name -> (cut, weight, gradient of the last step), as `model_cases.one_step`.
    """
    from megatron_moe.training.evaluate import gathered_parameters
    from megatron_moe.training.metrics import expert_load

    trainer = model_cases.Trainer(run)
    chunks = trainer.model
    changes = model_cases.packed_batch(packed) if run.data.reset_attention_mask else {}
    if loss_mask is not None:
        changes["loss_mask"] = loss_mask
    results = [trainer.step(**changes) for _ in range(count)]
    assert all(result.committed for result in results)
    update = results[-1].router_update
    with gathered_parameters(chunks):
        tensors = model_cases.tensors_of(chunks)
    return {
        "losses": [result.loss for result in results],
        "mtp_losses": [result.mtp_losses for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "counts": expert_load(update, trainer.groups).tokens_per_expert,
        "aux": {n: {k: float(v) for k, v in one.items()} for n, one in zip(update.layer_numbers, update.aux_losses)},
        "biases": [bias for bias in update.expert_bias if bias is not None],
        "dropped": {n: d.tolist() for n, d in zip(update.layer_numbers, update.dropped_per_expert) if d is not None},
        "tables": [type(m).__name__ for chunk in chunks for name, m in chunk.named_modules() if "word_emb" in name],
        "tensors": tensors,
    }


def share_of_global_batch(run: Run, pg_collection: Any) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches of the four sequences."""
    batch = model_cases.global_batch(run.model.seq_length)
    return model_cases.share_of(batch, pg_collection, run.training.micro_batch_size)
