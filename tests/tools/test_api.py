"""The Python interface: the command line's numbers and errors, a program's own parts on every layout, models to use."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_moe as mm
from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.data.tokenizers import NullTokenizer
from tests.helpers.launchers import Forked
from tests.helpers.ranks import RankParent
from tests.helpers.trained_steps import SMALL

FLAGS: dict[str, Any] = {**SMALL, "vocab_size": 64, "train_iters": 2, "eval_iters": 0, "lr": 1e-2}
SAMPLES = [[(start + step * place) % 64 for place in range(17)] for start in range(5) for step in (1, 3)]


def settings(**changes: Any) -> Any:
    made_up = {} if changes.pop("own", False) else {"mock_data": True}
    return mm.Settings.from_preset("tiny", **{**FLAGS, **made_up, **changes})


def losses(result: Any) -> list[float]:
    return [step.loss for step in result.steps]


class Stream:
    def __iter__(self) -> Iterator[dict[str, Any]]:
        for ids in SAMPLES:
            yield {"tokens": ids[:-1], "labels": torch.tensor(ids[1:])}


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


def halved(logits: Tensor, labels: Tensor) -> Tensor:
    return plain(logits, labels) / 2


class Halved(torch.nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return halved(logits, labels)


def on_ranks(parts: dict[str, Any], flags: dict[str, Any]) -> tuple[list[float], list[float], str]:
    """Losses and gradient norms of a run with a program's parts, and why its model cannot be had."""
    result = mm.train(settings(own="data" in parts, **flags), **parts)
    try:
        why = f"{type(result.model).__name__}"
    except mm.ConfigError as error:
        why = str(error)
    return losses(result), [step.grad_norm for step in result.steps], why


# ---- settings


def test_settings_are_the_command_lines_and_changes_win(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("preset: tiny\nlr: 0.5\nmock_data: true\nvocab_size: 64\n")
    of_file = mm.Settings.from_yaml(tmp_path / "run.yaml", lr=0.25, keep_fp32=["router"], bf16=True)
    text = "--preset tiny --lr 0.25 --mock-data --vocab-size 64 --keep-fp32 router --bf16"
    assert of_file.flat() == mm.Settings.from_flags(text).flat()
    by_name = mm.Settings(preset="tiny", lr=0.25, mock_data=True, vocab_size=64, keep_fp32=["router"], bf16=True)
    assert by_name == mm.Settings.from_flags(by_name.command) and by_name.flat() == of_file.flat()
    changed = of_file.replace(bf16=False, lr=0.5, keep_fp32=None, moe_layer_freq="[0]+[1]*3")
    assert changed.flat() == mm.Settings.from_flags(changed.command).flat()
    assert (changed.run.precision.bf16, changed.run.optimizer.lr) == (False, 0.5)
    megatrons = mm.Settings.from_flags("--preset tiny --recompute-activations")  # a flag of Megatron-LM's alone
    assert megatrons.run.training.recompute_granularity == "selective"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_router_topkk": 4}, "--moe-router-topk"),
        ({"moe_router_topk": "many"}, "--moe-router-topk"),
        ({"expert_model_parallel_size": 3}, "--expert-model-parallel-size 3"),
        ({"program_data": True, "mock_data": False}, "--program-data"),
        ({"print_precision": True}, "use the command line"),
    ],
)
def test_a_mistake_is_the_command_lines_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(mm.ConfigError, match=said):
        mm.train(settings(**changes))


@pytest.mark.parametrize(
    ("parts", "changes", "said"),
    [
        ({"data": []}, {}, "data: has no samples"),
        ({"data": SAMPLES}, {"eval_iters": 1}, "hand in valid_data"),
        ({"valid_data": SAMPLES}, {}, "needs data, too"),
        ({"loss": plain}, {"cross_entropy_loss_fusion": True}, "--cross-entropy-loss-fusion"),
        ({"optimizer": mm.Adam}, {"optimizer": "muon"}, "--optimizer muon"),
        ({"optimizer": torch.optim.SGD}, {}, "overrides `update`"),
        ({"loss": "l1"}, {}, "loss: is str"),
        ({"data": "data.txt"}, {}, "named by data_path"),
        (
            {"data": [{**dict.fromkeys(("tokens", "labels"), [1] * 16), "mask": [1] * 16}]},
            {},
            "'mask', which is not read",
        ),
        ({"data": iter(SAMPLES)}, {"load": "runs/new", "save": "runs/new"}, "__iter__ begins anew"),
        ({"callbacks": [mm.Callback]}, {}, "no list of objects"),
        ({"callbacks": [type("Late", (mm.Callback,), {"on_step_end": print})()]}, {}, "on_step_end is never called"),
    ],
)
def test_parts_that_do_not_go_with_the_settings_are_refused(parts, changes, said) -> None:
    with pytest.raises(mm.ConfigError, match=said):
        mm.train(settings(own="data" in parts, **changes), **parts)


# ---- runs


