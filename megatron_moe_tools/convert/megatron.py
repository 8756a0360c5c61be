"""Checkpoints of Megatron-LM as source, and in its format torch_dist as sink."""

from __future__ import annotations

import io
import itertools
import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_moe.checkpoint import folder, index, origin, step_reader
from megatron_moe.checkpoint.step_reader import AVERAGE
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.fields import all_fields
from megatron_moe.config.schema import flatten, replace
from megatron_moe.hf.folder import ALLOW, CERTIFICATE
from megatron_moe.hf.tensors import dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.files import write_bytes
from megatron_moe.io.hashing import FileEntry
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.certificate import Row, expected, require_same
from megatron_moe_tools.convert.native import NativeSource, TorchDistSink, native_state
from megatron_moe_tools.convert.pipeline import (
    EXPERTS,
    OPTIMIZER,
    Block,
    ConversionOptions,
    ConversionSource,
    Record,
    blocks_of,
    model_words,
)
from megatron_moe_tools.megatron_lm import dialect
from megatron_moe_tools.megatron_lm.checkpoint import (
    EMBEDDING,
    LegacyTorch,
    MegatronCheckpoint,
    Part,
    TorchDist,
    tensors_of,
)
from megatron_moe_tools.models.source import PRECISION_FLAGS, ModelSource

_NAME_OF = operator.attrgetter("name")
_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: None}
_STEP = re.compile(r"iter_\d{7,}|release", re.ASCII)
_READ = {"args", "iteration", "checkpoint_version", "content_metadata", "optimizer"}
"""The plain values of a checkpoint of Megatron-LM that are read."""


# ---- The source.


def open_checkpoint(path: Path, ckpt_step: int | None) -> MegatronCheckpoint:
    """Open the step that the folder's tracker or `ckpt_step` names, or `path`. Raises ConfigError: it is not read."""
    if any(path.glob("mp_rank_*")) or (path / ".metadata").is_file():
        if ckpt_step is not None and path.name != folder.step_folder(path, ckpt_step).name:
            raise ConfigError(f"--ckpt-step {ckpt_step}: --load {path} is one step; leave one of them out")
        step = path
    elif ckpt_step is not None:
        step = folder.step_folder(path, ckpt_step)
    elif (path / folder.LATEST).is_file():
        named = (path / folder.LATEST).read_text(errors="replace").strip()[:40]
        if named != "release" and not re.fullmatch(r"\d{1,12}", named):
            raise ConfigError(f"--load {path}: {folder.LATEST} names {named!r}, which is no step; give --ckpt-step")
        step = path / "release" if named == "release" else folder.step_folder(path, int(named))
    else:
        raise ConfigError(f"--load {path}: has no {folder.LATEST}; give --ckpt-step, or one iter_* folder")
    if not step.is_dir():
        there = ", ".join(sorted(filter(_STEP.fullmatch, os.listdir(path)))) or "none"
        raise ConfigError(f"--load {path}: has no {step.name}; there are: {there}")
    if any(step.glob("mp_rank_*")):
        return LegacyTorch(step)
    if not (step / ".metadata").is_file():
        raise ConfigError(
            f"--load {step}: is no step of Megatron-LM's: it has neither .metadata (--ckpt-format torch_dist) nor "
            "mp_rank_* (--ckpt-format torch)"
        )
    backend = "torch_dcp"
    if (step / "metadata.json").is_file():
        backend = str(folder.read_json(step / "metadata.json").get("sharded_backend"))
    if backend != "torch_dist":
        raise ConfigError(
            f"--load {step}: --ckpt-format {backend} is not read; torch_dist and torch are: load it with Megatron-LM "
            "and save it with --ckpt-format torch_dist"
        )
    return TorchDist(step)


