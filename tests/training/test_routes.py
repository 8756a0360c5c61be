"""Routes that are not those of the tokens, layers or passes that they are used for: each is an error that says so."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_moe import ConfigError, RecordedRoutes, RoutingTrace, TopKRouter
from megatron_moe.moe.load_balance import dispatched_counts
from megatron_moe.moe.routes import rows_and_documents, tagged
from megatron_moe.training.finalize_model_grads import update_routers
from megatron_moe.training.route_files import RoutePart, RouteShape, read_part, write_part
from megatron_moe.training.routes import RouteError
from tests.helpers import routers
from tests.numbers.reference_moe import bias_step

LENGTH, EXPERTS, TOPK = 4, 8, 3
SAMPLES, LAYERS, POSITIONS = range(4), (2, 4, 5, 6), range(LENGTH)
TOKENS = torch.arange(16).view(4, LENGTH)
SHAPE = RouteShape(5, (2, 4, 5), (6,), EXPERTS, TOPK, LENGTH)
Told = Callable[[int, torch.Tensor], list[torch.Tensor | None]]


class Model(torch.nn.Module):
    """The routers of a model of five layers, the first and third dense, and of one that predicts a further token."""

    def __init__(self, seed: int, per: str = "sequence", **changes: Any) -> None:
        super().__init__()
        self.config = routers.config(
            **changes,
            num_layers=5,
            moe_layer_freq=[0, 1, 0, 1, 1],
            mtp_num_layers=1,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOPK,
        )
        self.config.moe_seq_aux_loss_per = per
        torch.manual_seed(seed)
        self.gates = torch.nn.ModuleList(TopKRouter(self.config) for _ in LAYERS)
        for gate, number in zip(self.gates, LAYERS):
            gate.set_layer_number(number)


def as_told(layer: int, rows: torch.Tensor) -> list[torch.Tensor | None]:
    """The tags of the passes of one layer over a micro-batch: one pass, with its rows."""
    return [tagged(rows)]


def step(source: Any, model: Model, told: Told = as_told, tokens: torch.Tensor = TOKENS) -> dict[Any, Any]:
    """A step of two micro-batches; layer and row -> experts and weights."""
    found = {}
    with source.step(SAMPLES, tokens):
        for samples in (SAMPLES[:2], SAMPLES[2:]):
            numbers = torch.tensor(samples) * LENGTH + torch.arange(LENGTH).unsqueeze(1)
            rows = source.rows_of(numbers.flatten())
            for gate, layer in zip(model.gates, LAYERS):
                for tags in told(layer, rows):
                    decision = gate.route(routers.tokens(16)[rows], tags, num_sequences=2)
                    for row, ids, probs in zip(rows.tolist(), decision.expert_ids, decision.probs.detach()):
                        found[layer, row] = ids.tolist(), probs
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, Any]]:
    folder, model = tmp_path_factory.mktemp("routes"), Model(0)
    found = step(RoutingTrace(folder, [model], LENGTH), model)
    (file,) = folder.rglob("*.safetensors")
    return file, found


def replayed(path: Path, told: Told = as_told, tokens: torch.Tensor = TOKENS, live: bool = False) -> dict[Any, Any]:
    model = Model(1)
    return step(RecordedRoutes(path, [model], LENGTH, live=live), model, told, tokens)


@pytest.fixture
def planted(recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the recorded routes with other tensors into a folder, past the writer's checks; beside the whole ones."""
    numbers = itertools.count()

    def write(shape: RouteShape = SHAPE, *, beside: bool = False, **tensors: numpy.ndarray) -> Path:
        whole, folder = read_part(recorded[0], SHAPE), tmp_path / str(next(numbers))
        if beside:
            write_part(folder / "a.safetensors", SHAPE, whole)
        with monkeypatch.context() as past:
            past.setattr(RoutePart, "check", lambda *_: None)
            write_part(folder / "b.safetensors", shape, RoutePart(**{**vars(whole), **tensors}))
        return folder

    return write


