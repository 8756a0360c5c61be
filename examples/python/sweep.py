"""Compare settings: runs one after the other in a process, from the same seed and on the same samples.

python examples/python/sweep.py
"""

import megatron_moe as mm

base = mm.Settings.from_flags(
    "--preset tiny --mock-data --vocab-size 256 --seq-length 64 --train-iters 20 --eval-iters 2 --global-batch-size 4"
)
print(f"{'settings':40} {'loss':>7} {'valid':>7} {'busiest expert':>15}")
for changes in (
    {"lr": 1e-3},
    {"lr": 3e-3},
    {"lr": 3e-3, "moe_router_bias_update_rate": 0.0},
    {"lr": 3e-3, "bf16": True},
):
    result = mm.train(base.replace(**changes, log_interval=20))
    name = ", ".join(f"{key}={value}" for key, value in changes.items())
    last = result.steps[-1]
    print(f"{name:40} {last.loss:7.3f} {result.summary['valid_loss']:7.3f} {last.expert_load:15.2f}")
