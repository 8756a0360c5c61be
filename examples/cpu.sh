#!/usr/bin/env bash
# Two processes on a machine without a GPU: text files to tokens, then a tiny model in bf16, expert-parallel over both.
# Run it again, and it goes on from its last checkpoint. Other flags can follow: examples/cpu.sh --train-iters 400
set -euo pipefail
cd "$(dirname "$0")/.."

RUN=${RUN:-runs/cpu}  # everything goes here
TEXT=${TEXT:-}        # a folder of text files, or .jsonl files; default: a part of Python's standard library

if [[ ! -e $RUN/data/text_text_document.idx ]]; then
  if [[ -z $TEXT ]]; then
    python tools/corpus.py "$RUN/corpus"
    TEXT=$RUN/corpus/test.jsonl  # a twentieth, enough for bytes as tokens
  fi
  python -m megatron_moe prepare --input "$TEXT" --output-prefix "$RUN/data/text" --append-eod \
    --tokenizer-type ByteTokenizer
fi

# One thread per process on two cores; a thread that waits does not spin.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=passive

torchrun --standalone --nproc-per-node 2 pretrain_moe.py --preset tiny \
  --bf16 --use-distributed-optimizer --expert-model-parallel-size 2 \
  --data-path "$RUN/data/text_text_document" --split 90,10,0 --tokenizer-type ByteTokenizer \
  --train-iters 200 --lr-decay-style cosine --lr-warmup-iters 10 --eval-interval 50 \
  --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 50 --exit-signal-handler \
  --log-interval 10 --metrics-file "$RUN/metrics.jsonl" --plot-file "$RUN/plot.png" \
  --summary-file "$RUN/summary.json" "$@"
