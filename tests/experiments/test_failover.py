"""The experiment on failover: what its runs add up to, on a shorter day."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments import failover
from experiments.config import Config
from experiments.experiment import Context
from experiments.failover import BASE, HIGH, IMPATIENT, LOADS, REPLICAS, RESTART, _a08, _a47, _starts
from experiments.terminal import Terminal


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Without shared data; a replica dies after 20 s, and requests come for 40 s."""
    for name, value in (("CRASH_S", 20), ("LENGTH_S", 40), ("AFTER_S", 30)):
        monkeypatch.setattr(failover, name, value)
    return Context("failover", Config(), Terminal(quiet_stdout=True), tmp_path, tmp_path)


def test_a_crash_costs_those_that_ran_and_a_retry_saves_them(context: Context) -> None:
    """Without retries exactly those that were cut off are lost; with them nobody is."""
    lost = failover._crash(context, 0.5, 5, "no retries, 600 s", 1, 3.8)
    assert lost["replicas"] == REPLICAS + 1
    assert lost["killed"] == lost["lost"] > 0
    saved = failover._crash(context, 0.5, 5, BASE, 1, 3.8)
    assert saved["killed"] == saved["retries"] == lost["killed"]
    assert saved["lost"] == 0
    assert saved["wasted_tokens"] > 0


def test_a_dead_replica_that_nobody_notices_draws_the_least_loaded_router(context: Context) -> None:
    """Which sends it more than its turn; one that is noticed at once gets nothing."""
    even, least = (failover._health(context, 10, router, 3.8) for router in ("round-robin", "least-loaded"))
    assert failover._health(context, 0, "least-loaded", 3.8)["refused"] == 0
    assert least["refused"] > 1.5 * even["refused"] > 0
    assert even["unnoticed_s"] == 7


def test_one_replica_alone_runs_nothing_until_it_is_back(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step comes when the restart is over."""
    monkeypatch.setattr(failover, "RESTART", 15)
    single = failover._single(context, 3.8)
    assert single["steps_while_down"] == 0
    assert single["first_step_after_s"] == pytest.approx(15, abs=0.01)
    assert min(single["running"][60:67]) == 0 < single["running_before"]
    assert _a08(single).status == "reproduced"
    assert _a08({**single, "steps_while_down": 3}).status == "does-not-follow"


def test_starts_are_loading_and_a_minute() -> None:
    """141 GB at 1 GB/s, and 60 s."""
    row = next(row for row in _starts() if row["model"] == "llama-3.1-70b")
    assert row["at_1"] == pytest.approx(60 + 141.1, abs=0.1)


def test_a_spare_settles_the_row_only_where_it_helps() -> None:
    """Other figures give another verdict."""

    def row(load: float, clients: str, spare: int, good: float) -> dict[str, Any]:
        figures = {"good_after": good, "degraded_s": 0.0, "killed": 3, "lost": 0}
        return {"load": load, "restart_s": RESTART, "clients": clients, "spare": spare, **figures}

    def settled(high: float) -> str:
        runs = [row(load, BASE, spare, 1.0) for load in LOADS[:-1] for spare in (0, 1)]
        runs += [row(HIGH, BASE, 0, high), row(HIGH, BASE, 1, 1.0)]
        runs += [row(HIGH, clients, spare, 0.5) for clients in ("no retries, 600 s", IMPATIENT) for spare in (0, 1)]
        health = [{"interval_s": 30, "router": name, "unnoticed_s": 20, "refused": 5} for name in ("a", "b")]
        return _a47(runs, health, _starts()).status

    assert settled(0.6) == "reproduced-only-if"
    assert settled(0.99) == "does-not-follow"
