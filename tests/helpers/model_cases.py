"""A model under a layout, stepped on a global batch that is the same for all, and where its tensors come from."""

from typing import Any

import torch

from megatron_moe.config.schema import Run

VOCAB = 256
SEQUENCES = 4


def global_batch(length: int) -> dict[str, torch.Tensor]:
    """Four sequences, the same for every layout; some tokens have no loss."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (SEQUENCES, length + 1), generator=generator)
    mask = torch.ones(SEQUENCES, length)
    mask[:, 5:9] = 0  # as many in each sequence: then a mean over micro-batches is a mean over tokens
    positions = torch.arange(length).expand(SEQUENCES, length)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": positions}


def packed_batch(lengths: list[list[int]], length: int = 16) -> dict[str, torch.Tensor]:
    """Sequences of documents of so many tokens, padded; a document's tokens are the same wherever it is."""
    keys = ("tokens", "labels", "loss_mask", "position_ids", "documents")
    batch = {key: torch.zeros(len(lengths), length, dtype=torch.int64) for key in keys}
    batch["documents"].fill_(-1)
    for row, documents in enumerate(lengths):
        end = 0
        for number in documents:
            begin, end = end, end + number
            ids = torch.randint(0, VOCAB, (number + 1,), generator=torch.Generator().manual_seed(number))
            values = (ids[:-1], ids[1:], 1, torch.arange(number), begin)
            for key, value in zip(keys, values):
                batch[key][row, begin:end] = value
    return {**batch, "loss_mask": batch["loss_mask"].float()}


def share_of(
    batch: dict[str, torch.Tensor], pg_collection: Any, micro_batch_size: int
) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches of a global batch."""
    from megatron_moe.parallel.sequence import balanced_places, context_parallel_slice

    cp, dp = pg_collection.cp, pg_collection.dp
    share = len(batch["tokens"]) // dp.size()
    starts = range(dp.rank() * share, (dp.rank() + 1) * share, micro_batch_size)
    found = [{key: tensor[at : at + micro_batch_size] for key, tensor in batch.items()} for at in starts]
    if "documents" not in batch or cp.size() == 1:
        return [{key: context_parallel_slice(one[key], cp.rank(), cp.size()) for key in one} for one in found]
    for one in found:
        places = torch.from_numpy(balanced_places(one["documents"].numpy(), cp.size()))
        one.update({key: tensor[:, places[cp.rank()]] for key, tensor in one.items()}, places=places)
    return found


class Trainer:
    """A model with its optimizer, stepped by hand on the same global batch under every layout."""

    def __init__(self, run: Run, pg_collection: Any = None, vocabulary: int = VOCAB) -> None:
        from megatron_moe.model.build import build_model
        from megatron_moe.optim.optimizer import build_optimizer, build_scheduler
        from megatron_moe.parallel import groups
        from megatron_moe.training.step import connect

        self.run, self.groups = run, pg_collection or groups.initialize(run)
        groups.seed_everything(run)
        self.model = build_model(run, self.groups, vocabulary)
        self.optimizer = build_optimizer(run, self.model, self.groups)
        self.scheduler = build_scheduler(run, self.optimizer)
        connect(self.model, self.optimizer)

    def step(self, **changes: torch.Tensor) -> Any:
        """One step; `changes` replace parts of the global batch."""
        batch = {**global_batch(self.run.model.seq_length), **changes}
        micro_batches = share_of(batch, self.groups, self.run.training.micro_batch_size)
        return self.step_of([iter(micro_batches) for _ in self.model], len(micro_batches))

    def step_of(self, batches: list[Any], num_micro_batches: int, **options: Any) -> Any:
        """One step of so many micro-batches of each chunk's iterator; `options` are those of `train_step`."""
        from megatron_moe.training.step import train_step

        return train_step(
            self.model,
            self.optimizer,
            self.scheduler,
            batches,
            num_micro_batches=num_micro_batches,
            micro_batch_size=self.run.training.micro_batch_size,
            seq_length=self.run.model.seq_length,
            pg_collection=self.groups,
            **options,
        )


def one_step(run: Run) -> dict[str, Any]:
    """Build the model, run one step up to the gradient norm, and ask for a token.

    Returns:
        loss: mean over the global batch, on every rank. grad_norm. logits [1, VOCAB] after the first ten tokens.
        tensors: global name -> (cut, weight, gradient); `cut` lists (axis, index, parts, stride) that lead from the
        full tensor to this rank's.
    """
    from megatron_moe.model.generate import next_token_logits

    trainer = Trainer(run)
    chunks = trainer.model
    logits = next_token_logits(chunks, global_batch(run.model.seq_length)["tokens"][:1], position=9)
    loss = forward_backward(run, chunks, trainer.groups)
    trainer.optimizer.prepare_grads()  # changes no weight
    norm = float(trainer.optimizer.get_grad_norm())
    return {"loss": loss, "grad_norm": norm, "logits": logits, "tensors": tensors_of(chunks)}


def forward_backward(
    run: Run, chunks: list[torch.nn.Module], pg_collection: Any, samples: dict[str, torch.Tensor] | None = None
) -> float:
    """All micro-batches through the engine's schedule; gradients are reduced in main_grad. Returns the global loss."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    from megatron_moe.training.finalize_model_grads import finalize_model_grads
    from megatron_moe.training.step import forward_step
    from megatron_moe.training.step_sums import local_loss, sum_over_ranks

    micro_batches = share_of(samples or global_batch(run.model.seq_length), pg_collection, 1)
    for chunk in chunks:
        chunk.zero_grad_buffer()
        get_model_config(chunk).finalize_model_grads_func = finalize_model_grads
    iterators = [iter(micro_batches) for _ in chunks]
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=run.model.seq_length,
        micro_batch_size=1,
        forward_only=False,
    )
    loss_sum, count = sum_over_ranks(local_loss(losses, pg_collection))
    return loss_sum / count


def tensors_of(chunks: list[torch.nn.Module]) -> dict[str, Any]:
    """By its name in the whole model, each tensor's cut, weight and gradient; see `one_step`."""
    from megatron_moe_tools.doctor.measure import parameter_shards

    return {
        place.name: (place.cuts, parameter.detach().clone(), parameter.main_grad.detach().clone())
        for chunk in chunks
        for place, parameter in parameter_shards(chunk)
    }


def continuation(run: Run, temperature: float) -> list[int]:
    """Five tokens after a prompt that is longer than the sequence."""
    from megatron_moe.model.build import build_model
    from megatron_moe.model.generate import generate
    from megatron_moe.parallel import groups

    pg_collection, length = groups.initialize(run), run.model.seq_length
    groups.seed_everything(run)
    chunks = build_model(run, pg_collection, VOCAB)
    prompt = global_batch(length)["tokens"].flatten().tolist()[: length + 3]
    counts = [buffer for chunk in chunks for name, buffer in chunk.named_buffers() if "local_tokens" in name]
    new = generate(chunks, prompt, 5, length, vocab_size=200, temperature=temperature, seed=3)
    assert not any(count.any() for count in counts)
    assert all(chunk.training for chunk in chunks)
    return new