class MegatronSource(ConversionSource):
    """A checkpoint of Megatron-LM. `given` are settings of the command line by field, which go before its own.

    Raises ConfigError: the model is none of those here, or the tensors are not those of its arguments.
    """

    kind: ClassVar[str] = "Megatron-LM"

    def __init__(self, checkpoint: MegatronCheckpoint, options: ConversionOptions, given: dict[str, Any]) -> None:
        super().__init__(checkpoint.path, options)
        self.checkpoint, self.given = checkpoint, given
        where, rows = f"--load {checkpoint.path}", checkpoint.vocabulary_rows
        if rows is None:
            raise ConfigError(f"{where}: has no tensor {EMBEDDING}: it is not a GPT model of megatron-core")
        self.run, notes = dialect.run_of(checkpoint.args, given, rows, where)
        self.notes += [*notes, *checkpoint.notes]
        self._doubt(checkpoint.doubts)
        weights, self.fp32 = tensors_of(self.run)
        self.contents = checkpoint.contents(weights)
        if options.dtype is None:
            stored: dict[str, list[str]] = {}
            for key in weights:
                if key not in self.fp32:
                    for part in self.contents.parts.get(key, ()):
                        stored.setdefault(part.dtype, []).append(part.name)
            if len(stored) != 1 or not stored.keys() <= PRECISION_FLAGS.keys():
                examples = "; ".join(f"{name}: {len(parts)}, {parts[0]}" for name, parts in stored.items()) or "none"
                raise ConfigError(
                    f"{where}: its weights are of {len(stored)} dtypes, and a model here has one ({examples}); give "
                    "the one that all are to have: --dtype {bf16,fp16,fp32}"
                )
        self.dtype: torch.dtype = options.dtype or getattr(torch, next(iter(stored)))
        self.updates = self._updates(where)
        self.shapes = dict(weights)
        if self.updates is not None:
            half = self.dtype != torch.float32
            self.shapes |= dialect.optimizer_keys(weights, self.fp32, half=half)
            self.iteration = checkpoint.iteration
        self._require_complete(weights, where)
        self.run = replace(self.run, **PRECISION_FLAGS[dtype_name(self.dtype)])
        if self.updates is not None:
            self.run = replace(self.run, **dialect.optimizer_settings(checkpoint.args))
            self.common = {"optimizer": dialect.plain_values(self.run, self.updates)}
        self.inputs = dict(checkpoint.files)
        self.identity = {"given": dict(zip(given, map(str, given.values())))}
        if (self.path.parent / CERTIFICATE).is_file():  # a conversion wrote the step
            listed = folder.read_json(self.path.parent / CERTIFICATE)["output"]["files"]
            for name in self.inputs:
                if (entry := listed.get(f"{self.path.name}/{name}")) is not None:
                    self.listed[name] = entry
        self.notes.append("random states are left out: a run makes new ones from --seed")
        kept = "weights alone"
        if self.updates is not None:
            kept = f"with the optimizer after {self.updates} updates"
        self.summary = f"{model_words(self.run, f'--ckpt-format {checkpoint.form}', dtype_name(self.dtype))}; {kept}"

    def _require_complete(self, weights: dict[str, Shape], where: str) -> None:
        """Check that the checkpoint has exactly the tensors of the model, each element once."""
        contents, wanted = self.contents, dict(self.shapes)
        if self.updates is not None:  # the optimizer may have more, such as main weights of what is fp32
            for key in contents.parts:
                if (weight := dialect.weight_of(key)) in weights:
                    wanted[key] = weights[weight]
        wrong = [*contents.wrong, *map("missing: {}".format, sorted(wanted.keys() - contents.parts.keys()))]
        for key, parts in sorted(contents.parts.items()):
            boxes = list(map(operator.attrgetter("start", "shape"), parts))
            if key not in wanted:
                if self.updates is not None or not key.startswith(OPTIMIZER):
                    wrong.append(f"the model of its arguments has no {key} ({parts[0].name})")
            elif defect := certificate.uncovered(boxes, wanted[key]):
                wrong.append(f"{key} ({parts[0].name}): {defect}")
        if wrong:
            raise ConfigError(listing(f"{where}: its tensors are not those of the model of its arguments:", wrong))

    def _doubt(self, doubts: Iterable[str]) -> None:
        """Refuse a checkpoint whose files may be those of other ranks, or warn where that is allowed."""
        for words in doubts:
            if not self.options.allow_suspicious_weights:
                raise ConfigError(f"--load {self.path}: {words}; bring files back, or take them as they are: {ALLOW}")
            self.warnings.append(f"WARNING: {words}: taken as it is")

    def _updates(self, where: str) -> int | None:
        """Return the number of the optimizer's updates, and None where it is left out or not there."""
        keys = [key for key in self.contents.parts if key.startswith(OPTIMIZER)]
        if not (keys or self.contents.unmapped):
            self.notes.append("it has no optimizer: weights alone are converted")
            return None
        if self.options.no_optim:
            self.notes.append("--no-optim: the optimizer's state is left out")
            return None
        if self.contents.unmapped:
            raise ConfigError(
                f"{where}: its optimizer is stored by the layout that wrote it ({self.contents.unmapped[0]}), not by "
                "weights; save it with Megatron-LM's --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, or "
                f"{dialect.WITHOUT}"
            )
        _require_convertible(self.options.dtype, self.dtype, where)
        if self.dtype == torch.float32:  # the main weights of an fp32 run are its weights, which it may store once more
            mains = f"{dialect.STATE}{dialect.MAIN}."
            for key in keys:
                if key.startswith(mains):
                    again = self.contents.copies.setdefault(key.removeprefix(mains), [])
                    again.extend(self.contents.parts.pop(key))
        return dialect.updates_of(self.checkpoint.common, where)

    def read(self, block: Block) -> tuple[Tensor, Row]:
        parts, copies = self._parts[block.place], self._copies.get(block.place, ())
        result, entries = torch.empty(block.shape, dtype=block.dtype), []
        for part in parts:
            shown = {"start": list(part.start), "shape": list(part.shape), "dtype": part.dtype}
            entry: Row = {"name": part.name, **shown}
            values = certificate.taken(part.read(), block.dtype, entry, part.name, str(self.path))
            result[_within(part.start, part.shape, block.start)] = values
            entries.append(entry)
        for part in copies:
            again = certificate.cast(part.read(), block.dtype, part.name)
            if not torch.equal(again, result[_within(part.start, part.shape, block.start)]):
                raise ConfigError(
                    f"{self.path}: {part.name} differs from the same numbers of {block.key} in another place, which "
                    "are one tensor of the model"
                )
        native = certificate.native_entry(block.key, block.start, result)
        row = {"native": native, "cast": certificate.cast_name(entries, block.dtype), "megatron": entries}
        return result, row

    def require_coverage(self, rows: list[Row]) -> None:
        used, first = [], dict[str, str]()
        repeated = []
        for row in rows:
            key = row["native"]["key"]
            for entry in row["megatron"]:
                used.append((key, entry["name"], tuple(entry["start"])))
                if len(entry["shape"]) < 2 or key.startswith(OPTIMIZER):
                    continue
                place = f"{entry['name']} (from {entry['start']} on)"
                other = first.setdefault(entry["sha256"], place)
                if other != place:
                    repeated.append(f"{place} equals {other}, as if a rank's file or an expert were there twice")
        wanted = set[tuple[str, str, Shape]]()
        for key in self.shapes:
            wanted.update((key, part.name, part.start) for part in self.contents.parts[key])
        wrong = [f"{name} ({key})" for key, name, _ in sorted(wanted.symmetric_difference(used))]
        if wrong or len(used) != len(wanted):
            raise ConfigError(listing(f"{self.path}: not every tensor is converted exactly once:", wrong))
        self._doubt(repeated)

    def require_made_back(self, row: Row, block: Tensor) -> None:
        native = row["native"]
        for entry in row["megatron"]:
            values = block[_within(entry["start"], entry["shape"], native["start"])]
            require_same(sha256(values), expected(entry), entry["name"], f"{native['key']} gives another one")

    def step_blocks(self) -> list[Block]:
        for key in sorted(self.fp32):
            for part in self.contents.parts[key]:
                kept = "converted as it is and kept in float32 from now on"
                self.warn_if_rounded(part.name, getattr(torch, part.dtype), kept)
        blocks = []
        for key, shape in self.shapes.items():
            in_fp32 = key in self.fp32 or key.startswith(dialect.STATE)
            blocks += blocks_of(key, shape, torch.float32 if in_fp32 else self.dtype)
        self._parts = self._by_block(self.contents.parts)
        self._copies = self._by_block(self.contents.copies)
        return blocks

    def _by_block(self, parts: dict[str, list[Part]]) -> dict[tuple[str, Shape], list[Part]]:
        """Return the parts of each block: a whole tensor's, or an expert's."""
        found: dict[tuple[str, Shape], list[Part]] = {}
        for key in self.shapes:
            for part in parts.get(key, ()):
                start = [0] * len(part.start)
                if key.endswith(EXPERTS):
                    start[0] = part.start[0]
                found.setdefault((key, tuple(start)), []).append(part)
        return found

    def step_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is known of the run that wrote it: its model, what its optimizer's groups say, how far it was."""
        known = {name for name, field in all_fields().items() if field.section in ("model", "moe")}
        known |= {"bf16", "fp16"}
        form, samples = self.checkpoint.form, self.checkpoint.consumed_samples
        about = {"form": form, "iteration": self.checkpoint.iteration, "samples": samples}
        state = {**native_state(self.run, self.warnings), origin.MEGATRON: about}
        if self.updates is not None:
            known |= dialect.optimizer_settings(self.checkpoint.args).keys()
            state |= {"iteration": self.iteration, "consumed_samples": samples}
            state |= {"has_optimizer": True, "scheduler": dialect.schedule_after(self.run, self.iteration)}
        return {name: value for name, value in flatten(self.run).items() if name in known}, state

    def facts(self) -> dict[str, Any]:
        dropped = dict(self.contents.dropped)
        if self.updates is None:
            for key, parts in self.contents.parts.items():
                if key.startswith(OPTIMIZER):
                    dropped |= dict.fromkeys(map(_NAME_OF, parts), "the optimizer's")
            dropped |= dict.fromkeys(self.contents.unmapped, "the optimizer's")
        for name in sorted(map(str, self.checkpoint.common.keys() - _READ)):
            if not re.fullmatch(r"model\d*", name):
                dropped[name] = "plain values of a run: its successor has its own, by its flags"
        return {
            "format": self.checkpoint.form,
            "dtype": dtype_name(self.dtype),
            "optimizer_updates": self.updates,
            "iteration": self.checkpoint.iteration,
            "dropped": dict(sorted(dropped.items())),
            "copies": sorted(map(_NAME_OF, itertools.chain(*self.contents.copies.values()))),
            "settings_given": sorted(self.given),
        }