def edited(array: numpy.ndarray, place: Any, value: Any) -> numpy.ndarray:
    """A copy with another value there."""
    array = array.copy()
    array[place] = value
    return array


def assert_refused(path: Path, *says: str, **how: Any) -> None:
    with pytest.raises((ConfigError, RouteError, IndexError)) as error:
        replayed(path, **how)
    for text in says:
        assert re.search(text, str(error.value)), (text, str(error.value))


def test_a_replay_gives_the_recorded_experts_and_the_live_weights_of_other_gates(recorded: Any) -> None:
    found, model = replayed(recorded[0]), Model(1)
    for gate, layer in zip(model.gates, LAYERS):
        scores = torch.sigmoid(gate.gate(routers.tokens(16)).detach())
        for row in range(16):
            ids, probs = found[layer, row]
            assert ids == recorded[1][layer, row][0]
            torch.testing.assert_close(probs, scores[row, ids] / scores[row, ids].sum())


def count(sent: Counter[tuple[int, int]], gate: Any, routed: Any) -> None:
    for expert, choices in enumerate(dispatched_counts(routed).sum(0).tolist()):
        sent[gate.layer_number, expert] += choices


@pytest.mark.parametrize(("kind", "size"), [("aux_loss", 8), ("seq_aux_loss", LENGTH)])
def test_the_balance_goes_by_the_choices_that_are_replayed_or_by_the_gates(
    recorded: Any, tmp_path: Path, kind: str, size: int
) -> None:
    aux: dict[str, Any] = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1}
    own = step(RoutingTrace(tmp_path, [gates := Model(1)], LENGTH), gates)
    for balances_live in (False, True):
        model = Model(1, per="document", **aux)
        source = RecordedRoutes(recorded[0], [model], LENGTH, balances_live=balances_live)
        sent: Counter[tuple[int, int]] = Counter()
        with ExitStack() as watched:
            for gate in model.gates:
                watched.enter_context(gate.observed_by(partial(count, sent)))
            step(source, model)
        update = update_routers([model])
        for place, layer in enumerate(LAYERS):
            got, balanced = torch.zeros(EXPERTS, dtype=torch.int64), torch.zeros(16 // size, EXPERTS)
            for row in range(16):
                got[recorded[1][layer, row][0]] += 1
                balanced[row // size, (own if balances_live else recorded[1])[layer, row][0]] += 1
            assert torch.equal(update.tokens_per_expert[place], got)
            assert [sent[layer, expert] for expert in range(EXPERTS)] == got.tolist()
            assert update.expert_bias[place].tolist() == bias_step([0.0] * EXPERTS, balanced.sum(0).tolist(), 1e-3)
            scores = torch.sigmoid(model.gates[place].gate(routers.tokens(16)).detach())
            shares = (scores / scores.sum(1, keepdim=True)).view(-1, size, EXPERTS).mean(1)
            loss = EXPERTS * (balanced / (size * TOPK) * shares).sum(1).mean()
            torch.testing.assert_close(update.aux_losses[place][kind].float(), loss)


def test_an_evaluation_goes_by_the_scores_and_is_in_no_step(recorded: Any) -> None:
    model, gates = Model(1), Model(1)
    source = RecordedRoutes(recorded[0], [model], LENGTH)
    model.eval()
    with source.step(SAMPLES, TOKENS):
        for gate, alone in zip(model.gates, gates.gates):
            wanted = alone.route(routers.tokens(16)).expert_ids
            assert torch.equal(gate.route(routers.tokens(16)).expert_ids, wanted)
        model.train()
        rows = torch.arange(16)
        for gate in model.gates:
            gate.route(routers.tokens(16), tagged(rows))


def test_a_program_that_confuses_samples_or_folders_is_told(recorded: Any) -> None:
    trace = RoutingTrace(recorded[0].parents[1], [model := Model(0)], LENGTH)
    with pytest.raises(RouteError, match="step-00000001/rank-00000.safetensors: is there; name another folder"):
        step(trace, model)
    for samples, tokens, says in (([0, 1, 1, 2], TOKENS, "each sample once"), (SAMPLES, TOKENS[:3], "tokens of 3")):
        with pytest.raises(RouteError, match=says), trace.step(samples, tokens):
            pass
    confused = r"has samples \[2, 9\], and those of the step are \[0, 1, 2, 3\]"
    with pytest.raises(RouteError, match=confused), trace.step(SAMPLES, TOKENS), trace.micro_batch([2, 9]):
        pass


# ---- faults of files, at every layer and position


def test_an_expert_twice_or_out_of_range_names_layer_sample_and_position(recorded: Any, planted: Any) -> None:
    whole = read_part(recorded[0], SHAPE).routes
    for (column, layer), position in itertools.product(enumerate(LAYERS), POSITIONS):
        where = (2, position, column)
        for expert in (EXPERTS, whole[where][0]):
            file = planted(routes=edited(whole, (*where, 2), expert))
            assert_refused(file, f"layer {layer}, sample 2, position {position} .* 3 different ones, from 0 to 7")


def test_another_order_of_a_tokens_experts_is_kept_and_changes_rounding_alone(recorded: Any, planted: Any) -> None:
    wanted = replayed(recorded[0])
    for key, (ids, probs) in replayed(planted(routes=read_part(recorded[0], SHAPE).routes[..., ::-1])).items():
        assert ids == wanted[key][0][::-1]
        torch.testing.assert_close(probs, wanted[key][1].flip(0))


def test_a_layer_that_is_another_one_a_dense_one_or_missing_is_named(recorded: Any, planted: Any) -> None:
    whole = read_part(recorded[0], SHAPE)
    known = r", and of 5 layers, counted from 1, \[2, 4, 5\] have experts, and \[6\] predict further tokens"
    for column, layer in enumerate(LAYERS):
        for other in (layer - 1, layer + 1):
            says = f"layer {other} more than once" if other in LAYERS else f"routes of layer {other}{known}"
            assert_refused(planted(layers=edited(whole.layers, column, other)), says)
        without = planted(layers=numpy.delete(whole.layers, column), routes=numpy.delete(whole.routes, column, axis=2))
        others = re.escape(str([one for one in LAYERS if one != layer]))
        assert_refused(without, f"layer {layer} of sample 0 is not recorded, layers {others} of it are")
        assert len(replayed(without, live=True)) == len(LAYERS) * 16
    for dense in (1, 3):  # counted as if each layer had experts
        routes = numpy.concatenate((whole.routes, whole.routes[:, :, :1]), axis=2)
        assert_refused(planted(layers=numpy.append(whole.layers, dense), routes=routes), f"of layer {dense}{known}")


def test_a_position_without_a_route_is_named_or_is_the_gates(recorded: Any, planted: Any, tmp_path: Path) -> None:
    model, whole = Model(1), read_part(recorded[0], SHAPE).recorded
    own = step(RoutingTrace(tmp_path / "own", [model], LENGTH), model)
    for position in POSITIONS:
        file = planted(recorded=edited(whole, (1, position), False))
        assert_refused(file, f"layer 2, sample 1, position {position} has no route in .* --moe-routing-replay-missing")
        for (layer, row), (ids, _) in replayed(file, live=True).items():
            assert ids == (own if row == LENGTH + position else recorded[1])[layer, row][0]


def test_samples_that_are_others_missing_or_there_twice_are_named(recorded: Any, planted: Any) -> None:
    whole = read_part(recorded[0], SHAPE)
    for row in SAMPLES:
        file = planted(token_hash=edited(whole.token_hash, row, 1))
        assert_refused(file, f"sample {row} has other tokens than in .*: hash -?[0-9]+ here, 1 there")
        assert_refused(recorded[0], f"sample {row} has other tokens", tokens=changed(row))
        assert_refused(planted(samples=edited(whole.samples, row, 10)), f"layer 2 of sample {row} is not recorded")
        twice = (row + 1) % 4
        assert_refused(planted(samples=edited(whole.samples, row, twice)), f"has sample {twice} more than once")
        for other in SAMPLES[row + 1 :]:  # what two data-parallel ranks hold, exchanged
            swapped = planted(samples=edited(whole.samples, [row, other], [other, row]))
            assert_refused(swapped, f"sample {row} has other tokens")
    assert_refused(planted(beside=True), "b.safetensors: layer 2 of sample 0 is in .*a.safetensors too")
    other = planted(beside=True, token_hash=whole.token_hash + 1)
    assert_refused(other, "b.safetensors: sample 0 has other tokens than in another file")


def changed(sample: int) -> torch.Tensor:
    tokens = TOKENS.clone()
    tokens[sample, -1] += 1
    return tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 6),
        ("moe_layers", (1, 2, 3)),
        ("mtp_layers", ()),
        ("num_experts", 9),
        ("topk", 2),
        ("seq_length", 3),
    ],
)
def test_routes_of_another_model_name_what_differs_on_both_sides(planted: Any, name: str, value: Any) -> None:
    shape = RouteShape(**{**vars(SHAPE), name: value})
    here = json.dumps(getattr(SHAPE, name))
    assert_refused(planted(shape), re.escape(f"{name} is {json.dumps(value)} there and {here} here"))


