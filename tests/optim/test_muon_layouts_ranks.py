"""Muon over layouts and checkpoints: one rank is the oracle."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.config.errors import ConfigError
from tests.helpers import stepped_trainer as steps
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, STORED, TP2, ZERO_2, ZERO_3, resumed, stopped, trained
from tests.optim.layout_cases import BF16_MOMENTS, CODES, EVERY, FEW, OF_DP4, OFFLOAD, PACKED, require_close

MUON = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", **FEW}
# Parts of a matrix that several ranks have, in odd shares or along two axes.
GROUPED: dict[str, Any] = {"multi_latent_attention": False, "q_lora_rank": None, "kv_lora_rank": None}
GROUPED |= {"group_query_attention": True, "num_attention_heads": 4, "num_query_groups": 2}
EACH_HEAD = {"muon_split_qkv_per_head": True}
ODD_EXPERTS = {"num_experts": 7, "moe_router_num_groups": None, "moe_router_group_topk": None}
OF_MODEL = (*GROUPED, *EACH_HEAD, *ODD_EXPERTS)
ALL: dict[str, tuple[int, dict[str, Any]]] = {
    **EVERY,
    "DP4, distributed optimizer": (4, {**DISTRIBUTED, **OF_DP4}),
    "TP2 x DP2, ZeRO 3": (4, {**TP2, **ZERO_3}),
    "TP2 x DP2, distributed optimizer": (4, {**TP2, **DISTRIBUTED}),
    "DP2, ZeRO 3, odd experts": (2, {**ZERO_3, **ODD_EXPERTS}),
    "TP2, each head": (2, {**EACH_HEAD, **TP2}),
    "TP2, query groups": (2, {**GROUPED, **TP2}),
}


def trained_in_rounds(flags: dict[str, Any]) -> Any:
    """As `trained`; few matrices are brought together at a time."""
    from megatron_moe.optim import matrix_exchange

    with mock.patch.object(matrix_exchange, "ROUND_NUMEL", 2**12):
        return trained(flags)


# With the distributed optimizer on two ranks, test_muon_ranks.py compares with fp64.
EITHER = ["DP2", "DP2, ZeRO 3, odd experts", "TP2, query groups", "TP2, ETP1", "PP2"]


@pytest.mark.engine
@pytest.mark.parametrize("layout", rows(ALL, test=EITHER))
def test_a_layout_trains_as_one_rank_does(gloo: Any, once: Any, layout: str) -> None:
    ranks, changes = ALL[layout]
    one = once(1, trained, flags={**MUON, **{name: changes[name] for name in OF_MODEL if name in changes}})
    many = gloo.run(ranks, trained_in_rounds if layout == "DP2" else trained, flags={**MUON, **changes})
    assert many[0][0] == pytest.approx(one[0][0], rel=1e-5)
    # An update is a hundredth (the rate) of 0.2; small singular values make sums in another order show.
    wanted = require_close(one, many, rtol=1e-4, atol=2e-5)
    assert 0 < sum(".exp_avg_sq." in key for key in wanted) < sum(".exp_avg." in key for key in wanted)


ROUNDED = ["DP2, distributed optimizer", "DP2, ZeRO 2", "TP2 x DP2, ZeRO 3"]


@pytest.mark.parametrize("layout", rows(ROUNDED, test=["DP2, distributed optimizer"]))
def test_a_layout_rounds_momenta_as_one_rank_does(gloo: Any, once: Any, layout: str) -> None:
    ranks, changes = ALL[layout]
    one = once(1, trained, flags={**MUON, **BF16_MOMENTS})
    steps.require_rounded_alike(one, gloo.run(ranks, trained, flags={**MUON, **BF16_MOMENTS, **changes}))


CLIPPED = {"qk_clip": True, "qk_clip_threshold": 0.02}
# ranks, flags, and those that should change no bit
SAME_BITS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "packed, distributed optimizer, clipped": (2, {**DISTRIBUTED, **CLIPPED}, PACKED),
    "packed, offload, distributed optimizer": (2, DISTRIBUTED, {**PACKED, **OFFLOAD}),
}


@pytest.mark.parametrize("name", rows(SAME_BITS, test=["packed, distributed optimizer, clipped"]))
def test_how_state_is_stored_changes_no_bit(gloo: Any, name: str) -> None:
    ranks, flags, stored = SAME_BITS[name]
    flags = {**MUON, "bf16": True, **flags}
    plain = gloo.run(ranks, trained, flags=flags)
    found = gloo.run(ranks, trained, flags={**flags, **stored})
    assert found[0][0] == plain[0][0]
    steps.require_same_bits(plain, found)
    if "qk_clip" in flags:  # the threshold is below some logits
        assert gloo.run(ranks, trained, flags={**flags, "qk_clip": False}, steps=2)[0][0] != plain[0][0][:2]


RESUMED = {
    "bf16": (1, {"bf16": True, "muon_fp32_matmul_prec": "medium"}),
    "fp16": (2, {"fp16": True, "initial_loss_scale": 256.0}),
    "ZeRO 2": (2, ZERO_2),
    "ZeRO 3, bf16, average": (2, {"bf16": True, **ZERO_3, "ema_decay": 0.75}),
    "distributed optimizer, codes": (2, {"bf16": True, **DISTRIBUTED, **CODES}),
    "ZeRO 3, offload": (2, {"bf16": True, **ZERO_3, **OFFLOAD}),
}


@pytest.mark.parametrize("name", rows(RESUMED, test=["bf16", "distributed optimizer, codes", "ZeRO 3, bf16, average"]))
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(gloo: Any, tmp_path: Path, name: str) -> None:
    ranks, flags = RESUMED[name]
    steps.require_resumed_to_the_bit(gloo, tmp_path / "run", ranks, {**MUON, **flags})


SAVED = ["DP2, distributed optimizer", "DP2, ZeRO 2", "TP2", "PP2", "DP4 x EP2, ZeRO 3", "TP2 x DP2, ZeRO 3"]


@pytest.mark.parametrize("layout", rows(SAVED, test=["TP2"]))
def test_a_checkpoint_is_the_same_to_the_bit_on_every_layout(gloo: Any, once: Any, folder: Path, layout: str) -> None:
    steps.require_loaded_to_the_bit(gloo, once, folder, {"bf16": True, **MUON, **BF16_MOMENTS}, ALL[layout])


def refusal(flags: dict[str, Any], folder: str) -> str:
    with pytest.raises(ConfigError) as error:
        resumed(flags, folder)
    return str(error.value)


def test_muons_state_is_not_converted_to_megatrons(gloo: Any, tmp_path: Path, capsys: Any) -> None:
    from megatron_moe_tools.convert.cli import main

    (tmp_path / "run").mkdir()
    ungrouped = {"moe_router_num_groups": None, "moe_router_group_topk": None}
    gloo.run(1, stopped, flags={**MUON, **ungrouped}, folder=str(tmp_path / "run"))
    words = ["--from", "native", "--to", "megatron", "--load", str(tmp_path / "run"), "--save", str(tmp_path / "there")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "--optimizer muon" in said and "--no-optim" in said
    assert not (tmp_path / "there").exists()
    assert main([*words, "--no-optim"]) == 0


@pytest.mark.parametrize(("before", "after"), [("muon", "adam"), ("adam", "muon")])
def test_the_state_of_another_optimizer_is_refused(gloo: Any, tmp_path: Path, before: str, after: str) -> None:
    folder, flags = str(tmp_path), {"optimizer": after, "micro_batch_size": 8}
    gloo.run(1, stopped, flags={**flags, "optimizer": before}, folder=folder)
    message = gloo.run(1, refusal, flags=flags, folder=folder)[0]
    assert f"--optimizer {after}" in message and f"--optimizer {before}" in message and "--no-load-optim" in message
    gloo.run(1, resumed, flags={**flags, "no_load_optim": True}, folder=folder)


def counted(flags: dict[str, Any]) -> tuple[int, int]:
    """The FLOPs of a step's iterations on this rank, and the bytes that it sends for them."""
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_moe.optim import matrix_exchange
    from megatron_moe.optim.optimizer import additions

    trainer, sent = steps.Trainer({**STORED, **flags}), [0]
    trainer.step()
    exchange = matrix_exchange.all_to_all_rows

    def counting(rows: torch.Tensor, counts: list[int], received: list[int], group: Any) -> torch.Tensor:
        sent[0] += rows.element_size() * (sum(counts) - counts[group.rank()])
        return exchange(rows, counts, received, group)

    with mock.patch.object(matrix_exchange, "all_to_all_rows", counting), FlopCounterMode(display=False) as flops:
        additions(trainer.optimizer).orthogonalizer.apply()
    return flops.get_total_flops(), sent[0]


