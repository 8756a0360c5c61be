"""Every mistake of `mistakes.yaml` ends at once with one message that names it, and leaves nothing behind.

The rows are run by `tests/config/mistakes.py`, by the module in RUN_BY of their program.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import pretrain_moe
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, flatten, replace
from megatron_moe_tools.console import COMMANDS
from megatron_moe_tools.prepare.preprocess import PreprocessOptions, preprocess
from tests.config.mistakes import LAUNCHER
from tests.helpers.plain_steps import write_step
from tests.helpers.rows import rows
from tests.hf import small_folders

ROOT = Path(__file__).resolve().parents[2]
TABLE = yaml.load(Path(__file__).with_name("mistakes.yaml").read_text(), Loader=yaml.CSafeLoader)
_RENAMED = {"verify_resume": "verify-resume", "profile_step": "profile", "megatron_flags": "flags"}
_OTHERS = (
    "slurm kubernetes skypilot merge generate profile_step trace audit convert doctor inspect plan preflight".split()
)
_OTHERS += ["prepare", "report"]
RUN_BY = {"train": "pretrain_moe", "launch": "megatron_moe_tools.train"}
for _name in (*_OTHERS, "verify_resume", "megatron_flags"):
    RUN_BY[_name] = COMMANDS[_RENAMED.get(_name, _name)][0].partition(":")[0]
"""Program -> the module whose `main` runs it."""
SCRIPTS = {"train": ["pretrain_moe.py"], "merge": ["tools/merge_datasets.py"], "plan": ["-m", "megatron_moe", "plan"]}
LAUNCHED_OF = 20
"""Of so many mistakes of a training command one is made under the launcher as well."""


def table_rows() -> list[dict[str, Any]]:
    """The table's rows: program, function, words as they are typed, environment, what the message has to name."""
    found = []
    for part in TABLE:
        for row in part["rows"]:
            typed, *names = row if isinstance(row, list) else [row["typed"], *row["names"]]
            env = row.get("env", {}) if isinstance(row, dict) else {}
            words, main = f"{part.get('base', '')} {typed}", f"{RUN_BY[part['program']]}:main"
            found.append({"program": part["program"], "main": main, "typed": words, "env": env, "names": names})
    launched = [row for row in found if row["program"] == "train" and not row["env"]][::LAUNCHED_OF]
    return found + [
        {**row, "main": "megatron_moe_tools.train:main", "typed": f"--nproc-per-node 1 {row['typed']}"}
        for row in launched
    ]


ROWS = table_rows()


def json_lines(path: Path, count: int) -> None:
    path.write_text("".join(json.dumps({"text": f"line {n} " * 20}) + "\n" for n in range(count)))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """The files that the rows name by {d}."""
    root = tmp_path_factory.mktemp("files")
    json_lines(root / "text.jsonl", 40)
    preprocess(
        PreprocessOptions((str(root / "text.jsonl"),), str(root / "all"), "ByteTokenizer", append_eod=True, workers=1),
        show_progress=False,
    )
    for suffix in ("bin", "idx"):
        content = (root / f"all_text_document.{suffix}").read_bytes()
        (root / f"bare.{suffix}").write_bytes(content)
        (root / f"cut.{suffix}").write_bytes(content[:-4])
        (root / f"hollow.{suffix}").touch()
        (root / f"noise.{suffix}").write_bytes(b"\x01" * 100)
    (root / "lone.idx").write_bytes((root / "bare.idx").read_bytes())
    for name, content in TEXTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "lfs.bin").write_bytes((root / "lfs.idx").read_bytes())
    for name, target in (("loop", "loop"), ("dangling", "not there")):
        (root / name).symlink_to(target)
    small_folders.sound(root / "hf_sound", root / "sentinel")
    for name in ("empty", "hf_no_weights"):
        (root / name).mkdir(exist_ok=True)
    tiny = flatten(replace(Run(), **PRESETS["tiny"], mock_data=True, vocab_size=1000))
    state = {"iteration": 5, "has_optimizer": True}
    write_step(root / "steps", 5, config=tiny, state=state)
    write_step(root / "other_model", 5, config={**tiny, "hidden_size": 512}, state=state)
    write_step(root / "damaged", 5, config=tiny, state=state)
    (root / "damaged" / "iter_0000005" / "manifest.json").write_text("{}")
    return root


