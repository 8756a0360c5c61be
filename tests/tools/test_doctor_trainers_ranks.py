"""The doctor on another trainer: the example, and mistakes that are planted in it."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_moe_tools.doctor import cli
from megatron_moe_tools.doctor.trainers import rank
from megatron_moe_tools.launch.local_ranks import RankFailure
from tests.helpers.gloo_pool import CaseFailed

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trainer_to_check.py"


def fork_ranks(monkeypatch, gloo, at, run=rank.run_into, **given):
    """Let the doctor's ranks be those of the pool; each answers a request by run(argument, **given)."""

    class Ranks:
        def __init__(self, function, number, *, seconds, threads):
            self.folder, self._seconds = at / f"ranks{number}", seconds
            self.folder.mkdir(exist_ok=True)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def call(self, argument, ranks):
            try:
                return gloo.run_within(self._seconds, ranks, run, argument=argument, **given)
            except CaseFailed as failure:
                raise RankFailure(str(failure)) from failure

    monkeypatch.setattr(cli, "LocalRanks", Ranks)


@pytest.fixture(autouse=True)
def forked(gloo, tmp_path, monkeypatch):
    """The doctor's ranks are forked."""
    fork_ranks(monkeypatch, gloo, tmp_path)


def checked(script, folder, *flags):
    """The findings of a script by the names of their checks, and the exit status."""
    report = folder / "found.json"
    target = () if "--target" in flags else ("--target", "script")
    status = cli.check_trainer([*target, str(script), "--json", str(report), *flags])
    found = json.loads(report.read_text())
    return {one["check"]: one for one in found["checks"]}, status


def test_a_sound_trainer_has_no_finding_and_the_page_tells_what_was_not_checked(tmp_path, capsys):
    found, status = checked(EXAMPLE, tmp_path, "--report", str(tmp_path / "page.md"))
    assert status == 0, capsys.readouterr().out
    assert set(found) == {
        "later-tokens", "token-before", "padding-contents", "padding", "micro-batches", "layout", "resume", "gradients",
    }  # fmt: skip
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# Nothing is wrong in 8 checks")
    assert "documents: the trainer gives no packed" in page


class Mistake(NamedTuple):
    """`right` of the example becomes `wrong`: the checks in `found` fail, no others, and one cause contains `says`."""

    right: str
    wrong: str
    found: tuple[str, ...]
    says: str = ""


MISTAKES = {
    "the loss is not multiplied by what fully_shard divides by": Mistake(
        "loss * dist.get_world_size()", "loss", ("layout",), "every weight, 0.5 times as large: 1 / DP"
    ),
    "each rank divides by its own tokens": Mistake(
        "    dist.all_reduce(trained)\n",
        "    trained *= dist.get_world_size()\n",
        ("layout",),
        "over different numbers",
    ),
    "micro-batches are averaged alike": Mistake(
        'reduction="sum") / trained',
        'reduction="mean") / len(batch) / dist.get_world_size()',
        ("micro-batches",),
        "alike",
    ),
    "labels are not shifted": Mistake(
        '[:, :-1], micro["labels"][:, 1:]', ', micro["labels"]', ("later-tokens",), "not shifted"
    ),
    "labels are shifted twice": Mistake(
        '[:, :-1], micro["labels"][:, 1:]', '[:, :-2], micro["labels"][:, 2:]', ("token-before",), "shifted twice"
    ),
    "attention is not causal": Mistake(
        "is_causal=True", "is_causal=False", ("later-tokens", "padding-contents", "padding"), "causal"
    ),
    "the optimizer is not saved": Mistake(
        'dcp.load({"weights": weights, "state": state}', 'dcp.load({"weights": weights}', ("resume",), "not restored"
    ),
    "a norm's output is detached": Mistake("self.norm2(x))", "self.norm2(x).detach())", ("gradients",), "detached"),
    "gradients are not zeroed": Mistake("    optimizer.zero_grad()\n", "", ("resume",), "not restored"),
    "the root is not sharded, which torch refuses": Mistake(
        "        for block in model[1:3]:\n            fully_shard(block)\n        fully_shard(model)\n",
        "        for block in model[1:3]:\n            fully_shard(block)\n",
        ("layout",),
    ),
    "the norm is each rank's": Mistake(
        'norm.full_tensor() if hasattr(norm, "full_tensor") else norm',
        'norm.to_local() * 0.5 if hasattr(norm, "full_tensor") else norm',
        ("layout",),
        "their norm is not",
    ),
    "weights depend on the world": Mistake(
        "    global model, optimizer\n", "    global model, optimizer\n    torch.manual_seed(world)\n", ("layout",), ""
    ),
    "the learning rate depends on the world": Mistake("lr=1e-3", "lr=1e-3 * world", ("layout",), "the update is not"),
    "the logged loss is one rank's": Mistake("    dist.all_reduce(total)\n", "", ("layout",), ""),
}


BY_DEFAULT = ("each rank divides by its own tokens", "labels are shifted twice", "the optimizer is not saved")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.test_all) for name in MISTAKES]
)
def test_a_mistake_is_found_where_it_shows_and_nowhere_else(name, tmp_path, capsys):
    mistake, text = MISTAKES[name], EXAMPLE.read_text()
    assert text.count(mistake.right) >= 1
    script = tmp_path / "mistaken.py"
    script.write_text(text.replace(mistake.right, mistake.wrong))
    found, status = checked(script, tmp_path, "--checks", *{"later-tokens", *mistake.found})
    wrong = {check for check, one in found.items() if not one["agrees"]}
    assert (wrong, status) == (set(mistake.found), 1), capsys.readouterr().out
    causes = [cause for check in wrong for cause in found[check]["causes"]]
    assert mistake.says in "\n".join(causes)