PLANNED = {
    "one rank": (1, {}),
    "DP4": (4, OF_DP4),
    **{name: ALL[name] for name in ("DP4, distributed optimizer", "DP4 x EP2, ZeRO 3", "TP2", "TP2, ETP1")},
    "TP2 x DP2, distributed optimizer": ALL["TP2 x DP2, distributed optimizer"],
}


@pytest.mark.parametrize("layout", rows(PLANNED, test=["TP2 x DP2, distributed optimizer"]))
def test_a_plan_has_what_muon_computes_and_sends(gloo: Any, layout: str) -> None:
    from megatron_moe.config.schema import build
    from megatron_moe_tools.plan.plan import muon_flops, rank_traffic
    from megatron_moe_tools.plan.tracing import trace_ranks

    ranks, changes = PLANNED[layout]
    flags = {**STORED, **MUON, **changes}
    run = build({**steps.TINY, **flags})
    vocabulary = run.derived.padded_vocab_size(steps.TINY["vocab_size"])
    (trace,) = trace_ranks(run, ranks, vocabulary, device="cpu", imbalance=1.0)
    found = gloo.run(ranks, counted, flags=flags)
    assert muon_flops(run, trace) * ranks == pytest.approx(sum(flops for flops, _ in found), rel=1e-9)
    sent = sum(sent for _, sent in found) / ranks
    if ranks == 1:
        assert sent == 0 and "Muon" not in rank_traffic(run, trace, 1, 8)
        return
    # Planned is that each owner has an equal share of each rank's, and that every matrix is split over TP.
    assert sent <= rank_traffic(run, trace, ranks, 8)["Muon"].sent < 1.2 * sent
