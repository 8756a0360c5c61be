"""Every command in examples/ and on the pages is one that the programs accept."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moe import pretrain
from megatron_moe.config import rules
from megatron_moe.config.presets import PRESETS
from megatron_moe_tools import compat, kubernetes, slurm
from megatron_moe_tools.doctor import cli as doctor_cli
from megatron_moe_tools.launch import node_ranks as launch_options
from megatron_moe_tools.plan import cli as planning_cli
from megatron_moe_tools.preflight import cli as preflight_cli
from megatron_moe_tools.prepare import preprocess as prepare_cli

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(REPO.glob("examples/*.sh"))
JOBS = sorted(REPO.glob("examples/slurm/*.sbatch"))
PAGES = sorted([*REPO.glob("*.md"), *REPO.glob("docs/**/*.md")])
TOOLS = ("prepare", "plan", "doctor", "preflight", "slurm", "kubernetes")
PROGRAMS = ("pretrain_moe.py", *(f"{name} {tool} " for name in ("megatron-moe", "megatron_moe") for tool in TOOLS))


def training_command(words):
    """The flags of a training and the world that its launcher starts; None for other command lines."""
    if words[1:4] == ["-m", "megatron_moe", "train"]:
        options, flags = launch_options.split(words[4:], {})
        return flags, options.world_size
    if "pretrain_moe.py" not in words:
        return None
    at = words.index("pretrain_moe.py")
    flags = [word for word in words[at + 1 :] if word not in ("$@", "...")]
    if "torchrun" not in words[:at]:
        return flags, 1
    launcher = words[words.index("torchrun") + 1 : at]
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args([*launcher, "pretrain_moe.py"])
    return flags, int(options.nnodes.split(":")[0]) * int(options.nproc_per_node)


def check(flags, world_size, folder, monkeypatch):
    """Parse and check a training command where it would run: a repository with configs and the pages' ds.json."""
    folder.mkdir()
    (folder / "examples").symlink_to(REPO / "examples", target_is_directory=True)
    (folder / "ds.json").symlink_to(REPO / "tests" / "compat" / "deepspeed" / "zeropp_bf16_failing_in_deepspeed.json")
    (folder / "run.yaml").write_text("preset: tiny\nmock_data: true\nvocab_size: 1000\nmicro_batch_size: 1\n")
    monkeypatch.chdir(folder)
    run = compat.parse([*flags, "--dry-run"], imported, world_size)
    checked = rules.check_model if run.precision.print_precision or run.logging.list_advisories else rules.check
    checked(run, world_size)


def imported(given):
    """What is given, over the architecture that the folder of a page would have."""
    return {**(PRESETS["deepseek-v2-lite"] if "load_hf" in given else {}), **given}


