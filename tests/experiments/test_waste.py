"""The experiment on waste: closed forms, the data's own statistics, and averages over saturated pools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.core.records import STEP_COLUMNS
from experiments import allocation, reservation, waste
from experiments.allocation import shares
from experiments.config import Config
from experiments.experiment import Context, shared_folder
from experiments.lengths import ID_TOKENS, TRACES, final_tokens
from experiments.metrics import USAGE, Tables
from experiments.terminal import Terminal
from experiments.waste import STATS, final_waste
from traces import load


def test_waste_at_final_lengths() -> None:
    """17 and 32 tokens: two blocks of 16 each leave 15 slots of 64 empty; regions and powers of two likewise."""
    found = final_waste(np.array([17, 32]))
    assert found["paged 16"] == pytest.approx(15 / 64)
    assert found["paged 8"] == pytest.approx(7 / 56)
    assert found["pow2"] == pytest.approx(15 / 64)
    assert found["max 2048"] == pytest.approx(1 - 49 / 4096)


@pytest.mark.parametrize("name", TRACES)
def test_waste_equals_the_data_s_own_statistics(name: str) -> None:
    """Every figure that the data publishes of a trace is ours, to its digits."""
    data = shared_folder(None) / "data"
    if not (data / STATS).is_file() or not (data / TRACES[name]).is_file():
        pytest.skip(f"no {TRACES[name]} in the shared data (name the folder in KVTWIN_SHARED)")
    published = {entry["name"]: entry for entry in json.loads(Path(data / STATS).read_text(encoding="utf-8"))}[name]
    options = {"id_tokens": ID_TOKENS[name]} if name in ID_TOKENS else {}
    found = final_waste(final_tokens(load(data / TRACES[name], **options)))
    compared = 0
    for key, ours in (("waste_fixed_block", "paged"), ("reserve_maxlen_waste", "max")):
        for size, theirs in published[key].items():
            if f"{ours} {size}" in found:
                digits = len(str(theirs).partition(".")[2])
                assert round(found[f"{ours} {size}"], digits) == theirs, f"{key} {size}"
                compared += 1
    assert compared >= 6


def steps_of(finished: list[int], waiting: list[int], running: list[int], held: list[int]) -> Tables:
    num = len(finished)
    zero = np.zeros(num, dtype=np.int64)
    steps = dict.fromkeys((*STEP_COLUMNS, *USAGE), zero) | {
        "step": np.arange(1, num + 1),
        "num_steps": zero + 1,
        "start_ns": np.arange(num) * 10,
        "end_ns": np.arange(1, num + 1) * 10,
        "num_waiting": np.array(waiting),
        "num_running": np.array(running),
        "num_decodes": zero,
        "finished": np.array(finished),
        "held": np.array(held),
        "free": 100 - np.array(held),
    }
    empty = [zero[:0]] * num
    steps |= dict.fromkeys(("step_ends_ns", "run_takes", "step_finished", "step_cached"), empty)
    steps |= dict.fromkeys(("step_reserved_may", "step_reserved_cannot"), empty)
    return Tables({}, steps, zero[:0], 1, block_size=1)


def test_averages_begin_when_the_first_have_left_and_end_with_the_queue() -> None:
    """Those that were admitted together at the start do not count, nor the pool that empties at the end."""
    found = shares(
        steps_of([0, 2, 1, 0, 0, 1], waiting=[4, 3, 2, 1, 1, 0], running=[2, 2, 2, 2, 2, 1], held=[9, 9, 40, 60, 50, 7])
    )
    assert found["held"] == pytest.approx((9 + 40 + 60 + 50) / 4 / 100)
    assert found["saturated_steps"] == 4


def test_a_load_that_never_queues_is_refused() -> None:
    """There is no saturated time to average over, and it says so."""
    with pytest.raises(ValueError, match="too short"):
        shares(steps_of([0, 1], waiting=[0, 0], running=[1, 1], held=[5, 5]))


def context(tmp_path: Path) -> Context:
    """A context without data that shows nothing."""
    return Context("waste", Config(), Terminal(quiet_stdout=True), tmp_path, tmp_path / "none")


@pytest.mark.parametrize("allocator", list(allocation.ALLOCATORS))
def test_every_allocator_saturates_its_pool(allocator: str, tmp_path: Path) -> None:
    """Shares sum to 1 and the usage is checked at every step; contiguous ones reserve, paged ones do not."""
    toy = context(tmp_path)
    (load,) = allocation.loads(toy)
    small = replace(load, trace=lambda: allocation._paper_trace(1, 150))
    found = allocation.saturate(toy, small, allocator)
    assert sum(found[name] for name in USAGE) == pytest.approx(1)
    paged = allocator.startswith("paged")
    assert (found["reserved_may"] > 0) == (not paged)
    assert (found["reserved_cannot"] > 0) == (not paged)  # of the oracle's: what placement and blocks round up
    assert toy.manifest()["usage_check"]["runs"] == 1
    assert (found["held"] > 0.8) == paged


def test_the_paper_setting_without_any_data(tmp_path: Path) -> None:
    """Where no trace is there, the paper's setting remains, with requests of its mean lengths."""
    (load,) = allocation.loads(context(tmp_path))
    trace = load.trace()
    assert trace.prompt_tokens.mean() == pytest.approx(allocation.PAPER_MEANS[0], rel=0.1)
    assert trace.output_tokens.mean() == pytest.approx(allocation.PAPER_MEANS[1], rel=0.1)
    assert (trace.prompt_tokens + trace.output_tokens).max() <= 2048


def test_what_the_incident_implies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three figures need three lengths, and as many regions fit as memory has room for."""
    run = {"running": 24.0, "requests_per_s": 5.0, "waste": 0.8}
    monkeypatch.setattr(reservation, "_serve", lambda *rest: run)
    found = reservation.incident(context(tmp_path))
    assert found["tokens_by_first_waste"] == 1065
    assert found["tokens_by_second_waste"] == pytest.approx(227, abs=1)
    assert 300 < found["tokens_by_users"] < 340
    assert found["regions"] < 80
    assert found["saved"] == pytest.approx(0.7586, abs=1e-4)
    before, after = reservation.claims(found)
    assert (before.id, before.status) == ("B12", "reproduced-only-if")
    assert (after.id, after.status) == ("B13", "does-not-follow")  # these runs show no gain


def test_caches_of_transformers() -> None:
    """The default cache holds what the text has; the static one holds the longest context."""
    pytest.importorskip("transformers", reason="transformers is not installed (extra `dev`)")
    found = reservation.transformers_caches(5, 64)
    assert (found["dynamic"], found["static"]) == (5, 64)


def test_rows_of_the_block_table() -> None:
    """17 tokens take two blocks and leave 15 slots; token 17 opens a block and copies nothing."""
    assert waste._seventeen().numbers == {"blocks": 2, "empty": 15, "bytes": 15 * 131072}
    assert [waste._seventeen().status, waste._new_page().status] == ["reproduced", "reproduced"]
    assert waste._short().numbers["waste_16"] == pytest.approx(0.3125)
