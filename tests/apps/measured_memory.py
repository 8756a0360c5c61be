"""A rank's bytes during a real training step, for the planner's tests."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch

from megatron_moe.apps.plan.meta_tracer import HOST, LiveBytes, storage_bytes
from megatron_moe.config.schema import build
from megatron_moe.data.batches import batch_iterators
from megatron_moe.data.datasets import build_datasets
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.model.build import build_model
from megatron_moe.model.fully_sharded import local
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.platform import switches
from megatron_moe.training.optimizer import build_optimizer, build_scheduler, parts
from megatron_moe.training.step import connect, train_step
from megatron_moe.training.weight_average import build_average
from tests.model.offloading import on_a_cpu


def measured(flat: dict[str, Any], half_products: str, steps: int) -> dict[str, Any]:
    """Bytes by part, and the peak above them, until the update and during it: the least of so many steps after the
    first. Half-precision products are computed in that way, whatever this processor can do."""
    run = build(flat)
    pg_collection = groups.initialize(run)
    seed_everything(run)

    def host_memory(shape: Any, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        with live.labelled(HOST):
            return torch.empty(tuple(shape), dtype=dtype)

    products = mock.patch.dict(os.environ, {switches.HALF_PRODUCTS: half_products})
    with products, on_a_cpu(host_memory), LiveBytes() as live:
        model = build_model(run, pg_collection, run.derived.padded_vocab_size(run.model.vocab_size))
        optimizer = build_optimizer(run, model, pg_collection)
        scheduler = build_scheduler(run, optimizer)
        average = build_average(run, model, optimizer)
        connect(model, optimizer)
        batch = run.training.global_batch_size
        tokenizer = build_tokenizer(run.data, run.model.vocab_size)
        dataset, *_ = build_datasets(run, tokenizer, (1 + steps) * batch, 0, 0, pg_collection=pg_collection)
        batches = batch_iterators(dataset, run, pg_collection=pg_collection)
        peaks, update_peaks, held = [], [], []
        prepare = optimizer.prepare_grads

        def prepared() -> bool:
            peaks.append(live.peak)
            live.restart_peak()
            return prepare()

        optimizer.prepare_grads = prepared
        for _ in range(1 + steps):  # the first one allocates what stays
            result = train_step(
                model,
                optimizer,
                scheduler,
                batches,
                num_micro_batches=run.derived.num_microbatches(torch.distributed.get_world_size()),
                micro_batch_size=run.training.micro_batch_size,
                seq_length=run.model.seq_length,
                pg_collection=pg_collection,
                average=average,
            )
            assert result.committed
            update_peaks.append(live.peak)
            optimizer.zero_grad()
            held.append(live.live)
            live.restart_peak()
        weights = [local(parameter) for chunk in model for parameter in chunk.parameters()]
        own = {weight.untyped_storage().data_ptr() for weight in weights}
        masters = [m for part in parts(optimizer) if not part.is_stub_optimizer for m in part.get_parameters()]
        masters = [m for m in masters if m.untyped_storage().data_ptr() not in own]
        moments = [
            value
            for part in parts(optimizer)
            if not part.is_stub_optimizer
            for state in part.optimizer.state.values()
            for value in state.values()
        ]
        moments += [] if average is None else [weight.values for weight in average.weights]
    counts = result.router_update.tokens_per_expert
    return {
        "weights": storage_bytes(weights),
        "gradients": storage_bytes(p.main_grad for chunk in model for p in chunk.parameters()),
        "optimizer": storage_bytes(m for m in masters + moments if hasattr(m, "numel")), "held": min(held),
        "host": live.label_peaks[HOST], "peak": min(peaks[1:]), "update_peak": min(update_peaks[1:]),
        "counts": [one.tolist() for one in counts],
    }  # fmt: skip
