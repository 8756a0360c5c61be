"""What a person sees: log lines, a progress line, metrics.jsonl, TensorBoard events, the PNG and summary.json."""
