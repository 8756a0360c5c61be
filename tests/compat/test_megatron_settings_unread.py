"""Values that Megatron-LM accepts and ignores are left out with a note, and change nothing else."""

import shlex

import pytest

from megatron_moe.config import rules
from megatron_moe_tools import compat

TINY = "--preset tiny --mock-data --vocab-size 256"
GQA = "--preset tiny-gqa --mock-data --vocab-size 256"
SIGMOID = "--moe-router-score-function sigmoid"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules"
AUX, COEFF = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"
RECOMPUTE = "--recompute-granularity selective --recompute-modules"

# base, flags that are left out, flags of the run that is trained instead, and what the note names
ROWS = [
    (TINY, "--sequence-parallel", "", ["--sequence-parallel", "off"]),
    (TINY, "--kv-channels 128", "", ["--kv-channels 128", "--qk-head-dim"]),
    (TINY, "--group-query-attention --num-query-groups 2", "", ["--group-query-attention, --num-query-groups 2"]),
    (TINY, "--add-qkv-bias", "", ["--add-qkv-bias"]),
    (f"{TINY} {SIGMOID}", "--moe-router-pre-softmax", "", ["--moe-router-pre-softmax", SIGMOID]),
    (TINY, "--attention-backend flash", "", ["--attention-backend flash", "--transformer-impl local"]),
    (TINY, f"{AUX} seq_aux_loss {COEFF} 0", "", ["seq_aux_loss", "NOT ADDED", COEFF]),
    (TINY, f"{AUX} aux_loss", "", ["aux_loss", "NOT ADDED"]),
    (TINY, f"{AUX} aux_loss seq_aux_loss {COEFF} 0 0.1", f"{AUX} seq_aux_loss {COEFF} 0.1", [f"{AUX} aux_loss:"]),
    (TINY, f"{AUX} none {COEFF} 0.1", "", [f"{COEFF} 0.1", "LEFT OUT"]),
    (TINY, "--offload-modules core_attn", "", ["--offload-modules core_attn", "only the offload"]),
    (
        f"{TINY} {RECOMPUTE} layernorm moe_act mla_up_proj",
        f"{OFFLOAD} qkv_linear moe_act core_attn",
        f"{OFFLOAD} moe_act",
        ["--offload-modules qkv_linear moe_act core_attn", "without qkv_linear core_attn"],
    ),
    (f"{TINY} {RECOMPUTE} moe", f"{OFFLOAD} moe_act", "", ["moe_act"]),
    (TINY, "--moe-expert-capacity-factor -1", "", ["--moe-expert-capacity-factor -1", "none"]),
    (GQA, "--moe-shared-expert-overlap --moe-shared-expert-gate", "", ["--moe-shared-expert-intermediate-size"]),
    (TINY, "--moe-token-drop-policy position", "", ["--moe-token-drop-policy position"]),
    (GQA, "--moe-router-bias-update-rate 0.1", "", ["--no-moe-router-enable-expert-bias"]),
    (f"{GQA} --no-group-query-attention", "", "--num-query-groups none", ["--num-query-groups 2"]),
    (GQA, "--q-lora-rank 8 --v-head-dim 16", "", ["--q-lora-rank 8, --v-head-dim 16", "--no-multi-latent-attention"]),
    (TINY, "--mtp-loss-scaling-factor 0.3", "", ["--mtp-num-layers"]),
    (f"{TINY} --bf16", "--initial-loss-scale 4 --hysteresis 3", "", ["--hysteresis 3", "--no-fp16"]),
    (f"{TINY} --fp16 --loss-scale 8", "--loss-scale-window 9", "", ["--loss-scale-window 9", "--loss-scale"]),
    (f"{TINY} --bf16", "--first-last-layers-bf16", "", ["--fp8-format"]),
    (TINY, "--num-layers-at-start-in-bf16 3", "", ["--no-first-last-layers-bf16"]),
    (TINY, "--lr-wsd-decay-iters 5 --lr-wsd-decay-style linear", "", ["--lr-wsd-decay-iters 5", "WSD"]),
    (f"{TINY} --eval-iters 0", "--eval-interval 5", "", ["--eval-interval 5", "--eval-iters 0"]),
    (TINY, "--tiktoken-pattern v1", "", ["--tiktoken-pattern v1", "TikTokenizer"]),
    (TINY, "--recompute-method uniform --recompute-num-layers 1", "", ["--recompute-granularity"]),
    (TINY, "--recompute-modules moe", "", ["--recompute-modules moe", "selective"]),
    (TINY, "--save-interval 5 --no-save-optim --async-save", "", ["--save-interval 5", "NOTHING IS SAVED"]),
    (f"{TINY} --use-torch-fsdp2", "--overlap-grad-reduce --overlap-param-gather", "", ["param-gather", "ZeRO stage 2"]),
    (
        f"{TINY} --bf16 --data-parallel-sharding-strategy optim_grads",
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
        "",
        ["--overlap-moe-expert-parallel-comm, --delay-wgrad-compute", "NOT OVERLAPPED"],
    ),
    (f"{TINY} --bf16 --fp8-format e4m3", "--fp8-param-gather", "", ["--fp8-param-gather", "NOT STORED IN FP8"]),
    (f"{TINY} --bf16 --fp8-format e4m3", "--delay-wgrad-compute", "", ["--delay-wgrad-compute", "FP8"]),
    (
        "--preset tiny --mock-data --vocab-file vocab.json --merge-file merges.txt",
        "",
        "--tokenizer-type GPT2BPETokenizer",
        ["--vocab-file vocab.json", "--tokenizer-type GPT2BPETokenizer is TAKEN"],
    ),
    (TINY, "--account-for-loss-in-pipeline-split", "", ["--account-for-loss-in-pipeline-split", "one stage"]),
    (TINY, "--ckpt-step 3 --exit-on-missing-checkpoint", "", ["--ckpt-step 3", "--load"]),
    (TINY, "--finetune --no-load-optim --no-load-rng", "", ["--finetune, --no-load-optim, --no-load-rng", "--load"]),
    (TINY, "--manual-gc-interval 5 --no-manual-gc-eval", "", ["5, --no-manual-gc-eval", "--no-manual-gc:"]),
    (TINY, "--use-pytorch-profiler --profile-ranks 0 1", "", ["--profile-ranks 0 1", "--no-profile:"]),
    (TINY, "--log-timers-to-tensorboard", "", ["--log-timers-to-tensorboard", "--tensorboard-dir"]),
    (TINY, "--wandb-exp-name one --wandb-save-dir w", "", ["--wandb-exp-name one", "no --wandb-project:"]),
    # Yarn: Megatron-LM's default for latent attention, which is the plain rotation at factor 1.
    (TINY, "--rotary-scaling-factor 40", "--rope-type yarn --rotary-scaling-factor 40", ["--rope-type yarn is TAKEN"]),
    (TINY, "--mscale 0.7 --mscale-all-dim 1 --beta-fast 16", "", ["--mscale 0.7", "--rotary-scaling-factor 1"]),
    (f"{TINY} --rope-type rope", "--rotary-scaling-factor 40", "", ["LEFT OUT", "--rope-type rope"]),
    (GQA, "--rotary-scaling-factor 40 --mscale 0.7", "", ["LEFT OUT", "latent attention"]),
]


