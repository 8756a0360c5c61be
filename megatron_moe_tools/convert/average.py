"""Average the weights of several steps of a run into one step, in fp64.

The main weights are averaged where a step has them, else the weights; expert_bias is averaged too. The result is
rounded to the weights' dtype. It has no optimizer state: moments belong to one trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe.config.errors import ConfigError
from megatron_moe.io.hashing import FileEntry
from megatron_moe_tools.convert.convert import ConversionOptions
from megatron_moe_tools.convert.reshard import Box, Reshard

_OPTIMIZER, _MAIN = "optimizer.", "optimizer.state.param."


class Average(Reshard):
    """A conversion of several native steps to one, which has the last one's number, flags and records.

    Raises:
        ConfigError: the steps are not of one model.
    """

    direction: ClassVar[str] = "average of native steps"

    def __init__(self, steps: Sequence[Path], options: ConversionOptions) -> None:
        super().__init__(steps[-1], replace(options, no_optim=True))
        self.steps = tuple(steps)
        self._readers = [StepReader(step) for step in steps]
        self._entries = {
            f"{step.name}/{name}": entry for step in steps for name, entry in manifest.read(step).files.items()
        }
        self.inputs = {name: steps[0].parent / name for name in self._entries}
        self._require_one_model()
        self.iterations = [int(step.name.removeprefix("iter_")) for step in steps]
        self.summary = f"mean of steps {', '.join(map(str, self.iterations))} in fp64, {len(self.tensors)} tensors"

    def _require_one_model(self) -> None:
        for step, reader in zip(self.steps, self._readers):
            own = {key: one for key, one in reader.index.tensors.items() if not key.startswith(_OPTIMIZER)}
            differ = sorted(own.keys() ^ self.tensors.keys())
            differ += [key for key in sorted(own.keys() & self.tensors) if own[key].shape != self.tensors[key].shape]
            if differ:
                raise ConfigError(
                    f"--average-steps: {step} is of another model than {self.source}: {differ[0]} differs"
                )

    @staticmethod
    def _main(reader: StepReader, key: str) -> str:
        """Return the key of a weight's main weight in a step, or of the weight itself."""
        return _MAIN + key if _MAIN + key in reader.index.tensors else key

    def wanted_inputs(self) -> dict[str, FileEntry] | None:
        return self._entries

    def _block(self, box: Box) -> torch.Tensor:
        key, start, shape = box
        if not self.reader.dtype(key).is_floating_point:
            return super()._block(box)
        total = torch.zeros(shape, dtype=torch.float64)
        for reader in self._readers:
            total += reader.read(self._main(reader, key), start, shape)
        return (total / len(self._readers)).to(self._dtype(key))

    def _new_state(self) -> dict[str, Any]:
        return {**super()._new_state(), "average_of_steps": self.iterations}


def steps_to_average(load: Path, numbers: Sequence[int]) -> list[Path]:
    """Return the folders of the steps of a checkpoint folder, oldest first.

    Raises:
        ConfigError: fewer than two, one twice, or one that is not there.
    """
    shown = f"--average-steps {' '.join(map(str, numbers))}"
    if len(set(numbers)) < len(numbers) or len(numbers) < 2:
        raise ConfigError(f"{shown}: name two steps or more, each once")
    there = folder.steps(load)
    if not there:
        raise ConfigError(f"{shown}: --load {load} has no steps; name the folder that a run saved its steps in")
    missing = [number for number in numbers if number not in there]
    if missing:
        raise ConfigError(
            f"{shown}: --load {load} has no step {missing[0]}; it has {', '.join(map(str, sorted(there)))}"
        )
    return [folder.step_folder(load, number) for number in sorted(numbers)]