def test_data_loss_and_optimizer_of_a_program_give_the_same_numbers_on_every_layout(gloo: Any) -> None:
    parts = {"data": SAMPLES, "loss": Halved(), "optimizer": mm.Adam}
    flags = {"global_batch_size": 4, "use_distributed_optimizer": False}
    whole = gloo.run(1, on_ranks, parts=parts, flags=flags)[0]
    assert whole[2] == "Model"
    layouts: tuple[dict[str, Any], ...] = (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"expert_model_parallel_size": 2, "use_distributed_optimizer": True},
    )
    for layout in layouts:
        first, second = gloo.run(2, on_ranks, parts=parts, flags={**flags, **layout})
        torch.testing.assert_close(first[0], whole[0], rtol=2e-6, atol=0)
        torch.testing.assert_close(first[1][0], whole[1][0], rtol=1e-5, atol=0)  # before Adam divides by small moments
        assert second[0] == [] and "load_model" in first[2] and "load_model" in second[2]
    unscaled = gloo.run(1, on_ranks, parts={"data": SAMPLES}, flags=flags)[0]
    torch.testing.assert_close(unscaled[0][0], 2 * whole[0][0], rtol=1e-6, atol=0)


def test_a_stream_is_the_list_of_its_samples_and_begins_anew(one_process: Any, tmp_path: Path) -> None:
    flags = {"own": True, "eval_iters": 1, "eval_interval": 1}
    of_list = mm.train(settings(**flags, save=str(tmp_path)), data=SAMPLES, valid_data=SAMPLES)
    skipped = {**flags, "load": str(tmp_path), "skip_train": True, "train_iters": None}
    evaluated = mm.train(settings(**skipped), data=SAMPLES, valid_data=SAMPLES, loss=plain)
    assert [one.loss for one in evaluated.evaluations] == [of_list.evaluations[-1].loss] and not evaluated.steps
    assert torch.equal(evaluated.model.logits([1, 2]), of_list.model.logits([1, 2]))
    of_stream = mm.train(settings(**flags), data=Stream(), valid_data=Stream())
    assert losses(of_stream) == losses(of_list) and len(set(losses(of_list))) == 2
    assert [one.loss for one in of_stream.evaluations] == [one.loss for one in of_list.evaluations]
    with pytest.raises(ValueError, match="is an iterator"):
        mm.train(settings(**flags), data=Stream(), valid_data=iter(Stream()))
    with pytest.raises(ValueError, match="ended after 10 samples"):
        mm.train(settings(own=True, train_iters=6), data=Stream())


TWO_DOCUMENTS = {"tokens": [1] * 16, "labels": [1] * 16}


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (list(range(16)), r"ids of sample 0 are torch.int64 \[16\]"),
        ({"tokens": list(range(16))}, "has no labels"),
        ({"tokens": list(range(16)), "labels": list(range(16)), "loss_mask": [0.5] * 16}, "whole numbers"),
        ({**TWO_DOCUMENTS, "documents": [0] * 8 + [9] * 8}, "documents of sample 0 have to be"),
        ({**TWO_DOCUMENTS, "documents": [0] * 8 + [-1] * 8}, "loss_mask 1 where documents has -1"),
        ([64] * 17, "sample 0 has token id 64, and the vocabulary 64 ids"),
    ],
)
def test_a_sample_of_another_form_is_named(one_process: Any, sample: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mm.train(settings(own=True, reset_attention_mask="documents" in sample), data=[sample])


def test_documents_of_a_program_do_not_see_each_other(one_process: Any) -> None:
    """Two in one sample, the second with padding, train as each of them alone and padded."""
    halves = [[*range(8), *[0] * 8], [*range(20, 26), *[0] * 10]]
    apart = [{**one_document(row, length), "labels": row} for row, length in zip(halves, (8, 6))]
    both = [*range(8), *range(20, 26), 0, 0]
    packed = {**one_document(both, 14), "labels": both, "documents": [0] * 8 + [8] * 6 + [-1] * 2}
    flags = {"own": True, "reset_attention_mask": True, "calculate_per_token_loss": True, "train_iters": 2}
    runs = [mm.train(settings(**flags, global_batch_size=len(one)), data=one) for one in ([packed], apart)]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-5)


def one_document(row: list[int], length: int) -> dict[str, list[int]]:
    mask = [1] * length + [0] * (16 - length)
    return {"tokens": row, "loss_mask": mask, "documents": [0] * length + [-1] * (16 - length)}