def recorded(script, folder, status=0):
    """Run a script in a copy of the examples, with stand-ins that write down their arguments and end with `status`."""
    stand_ins, record = folder / "bin", folder / "record"
    stand_ins.mkdir(parents=True)
    for name in ("torchrun", "python"):
        program = stand_ins / name
        program.write_text(
            f"#!{sys.executable} -SE\nimport json, os, sys\n"
            f"open({str(record)!r}, 'a').write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + '\\n')\n"
            f"sys.exit({status})\n"
        )
        program.chmod(0o755)
    shutil.copytree(REPO / "examples", folder / "checkout" / "examples")
    environment = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "HOME": str(folder)}
    copy = folder / "checkout" / script.relative_to(REPO)
    done = subprocess.run(["bash", str(copy)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == status, done.stderr
    return [json.loads(line) for line in record.read_text().splitlines()]


def page_commands(page):
    """The words of every command line in the fenced blocks of a page, continuation lines joined."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fenced if language in ("", "bash", "sh", "console")]
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if any(program in line for program in PROGRAMS) and not line.startswith("#"):
            yield shlex.split(line, comments=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_commands_of_an_example_are_accepted_and_it_ends_with_the_status_of_what_failed(
    script, tmp_path, monkeypatch
):
    commands = recorded(script, tmp_path / "works")
    assert recorded(script, tmp_path / "fails", status=3)
    ((flags, world_size),) = filter(None, map(training_command, commands))
    for words in commands:
        if words[1:4] == ["-m", "megatron_moe", "prepare"]:
            options = prepare_cli.parser().parse_args(words[4:])
            assert f"{options.output_prefix}_{options.json_keys[0]}_document" in flags
    check(flags, world_size, tmp_path / "elsewhere", monkeypatch)


def run_of(flags, world_size, *_):
    """The run of a job's flags, without its data and tokenizer, which are not here."""
    run = compat.parse(flags, imported, world_size)
    rules.check(run, world_size)
    return run


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_slurm_script_is_what_the_program_writes(job, tmp_path, monkeypatch):
    written_by = job.read_text().splitlines()[1].removeprefix("# Written by: megatron-moe slurm ")
    (tmp_path / "examples/slurm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrain, "checked", run_of)
    assert slurm.main(shlex.split(written_by)) == 0
    assert (tmp_path / job.relative_to(REPO)).read_text() == job.read_text(), "write it again by its second line"


RECIPES = sorted(REPO.glob("examples/recipes/*.yaml"))


def facts_of(recipe):
    """The number of GPUs and the memory that a recipe's comment says."""
    text = recipe.read_text()
    return int(re.search(r"^# layout: (\d+) GPUs", text, re.M)[1]), re.search(r"^# memory: ([\d.]+) GiB", text, re.M)[1]


def test_every_published_preset_has_a_recipe_that_the_rules_accept(tmp_path, monkeypatch):
    assert {recipe.stem for recipe in RECIPES} == PRESETS.keys() - {"demo", "tiny", "tiny-gqa"}
    for recipe in RECIPES:
        ranks, memory = facts_of(recipe)
        assert float(memory) < 72  # a tenth of 80 GiB is left free
        unset = "train-data-path valid-data-path tokenizer-type tokenizer-model save load save-interval"
        flags = [
            "--config",
            str(recipe),
            "--mock-data",
            *(word for name in unset.split() for word in (f"--{name}", "none")),
        ]
        check(flags, ranks, tmp_path / recipe.stem, monkeypatch)


@pytest.mark.test_all(
    instead="tests/docs/test_examples.py::test_every_published_preset_has_a_recipe_that_the_rules_accept"
)
@pytest.mark.parametrize("name", [recipe.stem for recipe in RECIPES])
def test_a_recipe_needs_the_memory_that_it_says(name, capsys):
    ranks, memory = facts_of(REPO / f"examples/recipes/{name}.yaml")
    flags = ["--config", str(REPO / f"examples/recipes/{name}.yaml"), "--world-size", str(ranks), "--alternatives", "0"]
    assert planning_cli.main(flags) == 0
    assert f"largest rank {memory} GiB of 80: fits" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_is_accepted(page, tmp_path, monkeypatch):
    for number, words in enumerate(page_commands(page)):
        called = re.fullmatch(rf".*megatron[-_]moe ({'|'.join(TOOLS)})\b ?(.*)", shlex.join(words))
        tool, rest = (called[1], shlex.split(called[2])) if called else (None, [])
        if tool == "prepare":
            prepare_cli.parser().parse_args([word for word in rest if word != "..."])
        elif tool == "plan":
            own, flags = planning_cli.parser().parse_known_args(rest)
            rules.check_layout(compat.parse(flags), own.world_size)
        elif tool == "preflight":
            own, flags = preflight_cli.parser().parse_known_args(rest)
            assert own.least_share <= 1
            rules.check_model(compat.parse(flags), 1)
        elif tool == "doctor":
            # The reader's own file or folder is not here.
            assert {"run.yaml", "models/theirs", "train.sh"} & {*rest} or doctor_cli.main([*rest, "--list"]) == 0, words
        elif tool in ("slurm", "kubernetes"):
            if "--" in rest:
                writer = slurm if tool == "slurm" else kubernetes
                own, flags = writer.parser().parse_args(rest[: rest.index("--")]), rest[rest.index("--") + 1 :]
                run_of(flags, own.nodes * (own.nproc_per_node or own.gpus_per_node or 1))
        else:
            flags, world_size = training_command(words)
            if "--help" not in flags:
                check(flags, world_size, tmp_path / str(number), monkeypatch)
