#!/usr/bin/env bash
# DeepSeek-V2-Lite (15.7 B parameters, 2.7 B active) on one node with eight GPUs of 80 GB.
#
#   TEXT=corpus.jsonl TOKENIZER=tokenizers/deepseek-v2-lite examples/one_node.sh
#
# TEXT holds one {"text": ...} per line; TOKENIZER is a folder in transformers' format. Stopped with SIGTERM it saves;
# run again, it goes on. The layout is chosen by arithmetic and has not been run on such a machine by us.
set -euo pipefail
cd "$(dirname "$0")/.."

TEXT=${TEXT:-corpus.jsonl}
TOKENIZER=${TOKENIZER:-tokenizers/deepseek-v2-lite}
DATA=${DATA:-data/deepseek-v2-lite}
RUN=${RUN:-runs/deepseek-v2-lite}

if [[ ! -e ${DATA}_text_document.idx ]]; then
  python -m megatron_moe prepare --input "$TEXT" --output-prefix "$DATA" --append-eod \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
fi

# This launcher lets the ranks save after SIGTERM; torchrun kills them after 30 s, before torch 2.13 in any case.
python -m megatron_moe train --nproc-per-node 8 \
  --config examples/recipes/deepseek-v2-lite.yaml --train-data-path none --valid-data-path none \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
  --data-path "${DATA}_text_document" --split 989,10,1 \
  --save "$RUN/checkpoints" --load "$RUN/checkpoints" --exit-signal-handler \
  --metrics-file "$RUN/metrics.jsonl" --tensorboard-dir "$RUN/tensorboard" --plot-file "$RUN/plot.png" \
  --summary-file "$RUN/summary.json" "$@"
