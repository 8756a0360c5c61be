"""What a person sees: log lines, a progress line, metrics.jsonl, TensorBoard events, the PNG and summary.json.

A program of its own adds a metric with `register_metric(Metric(...))` before it calls `pretrain`, and hands in objects
that get the events of the run with `pretrain(run, also=[sink])`, each a `Sink`:
docs/reference/metrics.md has an example.
"""

from __future__ import annotations

from megatron_moe.report.metric import ExpertLoad, Metric, MetricError, StepFacts, register_metric, unregister_metric
from megatron_moe.report.records import EvalRecord, StepRecord
from megatron_moe.report.sink import Sink

__all__ = [
    "EvalRecord",
    "ExpertLoad",
    "Metric",
    "MetricError",
    "Sink",
    "StepFacts",
    "StepRecord",
    "register_metric",
    "unregister_metric",
]
