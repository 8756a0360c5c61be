"""Live bytes are counted storage by storage, whichever way these come and go."""

from __future__ import annotations

import pytest
import torch

from megatron_moe.apps.plan.meta_tracer import LiveBytes, storage_bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_made_counts_until_it_is_freed(device):
    with LiveBytes() as live:
        one = torch.empty(100, dtype=torch.float32, device=device)
        two = one + 1
        view = two[:10]
        assert (live.live, live.peak) == (800, 800)
        del two
        assert live.live == 800  # the view holds it
        del view
        assert (live.live, live.peak) == (400, 800)
        live.restart_peak()
        assert live.peak == 400


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_that_is_freed_and_refilled_without_an_operation_counts_so(device):
    resize = torch.UntypedStorage.resize_
    with LiveBytes() as live:
        one = torch.empty(100, device=device)
        one.untyped_storage().resize_(0)
        assert live.live == 0
        one.untyped_storage().resize_(400)
        assert (live.live, live.peak) == (400, 400)
    assert torch.UntypedStorage.resize_ is resize


def test_the_backward_pass_is_counted():
    with LiveBytes() as live:
        weight = torch.ones(64, 64, requires_grad=True)
        before = live.live
        kept = (weight * weight).exp()
        assert live.live - before == 2 * 64 * 64 * 4 - 64 * 64 * 4  # the product is freed, its exponential kept
        kept.sum().backward()
        del kept
        assert live.live - before == 64 * 64 * 4  # the gradient


def test_labels_have_peaks_of_their_own():
    with LiveBytes() as live:
        with live.labelled("rows"):
            one = torch.empty(100, dtype=torch.uint8)
        rest = torch.empty(900, dtype=torch.uint8)
        del one
        with live.labelled("rows"):
            torch.empty(50, dtype=torch.uint8)
        assert (live.label_peaks["rows"], live.peak) == (100, 1000)
    assert storage_bytes([rest, rest[:3]]) == 900