def test_a_file_with_any_byte_changed_or_cut_off_is_refused(recorded: Any, tmp_path: Path) -> None:
    whole = recorded[0].read_bytes()
    for place in range(0, len(whole), 7):
        damaged = tmp_path / "damaged.safetensors"
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with pytest.raises(ConfigError, match="damaged"):
            read_part(damaged, SHAPE)
        damaged.write_bytes(whole[:place])
        with pytest.raises(ConfigError, match="damaged"):
            read_part(damaged, SHAPE)


# ---- faults of passes


@pytest.mark.parametrize("layer", LAYERS)
def test_a_pass_that_is_told_other_rows_is_an_error(recorded: Any, layer: int) -> None:
    def told(what: Callable[[torch.Tensor], list[torch.Tensor | None]]) -> Told:
        return lambda number, rows: what(rows) if number == layer else [tagged(rows)]

    faults: dict[str, tuple[Callable[[torch.Tensor], list[Any]], str]] = {
        "of another micro-batch": (lambda rows: [tagged(rows % 8)], f"layer {layer}, .* was routed 2 times"),
        "of one position": (lambda rows: [tagged(rows * 0)], f"layer {layer}, .* was routed 16 times"),
        "of documents alone": (lambda rows: [rows], ""),
        "of none": (lambda rows: [None], f"layer {layer}: 8 tokens are to be routed, and nothing came"),
        "twice": (lambda rows: [tagged(rows)] * 2, f"layer {layer}, sample 0, position 0 was routed 2 times"),
        "never": (lambda rows: [], f"layer {layer}, sample 0, position 0 was routed 0 times"),
    }
    for what, says in faults.values():
        assert_refused(recorded[0], says, told=told(what))


def test_the_gates_agree_with_their_own_routes_alone_and_not_with_those_of_another_layer_or_position(
    recorded: Any, planted: Any
) -> None:
    def agreement(file: Path) -> list[float]:
        source = RecordedRoutes(file, [model := Model(0)], LENGTH)
        for _ in range(2):
            step(source, model)
        assert (source.agreeing[:, 1] == 16 * TOPK).all()  # of the first step
        return (source.agreeing[:, 0] / source.agreeing[:, 1]).tolist()

    assert agreement(recorded[0]) == [1.0] * 4
    for axis in (1, 2):  # what no header tells
        moved = planted(routes=numpy.roll(read_part(recorded[0], SHAPE).routes, 1, axis))
        assert max(agreement(moved)) < 0.7


def test_rows_and_documents_travel_in_one_tensor() -> None:
    rows = torch.tensor([0, 1, 2**31 - 2, 7])
    documents = torch.tensor([-1, 0, 5, 2**31 - 1])
    found = rows_and_documents(tagged(rows, documents))
    assert torch.equal(found[0], rows) and torch.equal(found[1], documents)
    assert rows_and_documents(documents)[0].tolist() == [-1] * 4
