"""The experiment on waste: closed forms, the data's own statistics, and averages over saturated pools."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.core.records import STEP_COLUMNS
from experiments.allocation import shares
from experiments.experiment import shared_folder
from experiments.lengths import ID_TOKENS, TRACES, final_tokens
from experiments.metrics import USAGE, Tables
from experiments.waste import STATS, final_waste
from traces import load


def test_waste_at_final_lengths() -> None:
    """17 and 32 tokens: two blocks of 16 each leave 15 slots of 64 empty; regions and powers of two likewise."""
    waste = final_waste(np.array([17, 32]))
    assert waste["paged 16"] == pytest.approx(15 / 64)
    assert waste["paged 8"] == pytest.approx(7 / 56)
    assert waste["pow2"] == pytest.approx(15 / 64)
    assert waste["max 2048"] == pytest.approx(1 - 49 / 4096)


@pytest.mark.parametrize("name", TRACES)
def test_waste_equals_the_data_s_own_statistics(name: str) -> None:
    """Every figure that the data publishes of a trace is ours, to its digits."""
    data = shared_folder(None) / "data"
    if not (data / STATS).is_file() or not (data / TRACES[name]).is_file():
        pytest.skip(f"no {TRACES[name]} in the shared data (name the folder in KVTWIN_SHARED)")
    published = {entry["name"]: entry for entry in json.loads(Path(data / STATS).read_text(encoding="utf-8"))}[name]
    options = {"id_tokens": ID_TOKENS[name]} if name in ID_TOKENS else {}
    waste = final_waste(final_tokens(load(data / TRACES[name], **options)))
    compared = 0
    for key, ours in (("waste_fixed_block", "paged"), ("reserve_maxlen_waste", "max")):
        for size, theirs in published[key].items():
            if f"{ours} {size}" in waste:
                digits = len(str(theirs).partition(".")[2])
                assert round(waste[f"{ours} {size}"], digits) == theirs, f"{key} {size}"
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
