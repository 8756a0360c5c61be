"""A shell script's training command is read without being run, answered, and rewritten."""

import json
import shlex
import subprocess

import pytest

from megatron_moe_tools import compat
from megatron_moe_tools.compat.flags import main, read_script

ARRAYS = """#!/bin/bash
#SBATCH --nodes 4
# usage: train.sh --not-a-flag
FMT=torch_dist
TP=${TP:-2}
DISTRIBUTED_ARGS=(
    --nproc_per_node 8  # cards
    --nnodes ${NNODES:-1} --master_addr $ADDR
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 4 # --hidden-size 9
    # --commented-out 3
    --moe-layer-freq "([0]*1+[1]*3)" --lr=1e-4
    --ckpt-format $FMT --dist-ckpt-format torch_dist
    --decoder-seq-length 1024
)
if [ "$FULL" = 1 ]; then MODEL_ARGS+=( --recompute-activations ); fi
UNUSED=( --vocab-size 7 )
cat > config.yaml <<'EOF'
--heredoc-flag 1
EOF
echo "start with --wrong"
docker run --gpus all --ipc=host image
python tools/preprocess_data.py --input a.jsonl
source common.sh
torchrun ${DISTRIBUTED_ARGS[@]} --log-dir logs pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" --tensor-model-parallel-size $TP --seed -1 \\
    --save "${CKPT}/a b" 2>&1 | tee -a log.txt
"""
STRINGS = """
export OPTIONS=" --num-layers 4 \\
    --bf16 --split 99,1,0"
OPTIONS="$OPTIONS --lr ${LR}"
run_cmd="python -u ${DIR}/pretrain_gpt.py ${OPTIONS} --save '${CKPT}'"
srun -l --container-image img --container-mounts a:b sh -c "${run_cmd}"
"""
EVAL = """
gpt_options="--num-layers $(expr 2 + 2) --hidden-size $((2*8))"
run_cmd="torchrun $DIST pretrain_mixtral.py --seed 1 ${gpt_options} --data-path 0.5 a 0.5 b"
echo ${run_cmd}
eval ${run_cmd}
"""


@pytest.fixture
def answered(tmp_path, capsys):
    def run(*argv: str, script: str | None = None, status: int = 0) -> str:
        words = list(argv)
        if script is not None:
            (tmp_path / "train.sh").write_text(script)
            words += ["--script", str(tmp_path / "train.sh")]
        assert main(words) == status
        return capsys.readouterr().out

    return run


def test_arrays_that_the_command_names_are_read_and_nothing_else(answered):
    assert dict(read_script(ARRAYS).flags) == {
        "--use-mcore-models": [], "--num-layers": ["4"], "--moe-layer-freq": ['"([0]*1+[1]*3)"'], "--lr": ["1e-4"],
        "--ckpt-format": ["$FMT"], "--dist-ckpt-format": ["torch_dist"], "--decoder-seq-length": ["1024"],
        "--recompute-activations": [], "--tensor-model-parallel-size": ["$TP"], "--seed": ["-1"],
        "--save": ['"${CKPT}/a b"'],
    }  # fmt: skip
    assert read_script(ARRAYS).sourced == ["common.sh"]
    assert read_script(ARRAYS).resolved('"$FMT"') == "torch_dist" and read_script(ARRAYS).resolved("${TP}") == "2"
    # the value of a variable decides
    assert json.loads(answered("--json", script=ARRAYS, status=1))["--ckpt-format"]["answer"] == "always"
    assert answered(script=ARRAYS, status=1).splitlines()[-3] == "6 taken, 1 alias, 3 always, 1 refused"


def test_strings_of_flags_are_read_through_the_commands_that_run_them_and_a_plain_list_is_a_script():
    assert read_script(STRINGS).flags == [
        ("--num-layers", ["4"]), ("--bf16", []), ("--split", ["99,1,0"]), ("--lr", ["${LR}"]),
        ("--save", ["'${CKPT}'"]),
    ]  # fmt: skip
    assert read_script(EVAL).flags == [
        ("--num-layers", ["$(expr 2 + 2)"]), ("--hidden-size", ["$((2*8))"]),
        ("--seed", ["1"]), ("--data-path", ["0.5", "a", "0.5", "b"]),
    ]  # fmt: skip
    plain = "--moe-layer-freq ([0]*3+[1]*58)\n--pipeline-model-parallel-layout Et|(tt|)*30mL --bf16"
    assert read_script(plain).flags == [
        ("--moe-layer-freq", ["([0]*3+[1]*58)"]), ("--pipeline-model-parallel-layout", ["Et|(tt|)*30mL"]),
        ("--bf16", []),
    ]  # fmt: skip


