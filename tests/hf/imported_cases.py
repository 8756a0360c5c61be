"""What the ranks do in test_mapping_ranks.py: import a folder at a layout, one step, and all that it shows."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.helpers import model_cases

SEQUENCES, LENGTH = 2, 16


def flags_of(folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run that starts from the folder, as the command line makes them."""
    from megatron_moe.hf.config import filled_in

    batch = {"seq_length": LENGTH, "micro_batch_size": 1, "global_batch_size": SEQUENCES, "mock_data": True}
    return filled_in({"load_hf": folder, **batch, "train_iters": 1, "eval_iters": 0, **layout})


def batch_of(vocabulary: int) -> dict[str, torch.Tensor]:
    """Two sequences and the tokens behind them, the same for every layout."""
    tokens = torch.randint(0, vocabulary, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    mask = torch.ones(SEQUENCES, LENGTH)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": positions}


def imported(folders: list[str], layout: dict[str, Any]) -> list[dict[str, Any]]:
    """`step_of` for one folder after the other, in one set of process groups."""
    from megatron_moe.config import rules
    from megatron_moe.config.schema import build
    from megatron_moe.parallel import groups

    runs = [build(flags_of(folder, layout)) for folder in folders]
    for run in runs:
        rules.check(run, dist.get_world_size())
    pg_collection = groups.initialize(runs[0])
    return [step_of(run, pg_collection) for run in runs]


def mistaken(folders: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any] | str]:
    """`step_of` for folders whose reader says something else of some settings, or what each is refused with.

    In a world of one rank; the first folder is read rightly.
    """
    from megatron_moe.config import rules
    from megatron_moe.config.errors import ConfigError
    from megatron_moe.config.schema import build
    from megatron_moe.hf.families import FAMILIES, family_of
    from megatron_moe.hf.folder import HFFolder
    from megatron_moe.parallel import groups

    pg_collection = groups.initialize(build(flags_of(folders[0][0], {})))
    found: list[dict[str, Any] | str] = []
    for folder, changes in folders:
        family = family_of(HFFolder.open(Path(folder)).config, folder)

        def wrongly(keys: Any, read: Any = family.read, changes: dict[str, Any] = changes) -> dict[str, Any]:
            return {**read(keys), **changes}

        with mock.patch.dict(FAMILIES, {family.name: replace(family, read=wrongly)}):
            try:
                run = build(flags_of(folder, {}))
                rules.check(run, 1)
                found.append(step_of(run, pg_collection))
            except ConfigError as error:
                found.append(str(error))
    return found


def step_of(run: Any, pg_collection: Any) -> dict[str, Any]:
    """Import a folder and compute one step's losses and gradients.

    Returns:
        place: this rank's coordinates. notes, warnings: of the import. loss: of the step. logits: [T, V / TP] per
        micro-batch of this rank. choices: layer -> [T, K] per micro-batch, T being this rank's tokens. tensors and
        gradients: key -> (cuts, this rank's tensor, the part of it that it knows), as the doctor has them.
        biases: key -> the router's bias.
    """
    from dataclasses import asdict

    from megatron_moe.checkpoint.state import TrainState
    from megatron_moe.hf.config import plan_import
    from megatron_moe.hf.importing import fill
    from megatron_moe.model.build import build_model
    from megatron_moe.optim.optimizer import build_optimizer, owned_part
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.groups import seed_everything
    from megatron_moe.training.evaluate import gathered_parameters
    from megatron_moe_tools.doctor.measure import router_names

    seed_everything(run)
    chunks = build_model(run, pg_collection, run.model.vocab_size)
    optimizer = build_optimizer(run, chunks, pg_collection)
    trained = TrainState(chunks, optimizer, None, pg_collection)
    told = fill(run, plan_import(run), trained, print)
    with gathered_parameters(chunks):
        tensors = {
            place.name: (place.cuts, parameter.detach().clone(), (None, 0, parameter.numel()))
            for place, parameter in places(chunks)
        }
    biases = {
        f"{name}.mlp.router.expert_bias": router.expert_bias.detach().clone()
        for chunk in chunks
        for name, router in router_names(chunk)
        if router.expert_bias is not None
    }
    seen = _Seen(chunks)
    with seen.watching():
        loss = model_cases.forward_backward(run, chunks, pg_collection, batch_of(run.model.vocab_size))
    gradients = {
        place.name: (place.cuts, parameter.main_grad.detach().float().clone(), tuple(owned_part(optimizer, parameter)))
        for place, parameter in places(chunks)
    }
    return {
        "place": asdict(groups.rank_facts()),
        "notes": told.notes,
        "warnings": told.precision_warnings,
        "loss": loss,
        "logits": seen.logits,
        "choices": seen.choices,
        "tensors": tensors,
        "gradients": gradients,
        "biases": biases,
        "masters_follow": masters_follow(chunks, optimizer),
    }


