"""A plain PyTorch trainer with fully_shard, as `megatron-moe doctor --target script` takes it."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

vocabulary, WIDTH, HEADS = 64, 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


def build(rank, world):
    global model, optimizer
    model = nn.Sequential(nn.Embedding(vocabulary, WIDTH), Block(), Block(), nn.Linear(WIDTH, vocabulary))
    if world > 1:
        for block in model[1:3]:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(batch):
    trained = torch.tensor(float(sum((micro["labels"] != -100).sum() for micro in batch)))
    dist.all_reduce(trained)
    total = torch.zeros(())
    for micro in batch:
        logits, labels = model(micro["input_ids"])[:, :-1], micro["labels"][:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / trained
        (loss * dist.get_world_size()).backward()  # fully_shard averages over the ranks
        total += loss.detach()
    dist.all_reduce(total)
    return total.item()


def named_gradients():
    return [(name, weight.grad) for name, weight in model.named_parameters()]


def named_weights():
    return model.named_parameters()


def update():
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def save(folder):
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"weights": weights, "state": state}, checkpoint_id=f"{folder}/saved")


def load(folder):
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"weights": weights, "state": state}, checkpoint_id=f"{folder}/saved")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