def test_a_rewritten_command_keeps_values_and_names_what_it_leaves_out(answered):
    lines = answered("--rewrite", script=ARRAYS, status=1).splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert len(comments) == 5 and "common.sh" in comments[0] and "--decoder-seq-length 1024" in comments[2]
    assert comments[4].endswith(": $ADDR $CKPT") and lines[5] == "TP=${TP:-2}"
    assert 'only if [ "$FULL" = 1 ]: --recompute-activations' in comments[1]
    command = "\n".join(lines[6:])
    launcher = "megatron-moe train --nproc_per_node 8 --nnodes ${NNODES:-1} --master_addr $ADDR --log-dir logs"
    assert command.startswith(launcher)
    for kept in ('"([0]*1+[1]*3)"', "--tensor-model-parallel-size $TP", "--recompute-granularity selective"):
        assert kept in command
    for dropped in ("--ckpt-format", "--dist-ckpt-format", "--use-mcore-models"):
        assert dropped not in command
    words = shlex.split(command.replace("\\\n", " "))
    defaults, megatron, *flags = words[words.index("--defaults") :]
    assert (defaults, megatron) == ("--defaults", "megatron")
    run = compat.parse([*flags[:6], "--seed", "3"])
    assert run.model.num_layers == 4 and run.warnings == ()
    said = answered("--rewrite", "--n-group", "8", "--use-fused-rmsnorm", status=1)
    assert "# unknown: --n-group 8: use --moe-router-num-groups" in said and "rmsnorm: a kernel" in said


WITH_ARGUMENTS = """#!/bin/bash
export DATA=/data PYTHONPATH=/Megatron-LM:$PYTHONPATH
NNODES=1; GPUS=8; NUMBER=${RANK:-0}
CKPT=$1
LR=${2:-1e-4}
BATCH=$((GPUS * NNODES))
UNUSED=3
ARGS="--lr $LR --lr $LR --sft --sft --save $CKPT --data-path $DATA/a --global-batch-size $BATCH --seed ${SEED}"
NCCL_DEBUG=WARN torchrun --max-restarts 3 --nnodes $NNODES --node_rank $NUMBER pretrain_gpt.py $ARGS
SEED=4
"""


def test_a_rewritten_script_runs_with_the_arguments_and_exports_of_the_script_from_any_folder(answered, tmp_path):
    text = answered("--rewrite", script=WITH_ARGUMENTS, status=1)
    assert text.count("# refused: --sft") == 1 and "# left out" in text and "UNUSED" not in text
    assert "arguments: $1 $2\n" in text and "export them first: $SEED\n" in text
    program = tmp_path / "bin" / "megatron-moe"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@" "${RANK-none}" "$NCCL_DEBUG" "$PYTHONPATH"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin", "RANK": "7", "SEED": "5", "PYTHONPATH": "ours"}
    command = ["bash", "-c", text, "bash", "here"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        *"train --nnodes 1 --node_rank 7 --defaults megatron --lr 1e-4 --save here --data-path /data/a".split(),
        *"--global-batch-size 8 --seed 5 none WARN ours".split(),
    ]


def test_a_finding_is_listed_once_with_how_often_it_stands_there(answered):
    said = answered(script=WITH_ARGUMENTS, status=1).splitlines()
    assert said[0].startswith("refused  --sft (2 times): ") and said[1] == "5 taken, 1 refused"


def test_the_answers_of_a_list_are_an_object_by_flag(answered):
    asked = "--lr 1 --tp 2 --attention-backend local --sft --te-rng-tracker"
    said = json.loads(answered("--json", *asked.split()))
    assert {flag: entry["answer"] for flag, entry in said.items()} == {
        "--lr": "taken", "--tp": "unknown", "--attention-backend": "alias", "--sft": "refused",
        "--te-rng-tracker": "ignored",
    }  # fmt: skip
    assert all(set(entry) == {"answer", "reason"} and entry["reason"] for entry in said.values())
    (entry,) = json.loads(answered("--json", "--main-grads-dtype")).values()
    assert entry["answer"] == "by value" and "bf16: alias --grad-reduce-in-bf16" in entry["reason"]


def test_a_test_case_of_megatrons_is_a_script(tmp_path, capsys):
    file = tmp_path / "model_config.yaml"
    file.write_text('MODEL_ARGS:\n  --lr: 1\n  --bf16: true\n  --fp16: false\n  --moe-layer-freq: "([0]*1+[1]*3)"\n')
    assert main(["--rewrite", "--script", str(file)]) == 0
    wanted = "megatron-moe train --defaults megatron --lr 1 --bf16".split()
    assert shlex.split(capsys.readouterr().out.replace("\\\n", "")) == [*wanted, "--moe-layer-freq", "([0]*1+[1]*3)"]
    capsys.readouterr()
    for text in ("TEST_TYPE: regular\n", "MODEL_ARGS: [", "MODEL_ARGS: 2026-13-01", "[" * 600):
        file.write_text(text)
        assert main(["--script", str(file)]) == 2 and capsys.readouterr().err.count(str(file)) == 1, text


@pytest.mark.parametrize(("script", "others", "kept"), [
    ("if [ $X ]; then\ntorchrun pretrain_gpt.py --bf16\nelse\ntorchrun pretrain_gpt.py --fp16\nfi", 1, "--bf16"),
    ("python pretrain_gpt.py --fp16 --save a\npython pretrain_gpt.py --bf16 --load a", 1, "--fp16"),
    ("for x in 1 2; do\npython pretrain_gpt.py --bf16\ndone\npython pretrain_gpt.py --bf16", 0, "--bf16"),
])  # fmt: skip
def test_of_several_training_commands_one_is_read_and_the_others_are_told(
    script: str, others: int, kept: str, tmp_path, capsys
) -> None:
    (tmp_path / "run.sh").write_text(script)
    status = main(["--rewrite", "--script", str(tmp_path / "run.sh")])
    out, err = capsys.readouterr()
    assert status == (1 if others else 0) and f"commands that differ: {others}" in err + "commands that differ: 0"
    assert [flag for flag in ("--bf16", "--fp16") if f"  {flag}" in out] == [kept]
