"""A whole training step of a small DeepSeek-V3, ours next to transformers': tokens a second.

    python -m benchmarks.whole_step [--dtype bf16] [--threads 2] [--rounds 12]

Both train the same model from the same weights on the same tokens: forward, backward, clipping, AdamW. Transformers'
model is the one that our converter would write, with its grouped product for the experts and torch's fused AdamW. Who
does not have our losses in the first steps does not race. Ours does all that a step of a run does: it looks for
numbers that are not finite, counts tokens, moves expert_bias (by nothing here: transformers has no such update).
Steps are interleaved.

With --mean-document-length ours races itself instead: a sequence as one document next to documents that do not see each
other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Before torch: a thread that waits must not spin on a core that another one could use.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import megatron_moe  # noqa: F401  (adapts the engine to the machine before it is imported)
from megatron_moe import platform
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build, replace
from megatron_moe.data.batches import DOCUMENTS, batch_iterators
from megatron_moe.data.datasets import build_datasets
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.hf.config import config_of
from megatron_moe.hf.families import FAMILIES
from megatron_moe.hf.mapping import mapping
from megatron_moe.io.files import replace_json
from megatron_moe.model.build import build_model
from megatron_moe.optim.optimizer import build_optimizer, build_scheduler
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.platform import cpu_half_gemm
from megatron_moe.training.step import connect, train_step
from megatron_moe_tools.models.load_model import saved_tensors

COMPARED = 3
"""Steps whose losses are compared."""
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest difference of a loss, in nats. bf16 rounds weights and activations to 2^-9, and may choose other experts."""
FAMILY = "deepseek-v3"

Step = Callable[[], float]
"""Runs a training step and returns its loss."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each contestant; exit status 1 if one trains something else."""
    args = _parse(argv)
    torch.set_num_threads(args.threads)
    run = build(settings(args))
    pg_collection = groups.initialize(run)
    try:
        return _compare(args, run, pg_collection)
    finally:
        groups.destroy()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of our run: the demo's model, one micro-batch a step."""
    return {
        **PRESETS["demo"],
        "seq_length": args.seq_length,
        "micro_batch_size": args.tokens // args.seq_length,
        "global_batch_size": args.tokens // args.seq_length,
        "bf16": args.dtype == "bf16",
        "use_distributed_optimizer": False,
        "mock_data": True,
        "vocab_size": args.vocab,
        "moe_router_bias_update_rate": 0.0,
        "weight_decay": 0.0,
        "lr_decay_style": "constant",
        "lr_warmup_iters": 0,
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.whole_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="fp32", help="default: fp32")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads (default: all cores)")
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each (default: 12)")
    parser.add_argument("--cpu-time", action="store_true", help="count processor seconds; for --threads 1")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step (default: 2048)")
    parser.add_argument("--seq-length", type=int, default=256, help="default: 256")
    parser.add_argument("--mean-document-length", type=int, metavar="TOKENS", help="race documents apart with ours")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary (default: 4096)")
    return parser.parse_args(argv)


def _compare(args: argparse.Namespace, run: Run, pg_collection: Any) -> int:
    our_step, tensors, batches = ours(run, pg_collection)
    if args.mean_document_length is not None:
        apart, *_ = ours(replace(run, reset_attention_mask=True), pg_collection, args.mean_document_length)
        ready = {"a sequence, one document": our_step, "documents apart": apart}
        for _ in range(COMPARED):
            our_step(), apart()
        _report(args, run, _race(ready, args.rounds, time.process_time if args.cpu_time else time.perf_counter))
        return 0
    contestants = {f"megatron_moe, {args.dtype}": our_step}
    contestants["transformers, fp32"] = transformers_step(run, tensors, batches(), False)
    if run.precision.bf16 and cpu_half_gemm.multiply_in_fp32(torch.empty(0, dtype=torch.bfloat16)):
        print("transformers in bf16 does not race: without instructions for it torch's products take many times fp32's")
    elif run.precision.bf16:
        contestants["transformers, autocast to bf16"] = transformers_step(run, tensors, batches(), True)
    wrong = _train_something_else(contestants, TOLERANCE[args.dtype])
    ready = {name: step for name, step in contestants.items() if name not in wrong}
    _report(args, run, _race(ready, args.rounds, time.process_time if args.cpu_time else time.perf_counter))
    return 1 if wrong else 0


def _report(args: argparse.Namespace, run: Run, seconds: dict[str, list[float]]) -> None:
    parameters = run.derived.parameter_count(run.derived.padded_vocab_size(args.vocab))
    where = torch.cuda.get_device_name() if platform.has_cuda() else f"{args.threads} threads"
    print(f"{parameters / 1e6:.2f} M parameters, {args.tokens} tokens a step, {where}", end="; ")
    print(f"load {os.getloadavg()[0]:.1f} at the end (of this and other programs)")
    _print_table(seconds, args.tokens)