def places(chunks: Any) -> Any:
    from megatron_moe_tools.doctor.measure import parameter_shards

    return [found for chunk in chunks for found in parameter_shards(chunk)]


def masters_follow(chunks: Any, optimizer: Any) -> bool:
    """Whether every fp32 main weight is the model's weight."""
    from megatron_moe.optim.optimizer import named_optimizer_state, owned_part

    return all(
        torch.equal(value.flatten(), owned_part(optimizer, parameter).of(parameter.detach()).flatten().float())
        for parameter, quantity, value in named_optimizer_state(chunks, optimizer)
        if quantity == "main param"
    )


class _Seen:
    """Logits and chosen experts of the forward passes that are watched."""

    def __init__(self, chunks: Any) -> None:
        from megatron_moe_tools.doctor.measure import router_names, unwrapped

        self.routers = [found for chunk in chunks for found in router_names(chunk)]
        self.models = [unwrapped(chunk) for chunk in chunks]
        self.logits: list[torch.Tensor] = []
        self.choices: dict[str, list[torch.Tensor]] = {name: [] for name, _ in self.routers}

    def watching(self) -> ExitStack:
        stack = ExitStack()
        for name, router in self.routers:
            kept = self.choices[name]
            see = lambda router, routed, kept=kept: kept.append(routed.decision.expert_ids.detach().clone())  # noqa: E731
            stack.enter_context(router.observed_by(see))
        for model in self.models:
            if model.post_process:
                # a copy: the loss works in the logits' own memory
                keep = lambda module, args, out: self.logits.append(out[0].detach().clone().flatten(0, 1))  # noqa: E731
                stack.callback(model.output_layer.register_forward_hook(keep).remove)
        return stack


def refused(folder: str, layout: dict[str, Any], mistake: str | None = None, on: int | None = None) -> str:
    """What importing a folder is refused with. mistake: made on purpose, on rank `on` alone or on all."""
    from megatron_moe.config.errors import ConfigError
    from megatron_moe.hf import importing

    with ExitStack() as stack:
        if mistake is not None and on in (None, dist.get_rank()):
            name, replacement = MISTAKES[mistake](importing)
            stack.enter_context(mock.patch.object(importing, name, replacement))
        try:
            imported([folder], layout)
        except ConfigError as error:
            return str(error)
    return ""


def _read_raises(error: Exception) -> Any:
    def of(importing: Any) -> tuple[str, Any]:
        class Reader(importing.TensorReader):
            def read(self, name: str, dtype: Any = None) -> Any:
                raise error

        return "TensorReader", Reader

    return of


def _table(change: Any) -> Any:
    """A table whose pieces were changed after the folder was held against it."""

    def of(importing: Any) -> tuple[str, Any]:
        original = importing._tasks

        def tasks(table: Any, shards: Any) -> Any:
            return original(replace(table, pieces=tuple(change(table.pieces))), shards)

        return "_tasks", tasks

    return of


def _forgets_a_box(importing: Any) -> tuple[str, Any]:
    model_shards = importing.model_shards

    def shards(trained: Any) -> Any:
        return [shard for shard in model_shards(trained) if shard.key != "decoder.layers.1.mlp.router.weight"]

    return "model_shards", shards


def _skips_the_copies(importing: Any) -> tuple[str, Any]:
    rounds = importing.in_rounds

    def without(filling: Any, *rest: Any) -> Any:
        filling.copies = []
        return rounds(filling, *rest)

    return "in_rounds", without


MISTAKES = {
    "skips the copies": _skips_the_copies,
    "forgets a box": _forgets_a_box,
    "leaves a bias out": _table(lambda pieces: [piece for piece in pieces if not piece.fp32]),
    "cannot read": _read_raises(OSError(5, "Input/output error")),
    "has a bug": _read_raises(KeyError("name")),
    "leaves one out": _table(lambda pieces: pieces[1:]),
    "writes one twice": _table(lambda pieces: [*pieces, pieces[-1]]),
}


def trained(argv: list[str]) -> dict[str, Any]:
    """A whole run from its command line; its summary."""
    from megatron_moe.config import cli
    from megatron_moe.hf.config import filled_in
    from megatron_moe.training.run import pretrain

    return pretrain(cli.parse(argv, filled_in))
