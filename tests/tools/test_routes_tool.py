"""megatron-moe routes: arrays of other programs become files of routes and back; a wrong statement is an error."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.data.batches import token_hash
from megatron_moe.training.route_files import RouteShape, read_part
from megatron_moe_tools.routes import main, part_of
from tests.helpers.trained_steps import SMALL
from tests.hf.small_folders import sound

LAYERS, LENGTH = ("--num-layers", "4", "--moe-layer-freq", "[0,1,0,1]"), 16
MODEL = ["--preset", "tiny", "--mock-data", "--seq-length", "16", *LAYERS, "--mtp-num-layers", "1"]
FLAGS = {**PRESETS["tiny"], **SMALL, "num_layers": 4, "moe_layer_freq": "[0,1,0,1]", "mtp_num_layers": 1}
SHAPE = RouteShape.from_run(build(FLAGS))
TOKENS = {f"tokens.{sample}": torch.arange(LENGTH) + sample for sample in (3, 7)}


def routes(*shape: int) -> torch.Tensor:
    """K different experts for each of these."""
    scores = torch.rand(*shape, SHAPE.num_experts, generator=torch.Generator().manual_seed(len(shape)))
    return scores.topk(SHAPE.topk).indices.to(torch.int32)


def requests() -> dict[str, torch.Tensor]:
    """Two requests, one cut short, in vLLM's form: a row of zeros for each dense layer."""
    found = {"routed_experts.3": routes(LENGTH - 1, 4), "routed_experts.7": routes(9, 4)}
    for one in found.values():
        one[:, [0, 2]] = 0
    return found


def converted(folder: Path, tensors: dict[str, torch.Tensor], *flags: str) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "theirs.safetensors")
    words = ["--load", str(folder / "theirs.safetensors"), "--output", str(folder / "ours.safetensors")]
    assert main([*words, *flags, *MODEL]) == 0
    return folder / "ours.safetensors"


def test_requests_become_routes_and_requests_again(tmp_path: Path) -> None:
    theirs, flags = requests(), ["--layers", "all", "--samples", "3", "7"]
    ours = converted(tmp_path, {**theirs, **TOKENS}, "--from", "requests", *flags)
    part = read_part(ours, SHAPE)
    assert part.layers.tolist() == [2, 4] and part.recorded.sum(1).tolist() == [LENGTH - 1, 9]
    assert numpy.array_equal(part.routes[0, : LENGTH - 1], theirs["routed_experts.3"][:, [1, 3]].numpy())
    assert part.token_hash.tolist() == [token_hash(sample, TOKENS[f"tokens.{sample}"]) for sample in (3, 7)]
    back = tmp_path / "back.safetensors"
    assert main(["--to", "requests", "--load", str(ours), "--output", str(back), *flags, *MODEL]) == 0
    found = load_file(back)
    assert found.keys() == theirs.keys() and all(torch.equal(found[name], theirs[name]) for name in theirs)


def test_lists_of_router_replay_become_routes_and_lists_again(tmp_path: Path) -> None:
    theirs = {f"recorded.{router}": routes(LENGTH * 2).long().roll(router, 0) for router in range(3)}
    flags = ["--layers", "2", "4", "5", "--samples", "7", "3"]
    ours = converted(tmp_path, {**theirs, **TOKENS}, "--from", "router-replay", *flags)
    part = read_part(ours, SHAPE)
    assert part.samples.tolist() == [7, 3] and part.layers.tolist() == [2, 4, 5]
    assert part.routes[1, 6, 2].tolist() == theirs["recorded.2"][6 * 2 + 1].tolist()  # in the order [S, B]
    back = tmp_path / "back.safetensors"
    assert main(["--to", "router-replay", "--load", str(ours), "--output", str(back), *flags, *MODEL]) == 0
    found = load_file(back)
    assert found.keys() == theirs.keys() and all(torch.equal(found[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([2, 4], r"routed_experts.3: is \[15, 4, 2\]; by --layers, --samples and the model it is \[-1, 2, 2\]"),
        ([2, 1, 4, 3], r"column 1 is of layer 1 and has routes, and of 4 layers, .* \[2, 4\] have experts"),
        (
            [1, 2, 3, 4],
            r"layer 2, sample 7, position 0 goes to experts \[-1, -1\]; a token has 2 different ones, from 0",
        ),
        ([2, 3, 4, 5], r"column 1 is of layer 3 and has routes"),
    ],
)
def test_layers_that_are_not_those_of_the_columns_are_refused(layers: list[int], says: str) -> None:
    theirs: dict[str, Any] = {name: tensor.numpy() for name, tensor in {**requests(), **TOKENS}.items()}
    if layers == [2, 3, 4, 5]:  # as if all had experts
        theirs["routed_experts.3"] = routes(LENGTH - 1, 4).numpy()
    if layers == [1, 2, 3, 4]:  # what stands for no route in a padded batch
        theirs["routed_experts.7"][0] = -1
        theirs["routed_experts.7"][:, [0, 2]] = 0
    with pytest.raises(ConfigError, match=says):
        part_of("requests", theirs, [3, 7], layers, SHAPE).check("requests", SHAPE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--layers", "2", "2"], "--layers 2 2: name each once"),
        (["--layers", "2", "9"], "--layers 2 9: give `all`, `experts`, or numbers; of 4 layers"),
        (["--samples", "3", "3"], "--samples 3 3: name each once"),
        (["--load", "text"], "text: its header is to have"),
        (["--output", "/proc/self/x"], "--output /proc/self/x: "),
    ],
)
def test_wrong_words_are_named(words: list[str], says: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("routes of three samples")
    flags = {"--layers": ["all"], "--samples": ["3"], "--load": ["theirs"], "--output": ["ours"], words[0]: words[1:]}
    typed = [word for flag, values in flags.items() for word in (flag, *values)]
    assert main(["--from", "requests", *typed, *MODEL]) == 2
    assert says in capsys.readouterr().err


def test_the_model_is_the_folders_and_a_dense_one_has_no_routes(tmp_path: Path, capsys: Any) -> None:
    sound(tmp_path / "mixture", tmp_path / "sentinel")
    ours, back = tmp_path / "ours", tmp_path / "back"
    words = ["--layers", "experts", "--samples", "3", "--seq-length", "16"]
    theirs = {"recorded.0": torch.tensor([[0, 3]] * LENGTH), "tokens.3": TOKENS["tokens.3"]}
    save_file(theirs, tmp_path / "theirs")
    words += ["--load-hf", str(tmp_path / "mixture")]
    assert main(["--from", "router-replay", "--load", str(tmp_path / "theirs"), "--output", str(ours), *words]) == 0
    assert main(["--to", "router-replay", "--load", str(ours), "--output", str(back), *words]) == 0
    assert torch.equal(load_file(back)["recorded.0"], theirs["recorded.0"])
    words[-2:] = ["--num-layers", "2"]
    assert main(["--to", "router-replay", "--load", str(ours), "--output", str(back), *words]) == 2
    assert "dense model, which has no routes" in capsys.readouterr().err