def _train_something_else(contestants: dict[str, Step], tolerance: float) -> list[str]:
    """Return the names of those whose losses in the first steps are not those of the first contestant."""
    losses = {name: [step() for _ in range(COMPARED)] for name, step in contestants.items()}
    expected = next(iter(losses.values()))
    wrong = []
    for name, found in losses.items():
        apart = max(abs(one - other) for one, other in zip(found, expected, strict=True))
        print(f"{name}: losses {', '.join(f'{loss:.4f}' for loss in found)}; at most {apart:.1e} from ours")
        if not apart <= tolerance:
            wrong.append(name)
            print(f"{name} trains something else; it does not race", file=sys.stderr)
    return wrong


def _race(contestants: dict[str, Step], rounds: int, now: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds of each timed step, by contestant; a round has a step of everybody, in turning order."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            platform.synchronize()
            begin = now()
            contestants[name]()
            platform.synchronize()
            seconds[name].append(now() - begin)
    return seconds


def _print_table(seconds: dict[str, list[float]], tokens: int) -> None:
    """Print a row for each contestant; the first is ours."""
    first = next(iter(seconds.values()))
    print(f"{'':<34}{'median ms':>10}{'min ms':>9}{'tokens/s':>10}{'x ours':>9}{'(min)':>7}")
    for name, found in seconds.items():
        median = statistics.median(found)
        print(
            f"{name:<34}{1e3 * median:>10.0f}{1e3 * min(found):>9.0f}{tokens / median:>10.0f}"
            f"{median / statistics.median(first):>9.2f}{min(found) / min(first):>7.2f}"
        )
    print("x ours: its median step over ours; (min): the same of the fastest steps, for a machine with other programs.")


def ours(
    run: Run, pg_collection: Any, mean_document_length: int | None = None
) -> tuple[Step, dict[str, torch.Tensor], Callable[[], Any]]:
    """Return a step of our training, the weights it starts from, and what makes an iterator over its batches."""
    vocab = run.model.vocab_size
    assert vocab is not None
    seed_everything(run)
    model = build_model(run, pg_collection, run.derived.padded_vocab_size(vocab))
    optimizer = build_optimizer(run, model, pg_collection)
    scheduler = build_scheduler(run, optimizer)
    connect(model, optimizer)
    dataset, *_ = build_datasets(run, build_tokenizer(run.data, vocab), 10_000, 0, 0, pg_collection=pg_collection)
    batches: list[Any] = list(batch_iterators(dataset, run, pg_collection=pg_collection))
    if mean_document_length is not None:
        batches = [with_documents(batches[0], mean_document_length)]
    chunk: torch.nn.Module = model[0]
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):  # DDP, and the engine's Float16Module
        chunk = chunk.module
    tensors = {key: tensor.detach().float().clone() for key, tensor in saved_tensors(chunk).items()}

    def step() -> float:
        return train_step(
            model,
            optimizer,
            scheduler,
            batches,
            num_micro_batches=1,
            micro_batch_size=run.training.micro_batch_size,
            seq_length=run.model.seq_length,
            pg_collection=pg_collection,
        ).loss

    return step, tensors, lambda: batch_iterators(dataset, run, pg_collection=pg_collection)[0]


def with_documents(batches: Iterator[Any], mean: int) -> Iterator[Any]:
    """Yield the batches with other documents, each token but a sequence's first beginning one equally likely."""
    generator = torch.Generator().manual_seed(1)
    for batch in batches:
        shape = batch["tokens"].shape
        begins = torch.rand(shape, generator=generator) < 1 / mean
        firsts = (begins * torch.arange(shape[1])).cummax(dim=1).values
        yield {**batch, DOCUMENTS: firsts.to(batch["tokens"].device)}


def transformers_step(run: Run, tensors: dict[str, torch.Tensor], batches: Any, autocast: bool) -> Step:
    """Return a step of transformers' model with these weights, in fp32 or with its products in bf16 by autocast."""
    model = _transformers_model(run, tensors).to(platform.device()).train()
    adam = run.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), adam.lr, (adam.adam_beta1, adam.adam_beta2), adam.adam_eps, weight_decay=0.0, fused=True
    )

    def step() -> float:
        batch = next(batches)
        with torch.autocast(platform.device().type, torch.bfloat16, enabled=autocast):
            logits = model(input_ids=batch["tokens"], use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), adam.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _transformers_model(run: Run, tensors: dict[str, torch.Tensor]) -> Any:
    """Load transformers' model from a folder with these weights, as a user does."""
    from transformers import DeepseekV3ForCausalLM

    family = FAMILIES[FAMILY]
    state = {}
    for piece in mapping(run, family.names).pieces:
        block = tensors[piece.key]
        start = piece.start or (0,) * block.dim()
        for dimension, (first, size) in enumerate(zip(start, piece.transform.native_shape, strict=True)):
            block = block.narrow(dimension, first, size)
        state.update(zip(piece.hf, (one.contiguous() for one in piece.transform.to_hf(block)), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        replace_json(Path(folder, "config.json"), config_of(run, family, "float32"))
        save_file(state, Path(folder, "model.safetensors"), {"format": "pt"})
        return DeepseekV3ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )


if __name__ == "__main__":
    sys.exit(main())