def test_nothing_is_offloaded_where_layers_are_computed_in_parts():
    overlap = f"{TINY} --bf16 --overlap-moe-expert-parallel-comm --expert-model-parallel-size 2"
    run = compat.parse(f"{overlap} {OFFLOAD} core_attn".split())
    rules.check(run, 2)
    assert not run.training.fine_grained_activation_offloading
    assert any("ACTIVATIONS STAY" in note and "--offload-modules core_attn" in note for note in run.warnings)


@pytest.mark.parametrize(("base", "flags", "instead", "says"), ROWS, ids=[row[1] for row in ROWS])
def test_an_ignored_value_is_left_out_with_a_note(base, flags, instead, says):
    run = compat.parse(shlex.split(f"{base} {flags}"))
    rules.check(run, 1)
    assert run == compat.parse(shlex.split(f"{base} {instead}"))
    (note,) = run.warnings
    assert [text for text in says if text not in note] == []


@pytest.mark.parametrize(
    "flags",
    [
        f"{GQA} --kv-channels 32",
        f"{GQA} --moe-router-pre-softmax",
        f"{TINY} {AUX} aux_loss --moe-aux-loss-coeff 0.1",
        f"{GQA} --moe-aux-loss-coeff 0.1",
        f"{TINY} --moe-expert-capacity-factor 1.5 --moe-token-drop-policy position",
        f"{TINY} --moe-shared-expert-overlap --moe-router-bias-update-rate 0.1 --kv-lora-rank 48",
        f"{TINY} --bf16 --loss-scale 8",
        f"{TINY} --eval-interval 5 --eval-iters 1",
        f"{TINY} --load-hf somewhere --no-load-rng",
        f"{TINY} --data-parallel-sharding-strategy optim --overlap-grad-reduce --overlap-param-gather",
        TINY,
    ],
)
def test_a_value_that_is_read_stays_without_a_note(flags):
    assert compat.parse(shlex.split(flags)).warnings == ()


EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        (f"--num-layers 6 --pipeline-model-parallel-size 4 {EMBEDDING} {LOSS}", "Et|tt|tt|tL"),
        (f"--num-layers 7 --pipeline-model-parallel-size 2 {LOSS} --mtp-num-layers 1", "Etttt|tttmL"),
        (
            f"--num-layers 7 --pipeline-model-parallel-size 2 {EMBEDDING} --num-layers-per-virtual-pipeline-stage 2",
            "Et|tt|tt|ttL",
        ),
    ],
)
def test_a_split_that_counts_embedding_or_loss_is_a_layout_by_letters(flags, layout):
    base = "--mock-data --vocab-size 256 --train-iters 5 --global-batch-size 8"
    run = compat.parse(shlex.split(f"{base} {flags}"))
    assert run.parallel.pipeline_model_parallel_layout == layout
    rules.check(run, run.parallel.pipeline_model_parallel_size)
    assert any(layout in note for note in run.warnings)


def test_a_split_that_is_not_even_is_left_to_the_rules():
    run = compat.parse(shlex.split(f"--num-layers 6 --pipeline-model-parallel-size 4 {EMBEDDING}"))
    assert run.parallel.pipeline_model_parallel_layout is None and run.warnings == ()