def _require_convertible(given: torch.dtype | None, dtype: torch.dtype, where: str) -> None:
    """Refuse to convert an optimizer of weights that are cast, or whose loss scale is left out."""
    if given is not None:
        raise ConfigError(f"--dtype: the optimizer's main weights belong to weights of one dtype; {dialect.WITHOUT}")
    if dtype == torch.float16:
        raise ConfigError(f"{where}: has an optimizer of fp16, whose loss scale is not converted; {dialect.WITHOUT}")


def _within(start: Iterable[int], shape: Iterable[int], first: Iterable[int]) -> tuple[slice, ...]:
    """Return a box of a tensor as slices of a block of it that begins at `first`."""
    return tuple(slice(a - b, a - b + n) for a, b, n in zip(start, first, shape))


# ---- The sink.


_NOT_CONVERTED = {
    *("window_size", "softmax_type", "softmax_scale", "qk_layernorm_after_rotation"),
    *("quick_geglu", "glu_linear_offset", "activation_func_clamp_value"),
    *("embedding_multiplier", "residual_multiplier", "logits_scaling"),
}


class MegatronSink(TorchDistSink):
    """A checkpoint that Megatron-LM loads, in its format torch_dist.

    transformer_impl: whose layers it is to be loaded into, Transformer Engine's or local ones. expert_ranks: how many
    ranks experts are spread over there, which decides what its optimizer is. Raises ConfigError: Megatron-LM does not
    have such a model or optimizer.
    """

    kind: ClassVar[str] = "Megatron-LM"

    def __init__(
        self, source: NativeSource, model: ModelSource, transformer_impl: str, expert_ranks: int | None
    ) -> None:
        super().__init__(source)
        self.source: NativeSource = source
        self.options, self.impl, self.expert_ranks = source.options, transformer_impl, expert_ranks
        source.identity = {"transformer_impl": transformer_impl, "expert_ranks": expert_ranks}
        self.run = source.with_stored_padding(model.run)
        run, wrong = self.run, []  # settings that Megatron-LM computes otherwise and has no argument for
        if run.moe.moe_router_num_groups is not None and run.moe.moe_router_group_score != "megatron":
            best = run.moe.moe_router_topk // (run.moe.moe_router_group_topk or 1)
            softmax_after = run.moe.moe_router_score_function == "softmax" and not run.moe.moe_router_pre_softmax
            if run.moe.moe_router_group_score != "top2" or best != 2 or softmax_after:
                wrong.append(f"--moe-router-group-score {run.moe.moe_router_group_score}: it ranks groups otherwise")
        default = replace(run, moe_router_norm_topk_prob=None).derived.norm_topk_prob
        if run.moe.num_experts is not None and run.derived.norm_topk_prob != default:
            wrong.append(f"--moe-router-norm-topk-prob {run.derived.norm_topk_prob}: it takes {default} for this one")
        if run.moe.moe_router_enable_expert_bias and run.moe.moe_router_score_function != "sigmoid":
            wrong.append("--moe-router-enable-expert-bias: it has one for sigmoid scores alone")
        if dialect.stretched_there(run) is None:
            wrong.append(f"--rope-type {run.model.rope_type}: it has no such rotary embedding, or not these settings")
        if run.model.qk_layernorm_across_heads:
            wrong.append("--qk-layernorm-across-heads: it normalises each head")
        if run.model.reordered_norm:
            wrong.append("--reordered-norm: its norms are before attention and MLP")
        if run.model.dsa_indexer_topk is not None:
            wrong.append(f"--dsa-indexer-topk {run.model.dsa_indexer_topk}: the step has no weights of the indexer")
        if wrong:
            raise ConfigError(listing(f"--load {source.path}: is a model that Megatron-LM does not have:", wrong))
        fields = all_fields()
        said = ((fields[name], value) for name, value in flatten(run).items() if name in _NOT_CONVERTED)
        apart = [field.typed(value) for field, value in said if value != field.default]
        if run.model.add_bias_linear and run.moe.num_experts is not None:
            apart.append("--add-bias-linear")
        if apart:
            raise ConfigError(f"--load {source.path}: {', '.join(apart)}: such models are not written for Megatron-LM")
        self.weights, self.fp32 = tensors_of(self.run)
        head = f"--load {source.path}: its tensors are not those of its configuration:"
        certificate.require_shapes(source.weights, self.weights, head, "no tensor of its configuration")
        found = set(map(self._dtype, self.weights.keys() - self.fp32))
        if len(found) != 1:
            raise ConfigError(
                f"--load {source.path}: its weights are of {len(found)} dtypes, and Megatron-LM has one for all; give "
                "it: --dtype {bf16,fp16,fp32}"
            )
        self.dtype = found.pop()
        self.continued, self.name = None, dialect.RELEASE
        if source.keeps_optimizer:
            self.continued, self.name = self._continued(), source.path.name
        empty = io.BytesIO()
        torch.save([None], empty)  # what a layer's extra state is without FP8, as the engine stores it
        source.values = dict.fromkeys(dialect.extra_states(self.weights), empty.getvalue())
        self.files = self.planned(self._blocks())
        kept = "weights alone: Megatron-LM starts at iteration 0"
        if self.continued is not None:
            kept = f"with the optimizer of iteration {source.iteration}, for --use-distributed-optimizer"
            if expert_ranks is not None:
                kept += f" and --expert-model-parallel-size {'above 1' if expert_ranks > 1 else '1'}"
        source.notes.append(f"for --transformer-impl {transformer_impl} there; {kept}")
        self.summary = model_words(self.run, "--ckpt-format torch_dist", dtype_name(self.dtype))

    def _continued(self) -> dialect.Continued:
        """Return what a run goes on from there besides the weights; the run takes the optimizer's settings."""
        source, config, state = self.source, self.source.config, self.source.state
        where, without = f"--load {source.path}", dialect.WITHOUT
        _require_convertible(self.options.dtype, self.dtype, where)
        if (kind := config.get("optimizer", "adam")) != "adam":
            raise ConfigError(f"{where}: has the state of --optimizer {kind}, which is not converted; {without}")
        ranks = self.expert_ranks
        if self.run.moe.num_experts is None:
            ranks = 1
        if ranks is None:
            raise ConfigError(
                f"{where}: has the optimizer's state, and Megatron-LM has one optimizer where each rank has all "
                "experts and two where not: say how many ranks experts are spread over there, "
                f"--expert-model-parallel-size N, or {without}"
            )
        if ranks < 1:
            raise ConfigError(f"--expert-model-parallel-size {ranks}: must be at least 1")
        found = dialect.optimizer_settings(config)
        if missing := sorted(set(dialect.SETTINGS) - found.keys()):
            raise ConfigError(f"{where}: its {folder.CONFIG} has no {' and no '.join(missing)}, as it needs; {without}")
        self.run = replace(self.run, **found)
        stored = {}
        for key, shape in source.stored.items():
            if key.startswith(OPTIMIZER) and not key.startswith(AVERAGE):
                stored[key] = shape
        wanted = dialect.optimizer_keys(self.weights, self.fp32, half=self.dtype != torch.float32)
        head = f"{where}: its tensors are not those of its configuration:"
        certificate.require_shapes(stored, wanted, head, "no tensor of its configuration")
        if state.get(folder.HAS_AVERAGE):
            source.notes.append("the average of the weights is left out: Megatron-LM has none")
        samples = int(state["consumed_samples"])
        batch = config.get("global_batch_size") or samples // max(source.iteration, 1)
        updates = dialect.updates_of(step_reader.read_file(source.path, step_reader.COMMON), where)
        return dialect.Continued(source.iteration, samples, updates, state["scheduler"], max(int(batch), 1), ranks > 1)

    def _dtype(self, key: str) -> torch.dtype:
        if key in self.fp32 or key.startswith(OPTIMIZER):
            return torch.float32
        return self.options.dtype or self.source.reader.dtype(key)

    def _blocks(self) -> list[Block]:
        shapes = dict(self.weights)
        if self.continued is not None:
            # Megatron-LM's distributed optimizer has main weights of fp32 weights too, and asks for them.
            shapes |= dialect.optimizer_keys(self.weights, self.fp32, half=True)
        blocks, self.source.shapes = [], {}
        for key, shape in shapes.items():
            if self.dtype == torch.float32 and key.startswith(f"{dialect.STATE}{dialect.MAIN}."):
                blocks += blocks_of(dialect.weight_of(key), shape, torch.float32, copy=key)
            else:
                blocks += blocks_of(key, shape, self._dtype(key))
                self.source.shapes[key] = shape
        self._copied = {dialect.weight_of(block.copy): shapes[block.copy] for block in blocks if block.copy is not None}
        return blocks

    def placed(self, block: Block) -> tuple[str, Shape, Shape, Shape]:
        name = dialect.name_there(block.copy or block.key, self.run, self.impl)
        whole = dialect.shape_there(block.key, self.weights[dialect.weight_of(block.key)])
        start = (block.start[0], 0, 0) if block.key.endswith(EXPERTS) else block.start
        return name, whole, start, dialect.shape_there(block.key, block.shape)

    def completed(self, row: Row, block: Block, tensor: Tensor) -> Row:
        name, _, start, shape = self.placed(block)
        box = {"start": list(start), "shape": list(shape), "dtype": dtype_name(tensor.dtype)}
        row["megatron"] = [{"name": name, **box, "sha256": expected(row["native"])}]
        if block.copy is not None:
            row["again"] = True
        return row

    def require_coverage(self, rows: list[Row]) -> None:
        once, again = list[Row](), list[Row]()
        for row in rows:
            if "again" in row:
                again.append(row)
            else:
                once.append(row)
        super().require_coverage(once)
        certificate.require_coverage(again, (), self._copied, str(self.source.path))

    def finish(self, output: Path, records: list[Record], inputs: dict[str, FileEntry]) -> dict[str, FileEntry]:
        half, continued = _HALF[self.dtype], self.continued
        common = dialect.common(self.run, transformer_impl=self.impl, half=half, continued=continued)
        files = self.write_format(output / self.name, records, common)
        self.stored_index = index.read(output / self.name, files)
        result = {f"{self.name}/{name}": entry for name, entry in files.items()}
        latest = dialect.RELEASE
        if continued is not None:
            latest = str(self.source.iteration)
        result[folder.LATEST] = write_bytes(output / folder.LATEST, latest.encode())
        return result

    def facts(self, rows: list[Row]) -> dict[str, Any]:
        dropped = sorted(self.source.stored.keys() - self.source.shapes.keys())
        return {"format": "torch_dist", "dtype": dtype_name(self.dtype), "dropped": dropped, "impl": self.impl}
