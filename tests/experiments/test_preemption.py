"""The experiment on preemption: costs, and what its served runs add up to."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.metrics import Tables
from experiments.preemption import LINKS, SIZES, _costs, _figures, _options
from sim.moves import CopyTime, MoveTime


def test_copies_of_their_own_make_small_blocks_dear_and_a_recompute_does_not_mind() -> None:
    """A swap block by block costs less the larger the block; gathered, only bytes count; recompute never changes."""
    costs = _costs()
    assert len(costs) == len(LINKS) * 2 * len(SIZES)
    assert len({cost["recompute_ms"] for cost in costs}) == 1
    for link in LINKS:
        layers = [c["swap_ms"] for c in costs if c["link"] == link and c["copies"] != "gathered"]
        gathered = [c["swap_ms"] for c in costs if c["link"] == link and c["copies"] == "gathered"]
        assert layers == sorted(layers, reverse=True)
        assert layers[0] > 10 * layers[-1]
        assert max(gathered) == pytest.approx(min(gathered), rel=0.01)


def test_only_modes_that_swap_have_a_host() -> None:
    """4 GiB of blocks for swap and auto, none for the others."""
    assert _options(16, "swap").num_host_blocks == (4 << 30) // (16 * 819_200)
    assert _options(16, "auto").num_host_blocks > 0
    assert _options(16, "recompute").num_host_blocks == _options(16, "reject").num_host_blocks == 0


def test_figures_of_a_run() -> None:
    """Rates count completed requests; a request that was given up is counted apart; time in copies is a share."""
    moves = MoveTime(1000, CopyTime(byte=1e6), CopyTime(byte=2e6), CopyTime())
    requests = {
        "outcome": ["length", "no-memory", "stop"],
        "output_tokens": np.array([11, 5, 6]),
        "finish_ns": np.array([1_000_000_000, 1, 2_000_000_000]),
        "first_token_ns": np.array([0, 0, 1_000_000_000]),
    }
    steps = {
        "swap_out_blocks": np.array([1, 0]),
        "swap_in_blocks": np.array([0, 1]),
        "preempted": np.array([1, 1]),
    }
    figures = _figures(Tables(requests, steps, np.array([]), 1, block_size=16), 10_000_000_000, moves)
    assert figures["tokens_per_s"] == 1.7
    assert figures["tokens_per_s_per_request"] == 7.5
    assert (figures["completed"], figures["given_up"], figures["preemptions"]) == (2, 1, 2)
    assert figures["moving_share"] == pytest.approx(0.3)
