"""Train with the experts on two processes: the same script, started by torchrun.

torchrun --nproc-per-node 2 examples/python/on_two_ranks.py
"""

import os

import megatron_moe as mm

settings = mm.Settings.from_preset(
    "tiny",
    mock_data=True,
    vocab_size=256,
    seq_length=64,
    train_iters=5,
    eval_iters=0,
    global_batch_size=4,
    save="on_two_ranks",
)
ranks = int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    settings = settings.replace(expert_model_parallel_size=ranks, use_distributed_optimizer=True)
result = mm.train(settings)
if result.steps:  # rank 0 has the metrics
    print(f"{ranks} ranks: loss {result.steps[-1].loss:.6f}, saved in {result.checkpoint}")
