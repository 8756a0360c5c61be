"""What a rank of stages 2 and 6 does: joins the others, and calls collectives or trains a layout."""

import json
import os
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import megatron_moe  # noqa: F401  (before the engine)
from megatron_moe import platform
from megatron_moe_tools.doctor.measure import measure
from tests.gpu import staged_backend


def join(rank: int, ranks: int, store: str, backend: str) -> Any:
    """Join the default group and return this rank's device."""
    staged_backend.register()
    device = platform.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = dist.FileStore(store, ranks)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    return device


def measure_layouts(rank: int, ranks: int, store: str, folder: str, jobs: list[dict[str, Any]]) -> None:
    """Train layouts one after another as `megatron-moe doctor` does; leave records in `folder`/NAME-RANK.pt.

    Args:
        jobs: name, ranks, backend, request; ranks beyond a job's wait for the next.
    """
    for number, job in enumerate(jobs):
        if rank >= job["ranks"]:
            continue
        local = rank if job["backend"] == "nccl" else 0
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["ranks"]), LOCAL_RANK=str(local))
        try:
            join(rank, job["ranks"], f"{store}{number}", job["backend"])
            record = measure(job["request"])
        except Exception:
            record = {"error": traceback.format_exc()[-1500:]}
        path = f"{folder}/{job['name']}-{rank}.pt"
        torch.save(record, path + ".new")
        os.replace(path + ".new", path)


def collectives(rank: int, ranks: int, store: str, folder: str, backend: str) -> None:
    """Call each collective that is used; leave name -> what was wrong ("" for nothing) in `folder`/RANK.json."""
    device = join(rank, ranks, store, backend)
    found: dict[str, str] = {}
    for name, look in COLLECTIVES.items():
        print("collective", name, flush=True)
        try:
            found[name] = look(rank, ranks, device) or ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    dist.barrier()
    began = time.monotonic()
    dist.distributed_c10d._abort_process_group()
    found["abort"] = "" if time.monotonic() - began < 10 else "took longer than 10 s"
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)


def _same(got: Any, wanted: Any) -> str:
    got, wanted = got.double().cpu(), torch.as_tensor(wanted, dtype=torch.float64).expand(got.shape)
    return "" if torch.equal(got, wanted) else f"{got.flatten()[:8].tolist()}, not {wanted.flatten()[:8].tolist()}"


def _all_reduce(rank: int, ranks: int, device: Any) -> str:
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64):
        for op, wanted in ((dist.ReduceOp.SUM, sum(range(1, ranks + 1))), (dist.ReduceOp.MAX, ranks)):
            tensor = torch.full((1000,), rank + 1, dtype=dtype, device=device)
            work = dist.all_reduce(tensor, op=op, async_op=True)
            work.wait()
            wrong.append(_same(tensor, wanted))
    return "; ".join(filter(None, wrong))


def _all_gather(rank: int, ranks: int, device: Any) -> str:
    own = torch.full((3, 2), rank, dtype=torch.bfloat16, device=device)
    together = torch.full((3 * ranks, 2), torch.nan, dtype=own.dtype, device=device)
    dist.all_gather_into_tensor(together, own)
    listed = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(listed, own)
    wanted = torch.arange(ranks).repeat_interleave(6).view(-1, 2)
    return _same(together, wanted) or _same(torch.cat(listed), wanted)


def _reduce_scatter(rank: int, ranks: int, device: Any) -> str:
    whole = torch.arange(ranks, dtype=torch.float32, device=device).repeat_interleave(5) + rank
    share = torch.full((5,), torch.nan, device=device)
    dist.reduce_scatter_tensor(share, whole)
    return _same(share, rank * ranks + sum(range(ranks)))


def _all_to_all(rank: int, ranks: int, device: Any) -> str:
    # Rank r sends r + s rows to rank s: an uneven exchange in which some send nothing.
    send = [rank + other for other in range(ranks)]
    rows = torch.full((sum(send), 7), rank, dtype=torch.bfloat16, device=device)
    got = torch.full((sum(send), 7), torch.nan, dtype=rows.dtype, device=device)  # r + s is symmetric
    dist.all_to_all_single(got, rows, send, send)
    wanted = torch.cat([torch.full((n,), float(other)) for other, n in enumerate(send)])
    even = torch.arange(ranks, device=device)
    even_got = torch.empty_like(even)
    dist.all_to_all_single(even_got, even)
    return _same(got, wanted.unsqueeze(1).expand(-1, 7)) or _same(even_got, rank)


def _broadcast(rank: int, ranks: int, device: Any) -> str:
    tensor = torch.full((11,), float(rank), device=device)
    dist.broadcast(tensor, src=ranks - 1)
    return _same(tensor, ranks - 1)


def _point_to_point(rank: int, ranks: int, device: Any) -> str:
    if ranks == 1:
        return "not possible: one rank has no neighbour"
    sent = torch.full((6,), float(rank), device=device)
    got = torch.full((6,), torch.nan, device=device)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, got, before)]):
        work.wait()
    return _same(got, before)


def _objects(rank: int, ranks: int, device: Any) -> str:
    together: list[Any] = [None] * ranks
    dist.all_gather_object(together, {"rank": rank, "text": "x" * (100 * rank)})
    sent = [{"from": rank}]
    dist.broadcast_object_list(sent, src=0)
    gathered: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object((rank,), gathered, dst=0)
    wanted = [{"rank": r, "text": "x" * (100 * r)} for r in range(ranks)]
    right = together == wanted and sent == [{"from": 0}] and (rank or gathered == [(r,) for r in range(ranks)])
    return "" if right else f"{together} {sent} {gathered}"


def _groups(rank: int, ranks: int, device: Any) -> str:
    wrong = ""
    for first in range(0, ranks, 2):
        members = list(range(first, min(first + 2, ranks)))
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.ones(4, device=device)
            dist.all_reduce(tensor, group=group)
            wrong = _same(tensor, len(members))
    return wrong


COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all_single, uneven": _all_to_all,
    "broadcast": _broadcast,
    "batch_isend_irecv": _point_to_point,
    "object collectives": _objects,
    "new_group": _groups,
}