@pytest.mark.parametrize(
    ("loss", "said"),
    [(lambda *_: torch.tensor(1.0), "reduction='none'"), (lambda a, b: plain(a.detach(), b), "detached")],
)
def test_a_loss_that_trains_nothing_is_named(one_process: Any, loss: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mm.train(settings(), loss=loss)


def test_a_step_goes_on_with_the_parts_that_it_was_trained_with(one_process: Any, tmp_path: Path) -> None:
    steps = settings(save=str(tmp_path), load=str(tmp_path), train_iters=1)
    mm.train(steps, loss=halved)
    with pytest.raises(mm.ConfigError, match="was trained with halved as loss, this run has the default"):
        mm.train(steps.replace(train_iters=2))
    assert len(mm.train(steps.replace(train_iters=2), loss=halved).steps) == 1


def failing_runs(argv: list[str]) -> int:
    """Two runs that fail on rank 1 alone, while rank 0 sleeps or waits in a collective, and a sound one after them."""
    rank = int(os.environ["RANK"])

    class Samples(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            if number >= 2:
                if rank == 1:
                    raise OSError("cannot read")
                time.sleep(600)
            return super().__getitem__(number)

    def odd(logits: Tensor, labels: Tensor) -> Tensor:
        if rank == 1:
            raise KeyError("odd")
        return plain(logits, labels)

    said = []
    for parts in ({"data": Samples(SAMPLES)}, {"data": SAMPLES, "loss": odd}, {"data": SAMPLES}):
        try:
            said.append(str(len(mm.train(settings(own=True, global_batch_size=2), **parts).steps)))
        except Exception as error:
            said.append(repr(error))
            os.kill(os.getpid(), signal.SIGTERM)  # the launcher's, while the program still runs
    Path(argv[0], f"{rank}").write_text("\n".join(said))
    return 0


def test_an_error_on_one_rank_is_raised_in_the_program_on_all_and_another_run_can_follow(
    rank_parent: RankParent, tmp_path: Path
) -> None:
    job = Forked(rank_parent, "tests.tools.test_api:failing_runs")
    job.start([str(tmp_path)], 2, tmp_path, tmp_path / "log")
    assert job.wait(300) == 0, (tmp_path / "log").read_text()
    first, second = ((tmp_path / rank).read_text().splitlines() for rank in "01")
    assert second == ["OSError('cannot read')", "KeyError('odd')", "0"] and first[2] == "2"
    for told, error in zip(first, ("OSError: cannot read", "KeyError: 'odd'")):
        assert re.match(rf"RunFault.*rank 1 failed at .*{error}", told), told


# ---- models


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that saves a step of a model with ByteTokenizer."""
    folder = tmp_path_factory.mktemp("api")
    tokens = {"vocab_size": None, "tokenizer_type": "ByteTokenizer", "bf16": True}
    return mm.train(settings(save=str(folder / "steps"), max_position_embeddings=64, **tokens))


def test_the_trained_model_is_the_saved_one_and_can_be_exported(run: Any, tmp_path: Path, one_process: Any) -> None:
    from transformers import AutoModelForCausalLM

    trained, loaded = run.model, mm.load_model(run.checkpoint, dtype="bfloat16")
    expected = trained.logits("ab")
    assert expected.dtype == torch.float32 and expected.shape == (2, 257)
    assert torch.equal(loaded.logits("ab"), expected)
    text = trained.generate("ab", max_new_tokens=5)
    assert text == loaded.generate("ab", max_new_tokens=5)
    assert trained.tokenizer.detokenize(trained.generate([97, 98], max_new_tokens=5)) == text
    for number, model in enumerate((trained, run.checkpoint)):
        folder = mm.save_hf(model, tmp_path / str(number))
        assert ("a program's memory" in (folder / "README.md").read_text()) == (model is trained)
        again = mm.load_model(folder, dtype="bfloat16")
        assert torch.equal(again.logits([97, 98]), expected)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = mm.load_model(folder).logits([97, 98, 99])
    with torch.no_grad():
        torch.testing.assert_close(theirs(torch.tensor([[97, 98, 99]])).logits[0], ours, rtol=1e-4, atol=1e-4)


def test_an_export_from_memory_has_the_positions_and_the_end_of_its_run(tmp_path: Path, one_process: Any) -> None:
    written = {}
    mm.save_hf(mm.train(settings(max_position_embeddings=32)).model, tmp_path / "first")
    continued = {name: value for name, value in FLAGS.items() if name not in architecture_keys()}
    again = mm.Settings.from_flags([], **continued, load_hf=str(tmp_path / "first"), mock_data=True)
    mm.save_hf(mm.train(again.replace(max_position_embeddings=99)).model, tmp_path / "second")
    for name in ("first", "second"):
        written[name] = json.loads((tmp_path / name / "config.json").read_text())
    assert written["second"] == {**written["first"], "max_position_embeddings": 99}
    assert written["first"]["max_position_embeddings"] == 32 and written["first"]["eos_token_id"] is None


def test_no_model_is_loaded_into_a_run_that_goes_on(run: Any, one_process: Any) -> None:
    class Loads(mm.Callback):
        def after_step(self, step: Any, result: Any) -> None:
            mm.load_model(run.checkpoint)

    with pytest.raises(mm.RunFault, match="this process is in a run"):
        mm.train(settings(), callbacks=[Loads()])


def test_a_loaded_model_is_a_torch_module_that_trains(run: Any, one_process: Any) -> None:
    model = mm.load_model(run.checkpoint)
    tokens = torch.arange(32).view(2, 16)
    plain(model(tokens)[:, :-1].float(), tokens[:, 1:]).mean().backward()
    with_gradient = [name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()]
    assert {"embedding", "decoder", "output_layer"} <= {name.split(".")[1] for name in with_gradient}
    assert mm.train(settings()).model.tokenizer is None and NullTokenizer(64).name == "NullTokenizer"
    assert torch.isfinite(model.logits("ab")).all()  # after another run in this process
