"""Rules about attention's sinks and windows."""

from __future__ import annotations

from megatron_moe.config.rules.rule import Refusal, is_set, refuse, rule, set_among, unread
from megatron_moe.config.schema import Run

unread(
    ("window_attn_skip_freq",),
    "window_size",
    "no layer has a window; add --window-size, e.g. 127,0, or drop it",
    in_megatron=True,
)
refuse(
    "windows_are_of_some_layers",
    ("window_size", "window_attn_skip_freq"),
    "no layer would have the window; put a 1 into the pattern, or drop both",
    when=lambda run: run.derived.window is not None and not any(run.derived.window_pattern),
)


@rule()
def sinks_and_windows_can_work(run: Run) -> None:
    """Refuse sinks and windows where attention is another than ours over grouped queries, without dropout."""
    names = set_among(run, ("softmax_type", "window_size"))
    obstacles = {
        "multi_latent_attention": "latent attention has neither; use grouped-query attention",
        "transformer_impl": "they are the local attention's; use --transformer-impl local",
        "attention_dropout": "they drop no weights; use --attention-dropout 0",
        "mtp_num_layers": "further predictions were not tried with them; drop --mtp-num-layers",
    }
    for field, reason in obstacles.items():
        if names and is_set(run, field):
            raise Refusal((*names, field), reason)
    if run.model.window_size is not None and (run.optimizer.qk_clip or run.logging.log_max_attention_logit):
        raise Refusal(
            ("window_size", *set_among(run, ("qk_clip", "log_max_attention_logit"))),
            "the largest logit is taken over all tokens before a query; drop one of them",
        )
