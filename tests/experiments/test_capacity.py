"""Experiments `chunked` and `capacity`: verdicts follow from figures, and small parts agree with closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments import capacity, chunked
from experiments.config import Config
from experiments.experiment import Context
from experiments.terminal import Terminal


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("capacity", Config(), Terminal(quiet_stdout=True), tmp_path, tmp_path)


def busy(alone: float, hosts: tuple[float, ...], waits: float = 0.9) -> dict[str, dict[str, Any]]:
    shares = [("device alone", alone), ("swap, a layer at a time", 0.9)]
    shares += [(f"host x {factor:g}", value) for factor, value in zip(capacity.HOST_FACTORS, hosts, strict=True)]
    return {name: {"gpu_busy": value, "waits_for_kv": waits} for name, value in shares}


def test_row_b09_follows_from_the_shares() -> None:
    """A device that is little busy by itself reproduces it, one that only waits for a slow host does on that condition,
    and no queue leaves it open."""
    usual = (0.7, 0.5, 0.42, 0.35, 0.2)
    assert capacity._b09(busy(0.3, usual)).status == "reproduced"
    found = capacity._b09(busy(1.0, usual))
    assert found.status == "reproduced-only-if"
    assert "at least 2 times" in found.condition
    assert capacity._b09(busy(1.0, (0.9,) * 5)).status == "does-not-follow"
    assert capacity._b09(busy(1.0, usual, waits=0.2)).status == "open"


def test_row_a49_follows_from_the_gaps() -> None:
    """Chunks that do not shorten the longest gap contradict it."""

    def figures(longest: float) -> dict[str, float]:
        return {"itl_p50_ms": 16.0, "itl_p99_ms": 20.0, "itl_max_ms": longest, "tpot_ms": 18.0, "ttft_mean_s": 2.0}

    whole = {"whole prompts": figures(4000.0)}
    assert chunked._a49(whole | {"2048": figures(160.0), "512": figures(45.0)}).status == "reproduced"
    assert chunked._a49(whole | {"2048": figures(3000.0), "512": figures(45.0)}).status == "does-not-follow"


def test_a_gap_beside_a_prefill_is_the_time_of_a_chunk(context: Context) -> None:
    """The rate of the one that decodes is one token a chunk: half the chunk, nearly twice the rate."""
    rates = {chunk: chunked._pair(context, chunk)["during_tokens_per_s"] for chunk in (2048, 4096, 8192)}
    assert 1.7 < rates[2048] / rates[4096] < 2.1
    assert 1.7 < rates[4096] / rates[8192] < 2.1


def test_two_figures_of_the_reported_table_are_met(context: Context) -> None:
    """The coefficients make the two fitted figures come out; the others are within 6 %, but for the p99 of ITL."""
    found = chunked._table(context)
    for name, value in chunked.REPORTED_TABLE.items():
        if name == "itl_p99_ms":
            continue
        fitted = name in ("itl_p50_ms", "ttft_mean_ms")
        assert found[name] == pytest.approx(value, rel=1e-3 if fitted else 0.06), name
    assert found["share_of_long_gaps"] == pytest.approx(0.01, abs=0.002)


def test_ttft_of_one_prompt_is_flat_and_then_linear(context: Context) -> None:
    """Below the knee TTFT is the floor; the last two prompts lie on one line through the origin, within 10 %."""
    floor = chunked._floor(context)
    found = dict(zip(chunked.PROMPTS, floor["ttft_ms"], strict=True))
    assert found[64] == pytest.approx(found[16], rel=0.05)
    assert found[4096] / found[2048] == pytest.approx(2.0, rel=0.1)
    assert 64 < floor["knee_tokens"] < 256