TEXTS = {
    "a_file": "x",
    "notes/thesis.tex": "x",
    "bad_tokenizer/tokenizer.json": "{}",
    "hf_unknown/config.json": '{"model_type": "llama9", "architectures": ["Llama9ForCausalLM"]}',
    "hf_broken/config.json": "{",
    "hf_no_weights/config.json": '{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}',
    "unknown.yaml": "num_layrs: 2\n",
    "lfs.idx": "version https://git-lfs.github.com/spec/v1\n",
    "octal.yaml": "seed: 010\n",
    "deep.yaml": "[" * 5000,
    "digits.yaml": f"train_iters: {'9' * 5000}\n",
    "digits.json": f'{{"train_batch_size": {"9" * 5000}}}',
    "home.yaml": "save: ~/runs\n",
    "negative.yaml": "lr: -0.1\n",
    "run/metrics.jsonl": '{"iteration": 1, "loss": 2.0}\n',
    "chat.jsonl": '{"messages": [{"role": "user", "content": "hi"}]}\n',
}


@pytest.fixture(scope="module")
def outcomes(files, tmp_path_factory) -> list[dict[str, Any]]:
    """What came of every row, run in one process."""
    folder, asked = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("asked") / "rows.json"
    filled = [{**row, "words": shlex.split(row["typed"].replace("{d}", str(files)))} for row in ROWS]
    asked.write_text(json.dumps({"folder": str(folder), "watched": [str(files)], "rows": filled}))
    command = [sys.executable, "-m", "tests.config.mistakes", str(asked)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    path = os.pathsep.join([str(ROOT), *kept.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
    return {**kept, "PYTHONPATH": path, **changes}


def is_named(row: dict[str, Any], came: dict[str, Any]) -> bool:
    """Whether a mistake ended with one message that names it, before torch was loaded, and changed nothing."""
    one_message = came["err"].count("error: ") == 1 and not any(text in came["err"] for text in ("Traceback", "usage:"))
    names_it = all(str(name) in came["err"] for name in row["names"])
    return came["status"] == 2 and one_message and names_it and came["heavy"] == came["changed"] == []


@pytest.mark.parametrize("program", RUN_BY)
def test_a_mistake_is_named_at_once(program, outcomes):
    pairs = [(row, came) for row, came in zip(ROWS, outcomes, strict=True) if row["program"] == program]
    assert pairs
    assert [(row["typed"], row["names"], came) for row, came in pairs if not is_named(row, came)] == []


@pytest.mark.parametrize("program", SCRIPTS)
def test_the_scripts_do_the_same(program, files, tmp_path):
    row = next(row for row in ROWS if row["program"] == program)
    words = shlex.split(row["typed"].replace("{d}", str(files)))
    first, *others = SCRIPTS[program]
    command = [sys.executable, first if first == "-m" else str(ROOT / first), *others, *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert all(str(name) in done.stderr for name in row["names"]) and list(tmp_path.iterdir()) == []


PARALLEL = "--mock-data --vocab-size 1000 --expert-model-parallel-size 4"
TORCHRUN = [
    (PARALLEL, ["--expert-model-parallel-size"]),
    ("--tokenizer-type ByteTokenizer --data-path nowhere", ["--data-path nowhere"]),
]


@pytest.mark.parametrize(("words", "names"), rows(TORCHRUN, test=TORCHRUN[:1]))
def test_one_rank_prints_it_under_torchrun_also_where_rank_0_is_slow(words, names, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os, time\nos.environ.get('RANK') == '0' and time.sleep(2)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["pretrain_moe.py", "--preset", "tiny", *words.split()]
    slow = environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, env=slow, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0 and done.stderr.count("pretrain_moe.py: error: ") == 1, done.stderr
    assert all(name in done.stderr for name in names)


# ---- mistakes of one rank of several, and of contents, which are found when torch is loaded

MOCK = ["--preset", "tiny", "--mock-data", "--tokenizer-type", "ByteTokenizer"]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], root: Path) -> str:
    """The message of a refused command line."""
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert pretrain_moe.main(argv) == 2
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    told = capsys.readouterr()
    assert told.out == ""
    *stages, line = told.err.splitlines()
    assert line.startswith("pretrain_moe.py: error: ") and told.err.count("error:") == 1
    assert all(stage.startswith("pretrain_moe.py: ") and stage.endswith(" ...") for stage in stages)
    assert "Traceback" not in told.err
    return told.err


def test_only_rank_0_speaks(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    assert pretrain_moe.main([*MOCK, "--expert-model-parallel-size", "2"]) == 2
    assert capsys.readouterr() == ("", "")


def test_a_dry_run_checks_and_makes_nothing(capsys, tmp_path):
    argv = [*MOCK, "--dry-run", "--save", str(tmp_path / "new"), "--metrics-file", str(tmp_path / "m.jsonl")]
    argv += ["--tensorboard-dir", str(tmp_path / "tb")]
    assert pretrain_moe.main(argv) == 0
    assert "the configuration is sound" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
