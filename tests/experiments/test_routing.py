"""The experiment on routing: what its runs add up to, on fewer requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments import routing
from experiments.config import Config
from experiments.experiment import Context
from experiments.routing import KINDS, SIZES, _a51, _serve
from experiments.terminal import Terminal


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Without shared data, and with few requests."""
    monkeypatch.setattr(routing, "REQUESTS", 40)
    return Context("routing", Config(), Terminal(quiet_stdout=True), tmp_path, tmp_path)


def test_routers_that_know_prefixes_find_more_of_a_conversation(context: Context) -> None:
    """Every router serves every request with the same tokens; those that follow prefixes or sessions hit more."""
    rows = {router: _serve(context, "chats", router, 4) for router in ("round-robin", "session", "prefix")}
    assert all(row["served"] == row["requests"] == 160 for row in rows.values())
    assert len({row["output_tokens"] for row in rows.values()}) == 1
    assert rows["prefix"]["hit_share"] > rows["round-robin"]["hit_share"] + 0.1
    assert rows["session"]["hit_share"] > rows["round-robin"]["hit_share"] + 0.1
    assert rows["prefix"]["ttft_mean_s"] < rows["round-robin"]["ttft_mean_s"]


def test_where_nothing_is_shared_nothing_is_found(context: Context) -> None:
    """Nor does a router that looks for prefixes load replicas less evenly then."""
    blind, aware = (_serve(context, "nothing shared", router, 4) for router in ("least-loaded", "prefix"))
    assert max(blind["hit_share"], aware["hit_share"]) < 0.02
    assert aware["uneven"] == pytest.approx(blind["uneven"], abs=0.05)


def test_a_hot_prompt_unbalances_a_router_that_follows_prefixes_blindly(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with thresholds of load does it less."""
    monkeypatch.setattr(routing, "REQUESTS", 250)
    blind, tight = (_serve(context, "one hot prompt", f"prefix, {kind}", 4) for kind in ("unbalanced", "tight"))
    assert blind["uneven"] > tight["uneven"] + 0.2


def test_the_row_follows_from_the_figures() -> None:
    """A router that loses a request, or costs no hits, gives another verdict."""

    def row(load: str, router: str, hits: float, replicas: int = 4) -> dict[str, Any]:
        figures = {"served": 9, "requests": 9, "uneven": 1.0, "ttft_mean_s": 0.1, "ttft_p99_s": 0.2, "output_tokens": 5}
        return {"load": load, "router": router, "hit_share": hits, "replicas": replicas, **figures}

    def settled(blind: float, **more: Any) -> str:
        loads = ("chats", "system prompts", "one hot prompt", "nothing shared")
        rows = [row(load, name, 0.9 if "prefix" in name else blind) for load in loads for name in KINDS]
        rows[0] |= more
        sizes = [row("chats", name, 0.5, SIZES[-1]) for name in ("least-loaded", "prefix")]
        return _a51(rows, sizes).status

    assert settled(0.5) == "reproduced-only-if"
    assert settled(0.89) == "reproduced"
    assert settled(0.5, served=8) == "does-not-follow"
    assert settled(0.5, output_tokens=4) == "does-not-follow"
