"""Recording routes and replaying them: a router's choices in training go to files, or come from files.

`RoutingTrace` records and `RecordedRoutes` replays, in a run (`Routes`, for `--moe-routing-trace-path` and
`--moe-enable-routing-replay`) or in a megatron-core program with our router. A route belongs to a layer's global
number, a sample's number in the run's order and a position. Rows travel with the tokens (`moe/routes.py`), so that no
order of passes matters. Before a step changes anything, every router has to have routed every row exactly once.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy
import torch
from torch import Tensor

from megatron_moe.checkpoint.errors import all_gather_object, on_rank_zero
from megatron_moe.config.errors import ConfigError
from megatron_moe.data.batches import TOKEN_HASHES, token_hash
from megatron_moe.engine.schedules import get_attr_wrapped_model, get_model_config
from megatron_moe.moe.router import routers
from megatron_moe.parallel.collectives import all_reduce_sum
from megatron_moe.training.callback import Callback, Step
from megatron_moe.training.metrics import raise_together
from megatron_moe.training.route_files import RouteFiles, RoutePart, RouteShape, write_part
from megatron_moe.training.step import StepResult
from megatron_moe.training.trainer import Trainer


class RouteError(RuntimeError):
    """An error for routes that are not those of the tokens, layers or passes they are used for."""


class StepRoutes:
    """The rows of a step and who routed them: what recording and replaying have in common.

    It is the `moe.routes.RouteSource` of all routers of a model on this rank.

    Args:
        model: its chunks on this rank, wrapped or not.
        shape: what routes are of; or S alone, where the rest is in the model's TransformerConfig.
    """

    balances_live = False

    def __init__(self, model: Sequence[torch.nn.Module], shape: RouteShape | int) -> None:
        if isinstance(shape, int):
            shape = RouteShape.from_engine_config(get_model_config(model[0]), shape)
        self.shape, self.routers = shape, list(routers(model))
        self.samples: list[int] = []
        self.layers: list[int] = []
        for router in self.routers:
            number, options = router.layer_number, router.options
            if number not in shape.layers or number in self.layers:
                raise ConfigError(f"routers are of layers {[*self.layers, number]}, and {shape}")
            if (options.num_experts, options.topk) != (shape.num_experts, shape.topk):
                raise ConfigError(
                    f"layer {number}: sends a token to {options.topk} of {options.num_experts} experts; routes are of "
                    f"{shape.topk} of {shape.num_experts}"
                )
            self.layers.append(number)
            router.take_routes(self)
        self._bound: Tensor | None = None

    def begin(self, samples: Sequence[int]) -> None:
        """Begin a step of these samples of this rank, in the order of their numbers, which is that of the rows."""
        self.samples = list(samples)
        rows = len(self.samples) * self.shape.seq_length
        self._seen = self._table(len(self.layers), rows)
        self._padding = self._table(rows)
        self._numbers = torch.tensor(self.samples, device=self._padding.device)

    def _table(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        device = self.routers[0].weight.device if self.routers else "cpu"
        return torch.zeros(shape, dtype=dtype, device=device)

    def rows_of(self, numbers: Tensor) -> Tensor:
        """Return the rows of tokens from their numbers in the run, int64 of any shape: sample x S + position."""
        place = torch.searchsorted(self._numbers, numbers // self.shape.seq_length)
        return place * self.shape.seq_length + numbers % self.shape.seq_length

    @contextmanager
    def micro_batch(self, samples: Sequence[int], positions: Tensor | None = None) -> Iterator[None]:
        """Bind passes in the block, forward and backward, to samples, where a program's layers hand on no tags.

        megatron-core's own MoE layer turns its padding_mask into booleans. A pass outside of a block is an error, so a
        recomputed one has to be in its micro-batch's; our layer is told by `moe.routes.tagged` rows instead.

        Args:
            positions: [S'] int64, those of this context-parallel rank; None: all.
        """
        if not set(samples) <= set(self.samples):
            raise RouteError(f"a micro-batch has samples {list(samples)}, and those of the step are {self.samples}")
        if positions is None:
            positions = torch.arange(self.shape.seq_length)
        numbers = torch.tensor(samples) * self.shape.seq_length + positions.to("cpu").unsqueeze(1)
        self._bound = self.rows_of(numbers.to(self._numbers.device))
        try:
            yield
        finally:
            self._bound = None

    @contextmanager
    def step(self, samples: Sequence[int], tokens: Tensor) -> Iterator[None]:
        """Record or replay a program's step, whose tokens [N, S] are those of this rank's samples, undivided."""
        if not len(set(samples)) == len(samples) == len(tokens):
            raise RouteError(f"samples {list(samples)} with tokens of {len(tokens)}: name each sample once")
        tokens_of = dict(zip(samples, tokens.to("cpu", torch.int64)))
        self.begin(sorted(tokens_of))
        yield
        self.finish([token_hash(sample, tokens_of[sample]) for sample in self.samples])

    def _told(self, layer: int, rows: Tensor | None, num_tokens: int) -> tuple[int, Tensor]:
        """Return the layer's place in tables, and the rows [T] of a pass."""
        if rows is None and self._bound is not None:
            rows = self._bound
            if rows.numel() > num_tokens:  # the TP rank's part of the sequence
                group = self.routers[0].groups.tp
                rows = rows.chunk(group.size())[group.rank()]
            rows = rows.reshape(-1)
        if rows is None or rows.numel() != num_tokens:
            given = "nothing" if rows is None else f"{rows.numel()} rows"
            raise RouteError(f"layer {layer}: {num_tokens} tokens are to be routed, and {given} came with them")
        return self.layers.index(layer), rows

    def expert_ids(self, layer: int, rows: Tensor | None, num_tokens: int, live: Callable[[], Tensor]) -> Tensor | None:
        """See `moe.routes.RouteSource`: the gate chooses."""
        return None

    def see(self, layer: int, rows: Tensor | None, expert_ids: Tensor, is_padding: Tensor | None) -> None:
        """See `moe.routes.RouteSource`."""
        place, rows = self._told(layer, rows, len(expert_ids))
        self._seen[place].index_add_(0, rows, torch.ones_like(rows, dtype=torch.uint8))
        if is_padding is not None:
            self._padding.index_copy_(0, rows, is_padding.to(torch.uint8))

    def finish(self, hashes: Sequence[int] | None) -> None:
        """End the step. Collective over the ranks that share its samples.

        Args:
            hashes: `token_hash` of each sample; None on a rank that does not know the tokens.

        Raises:
            RouteError: a router has not routed each row once.
        """
        if not self.layers:
            return
        group = self.routers[0].groups.tp_cp
        self._seen, self._padding = all_reduce_sum(self._seen, group), all_reduce_sum(self._padding, group)
        wrong = (self._seen != 1).nonzero()
        if len(wrong):
            place, row = wrong[0].tolist()
            raise RouteError(f"{self._where(place, row)} was routed {int(self._seen[place, row])} times in one step")

    def _where(self, place: int, row: int) -> str:
        sample, position = divmod(row, self.shape.seq_length)
        return f"layer {self.layers[place]}, sample {self.samples[sample]}, position {position}"

    def close(self) -> None:
        """Let the routers go by their scores again."""
        for router in self.routers:
            router.take_routes(None)


class RecordedRoutes(StepRoutes):
    """Routes that are replayed: the experts of files, with weights and gradients from the live scores.

    Args:
        path: a folder or a file, see `route_files.RouteFiles`.
        live: whether the gate chooses where no route is recorded; else that is an error.
        balances_live: see `moe.routes.RouteSource`.

    Attributes:
        agreeing: [L, 2] int64, of the choices replayed in the first step those that the gate would make too, and all.
            Routes of another layer or position, which no header tells, agree by chance alone: K / E.
    """

    def __init__(
        self,
        path: str | Path,
        model: Sequence[torch.nn.Module],
        shape: RouteShape | int,
        live: bool = False,
        balances_live: bool = False,
    ) -> None:
        self.balances_live, self.live = balances_live, live
        super().__init__(model, shape)
        self.agreeing = self._table(len(self.layers), 2, dtype=torch.int64)
        self._begun = 0
        self.files = RouteFiles(Path(path), self.shape)

    def begin(self, samples: Sequence[int]) -> None:
        """Begin a step and read its routes.

        Raises:
            ConfigError: some are missing, damaged or another model's.
        """
        super().begin(samples)
        found = self.files.take(samples, self.layers)
        if not self.live:
            found.require_all(self.files.path)
        self._token_hash = found.token_hash
        self._begun += 1
        routes, recorded = torch.from_numpy(found.routes), torch.from_numpy(found.recorded)
        self._routes = routes.flatten(0, 1).transpose(0, 1).to(self._seen.device)  # [L, R, K]
        self._recorded = recorded.flatten(0, 1).t().to(self._seen.device)

    def expert_ids(self, layer: int, rows: Tensor | None, num_tokens: int, live: Callable[[], Tensor]) -> Tensor | None:
        """See `moe.routes.RouteSource`: the recorded experts, in the order in which they were recorded."""
        place, rows = self._told(layer, rows, num_tokens)
        ids = self._routes[place].index_select(0, rows).long()
        recorded = self._recorded[place].index_select(0, rows).unsqueeze(1)
        if self._begun == 1:
            same = (ids.unsqueeze(2) == live().unsqueeze(1)).any(dim=2)
            self.agreeing[place] += torch.stack(((same & recorded).sum(), recorded.sum() * ids.shape[1]))
        return torch.where(recorded, ids, live()) if self.live else ids

    def finish(self, hashes: Sequence[int] | None) -> None:
        """End the step.

        Raises:
            RouteError: a router has not routed each row once, a sample has other tokens, or a route is missing.
        """
        super().finish(hashes)
        for sample, here in zip(self.samples, hashes or ()):
            there = self._token_hash.get(sample, here)
            if here != there:
                raise RouteError(
                    f"sample {sample} has other tokens than in {self.files.path}: hash {here} here, {there} there"
                )
        missing = (~self._recorded & (self._padding == 0)).nonzero()
        if len(missing) and not self.live:
            raise RouteError(
                f"{self._where(*missing[0].tolist())} has no route in {self.files.path}; "
                "--moe-routing-replay-missing live lets the gate choose"
            )


class RoutingTrace(StepRoutes):
    """Routes that are recorded, those of a step by one file of each rank that shares its samples with no other.

    Args:
        folder: where `begin` has a folder made for each step.
        replayed: what is replayed at the same time, if anything.

    Attributes:
        steps: how many have begun. A program that resumes sets those of its checkpoint, and removes later ones' files.
    """

    def __init__(
        self,
        folder: str | Path,
        model: Sequence[torch.nn.Module],
        shape: RouteShape | int,
        replayed: RecordedRoutes | None = None,
    ) -> None:
        self.folder, self.replayed = Path(folder), replayed
        self.balances_live = replayed is not None and replayed.balances_live
        self.steps = 0
        super().__init__(model, shape)

    def _file(self) -> Path:
        """Return the path of the step's file of this rank."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return self.folder / f"step-{self.steps:08d}" / f"rank-{rank:05d}.safetensors"

    @contextmanager
    def step(self, samples: Sequence[int], tokens: Tensor) -> Iterator[None]:
        """Record a program's step, see `StepRoutes.step`.

        Raises:
            RouteError: another run's step would be overwritten.
        """
        with super().step(samples, tokens):
            if self._file().exists():
                raise RouteError(f"{self._file()}: is there; name another folder, or set `steps` where a run goes on")
            yield

    def begin(self, samples: Sequence[int]) -> None:
        """Begin a step."""
        super().begin(samples)
        self.steps += 1
        self._ids = self._table(len(self.layers), len(self._padding), self.shape.topk, dtype=torch.int16)
        if self.replayed is not None:
            self.replayed.begin(samples)

    def expert_ids(self, layer: int, rows: Tensor | None, num_tokens: int, live: Callable[[], Tensor]) -> Tensor | None:
        """See `moe.routes.RouteSource`: the replayed experts, or those of the gate."""
        if self.replayed is None:
            return None
        return self.replayed.expert_ids(layer, rows, num_tokens, live)

    def see(self, layer: int, rows: Tensor | None, expert_ids: Tensor, is_padding: Tensor | None) -> None:
        """See `moe.routes.RouteSource`."""
        super().see(layer, rows, expert_ids, is_padding)
        place, rows = self._told(layer, rows, len(expert_ids))
        self._ids[place].index_copy_(0, rows, expert_ids.to(torch.int16))
        if self.replayed is not None:
            self.replayed.see(layer, rows, expert_ids, is_padding)

    def finish(self, hashes: Sequence[int] | None) -> None:
        """End the step, and write its routes.

        Raises:
            RouteError: a router has not routed each row once.
        """
        super().finish(hashes)
        if not self.layers:
            return
        group = self.routers[0].groups.tp_cp
        ids = all_reduce_sum(self._ids.view(torch.uint8), group).view(torch.int16)  # each row is one rank's
        if self.replayed is not None:  # behind the collective: one rank alone may find other tokens
            self.replayed.finish(hashes)
        if group.rank() != 0 or hashes is None:
            return
        shape = (len(self.layers), len(self.samples), self.shape.seq_length)
        part = RoutePart(
            samples=numpy.array(self.samples, numpy.int64),
            token_hash=numpy.array(hashes, numpy.int64),
            layers=numpy.array(self.layers, numpy.int64),
            routes=ids.view(*shape, -1).permute(1, 2, 0, 3).cpu().numpy(),
            recorded=(self._padding == 0).view(shape[1:]).cpu().numpy(),
        )
        write_part(self._file(), self.shape, part)


class Routes(Callback):
    """Records and replays the routes of a run's training steps, as its flags say; evaluation takes no part."""

    source: StepRoutes | None = None
    unreported: RecordedRoutes | None = None

    def attach(self, trainer: Trainer) -> None:
        """Prepare the sources. Collective over all ranks."""
        super().attach(trainer)
        run, model = trainer.run, trainer.trained.model
        moe, replayed = run.moe, None
        if not run.derived.keeps_routes or run.training.skip_train:
            return
        shape = RouteShape.from_run(run)
        if moe.moe_enable_routing_replay is not None:
            live, balances_live = moe.moe_routing_replay_missing == "live", moe.moe_routing_replay_counts == "live"
            self.source = self.unreported = replayed = RecordedRoutes(
                moe.moe_enable_routing_replay, model, shape, live, balances_live
            )
        if run.logging.moe_routing_trace_path is not None:
            self.source = trace = RoutingTrace(run.logging.moe_routing_trace_path, model, shape, replayed)
            trace.steps = trainer.progress.iteration
            on_rank_zero(partial(self._make_room, trace))

    def _make_room(self, trace: RoutingTrace) -> None:
        """Remove the steps that a run makes again after its checkpoint; a new run keeps older ones as NAME.previous."""
        done, folder = f"step-{trace.steps:08d}", trace.folder
        again = [step for step in folder.glob("step-" + 8 * "[0-9]") if step.name > done]
        if again and trace.steps == 0:
            previous = folder.with_name(f"{folder.name}.previous")
            shutil.rmtree(previous, ignore_errors=True)
            folder.rename(previous)
            return
        for step in again:
            shutil.rmtree(step)

    def before_step(self, step: Step) -> None:
        """Begin the step, with the samples that this rank will read. Collective over all ranks."""
        if self.source is None:
            return
        trained, size = self.trainer.trained, self.trainer.run.training.micro_batch_size
        samples: list[int] = []
        for number in range(step.num_micro_batches):
            first = step.first_sample + size * (
                number * trained.pg_collection.dp.size() + trained.pg_collection.dp.rank()
            )
            samples += range(first, first + size)
        failure = None
        try:
            self.source.begin(samples)
        except (ConfigError, OSError) as error:
            failure = error
        raise_together(failure)
        for chunk in trained.model:
            get_attr_wrapped_model(chunk, "rows_of_step", return_model_obj=True).rows_of_step = self.source.rows_of

    def before_update(self, step: Step) -> None:
        """End the step: nothing but gradients and the expert bias has changed. Collective over all ranks."""
        if self.source is None:
            return
        hashes: list[int] | None = None
        for batch in step.micro_batches[0]:
            of_batch = batch.get(TOKEN_HASHES)
            if of_batch is not None:
                hashes = [*(hashes or ()), *of_batch.tolist()]
        failure = None
        try:
            self.source.finish(hashes)
        except (ConfigError, RouteError, OSError) as error:
            failure = error
        raise_together(failure)

    def after_step(self, step: Step, result: StepResult) -> None:
        """Report once how many of the replayed choices the gates would make too. Collective over all ranks."""
        replayed, self.unreported = self.unreported, None
        if replayed is None:
            return
        same: Counter[int] = Counter()
        every: Counter[int] = Counter()
        for found in all_gather_object(list(zip(replayed.layers, replayed.agreeing.tolist()))):
            for layer, (agreeing, replayed_there) in found:
                same[layer] += agreeing
                every[layer] += replayed_there
        shares = sorted((same[layer] / every[layer], layer) for layer in +every)
        if shares:
            least, layer = shares[0]
            chance = replayed.shape.topk / replayed.shape.num_experts
            self.trainer.reporter.message(
                f"of the replayed choices the gates would make {same.total() / every.total():.1%}; in layer {layer}, "
                f"where they agree least, {least:.1%} (by chance {chance:.1%})"
            )

    def close(self) -> None:
        """Let the routers go by their scores again."""
        if self.source is not None:
            self.source.close()
