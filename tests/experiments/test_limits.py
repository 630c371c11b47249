"""What limits a run: the signals expanded step by step, their shares of the time, and the line that names the limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.presets import SchedulerConfig
from engine.core.signals import SIGNAL_COLUMNS
from experiments import results
from experiments.cli import main
from experiments.limits import REASONS, limit_line
from experiments.metrics import Tables, expand_steps, summarize
from sim.moves import CopyTime, MoveTime
from sim.simulate import simulate
from sim.steptime import StepTime
from traces import Trace, make_trace

STEP = StepTime(step=1e6, token=1e4, context=50.0, cpu_step=2e5, cpu_row=3e3, cpu_new=1e4)
MOVES = MoveTime(1024, CopyTime(2e5, 0.0, 1.0), CopyTime(1e5, 0.0, 1.0), CopyTime())


def crowd(count: int = 60, prompt: int = 60, output: int = 120, gap_ns: int = 2_000_000) -> Trace:
    at = np.arange(count, dtype=np.int64) * gap_ns
    rng = np.random.default_rng(3)
    return make_trace(at, rng.integers(1, 2 * prompt, count), rng.integers(1, 2 * output, count))


def served(fast: bool = True, trace: Trace | None = None, **options: Any) -> Tables:
    given: dict[str, Any] = {"num_blocks": 120, "max_model_len": 600, "max_num_seqs": 64, "max_num_batched_tokens": 256}
    config = SchedulerConfig(**(given | options))
    found = simulate(trace or crowd(), config, STEP, fast_forward=fast, moves=MOVES)
    return Tables(found.requests(), found.steps(), found.gaps(), config.steps_in_flight, config.block_size)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_in_flight": 2},
        {"preemption_mode": "swap", "num_host_blocks": 400},
        {"num_blocks": 4000, "max_num_seqs": 8},
        {"allocator": "contiguous-oracle"},
    ],
)
def test_signals_of_runs_expand_to_those_of_steps(options: dict[str, Any]) -> None:
    """Busy time, reasons, lost and repeated tokens of each step are the same with and without fast-forward."""
    slow, fast = served(False, **options), served(True, **options)
    assert len(fast.steps["step"]) < len(slow.steps["step"])
    expected, found = expand_steps(slow), expand_steps(fast)
    for name in (*SIGNAL_COLUMNS, "gpu_busy_ns"):
        assert np.array_equal(found[name], expected[name]), name
    kept = [summarize(tables, 120) for tables in (slow, fast)]
    assert kept[0]["waiting_by_reason"] == pytest.approx(kept[1]["waiting_by_reason"])
    assert kept[0]["gpu_busy"] == kept[1]["gpu_busy"]


def test_the_device_is_busy_without_the_host_and_without_moves() -> None:
    """What is left of a step is its device part, by the formula of the step time."""
    table = expand_steps(served(preemption_mode="swap", num_host_blocks=400))
    assert table["swap_out_blocks"].any()
    assert table["swap_in_blocks"].any()
    device = replace(STEP, cpu_step=0.0, cpu_row=0.0, cpu_new=0.0)
    decodes = table["num_prefills"] == 0
    tokens, context = table["num_decodes"][decodes], table["decode_context_tokens"][decodes]
    expected = [device.tokens_ns(int(n)) + device.context * k for n, k in zip(tokens, context, strict=True)]
    assert np.abs(table["gpu_busy_ns"][decodes] - np.array(expected)).max() <= 2


def test_the_line_names_the_limit() -> None:
    """Each limit that a load runs into is the one that is named, and no limit where nobody waits."""
    said = {
        "KV memory": served(),
        "sequences": served(max_num_seqs=4, num_blocks=4000),
        "step tokens": served(trace=crowd(prompt=250, output=2, gap_ns=0), num_blocks=8000),
        "none": served(trace=crowd(count=5, gap_ns=10**9), num_blocks=4000),
        "policy": served(batching="static", num_blocks=4000),
    }
    for name, tables in said.items():
        line = limit_line(summarize(tables, 120))
        assert line.startswith(f"Limit: {name}"), line
        assert line.count("\n") == 0


def test_shares_are_of_the_time_between_steps() -> None:
    """Shares of the time and mean counts are those of a sum over all steps, taken one by one."""
    tables = served()
    summary = summarize(tables, 120)
    table = expand_steps(tables)
    begins = [int(ns) for ns in table["start_ns"]] + [int(table["end_ns"][-1])]
    for reason in REASONS:
        counts = [int(count) for count in table[f"waiting_for_{reason}"]]
        spans = [begins[i + 1] - begins[i] for i in range(len(counts))]
        share = sum(span for span, count in zip(spans, counts, strict=True) if count) / 1e9 / summary["duration_s"]
        mean = sum(span * count for span, count in zip(spans, counts, strict=True)) / 1e9 / summary["duration_s"]
        assert summary["waiting_share"][reason] == pytest.approx(share)
        assert summary["waiting_by_reason"][reason] == pytest.approx(mean)


WORKLOAD = """
kind: synthetic
num_requests: 24
seed: 5
arrival: {process: poisson, rate_per_s: 1000}
prompt_tokens: {dist: uniform, low: 8, high: 60}
output_tokens: {dist: uniform, low: 4, high: 40}
"""


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_both_commands_say_what_limits_the_run(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line of the output names the limit; signals are in both tables; clients are as many as were asked for."""
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    words = [command, "--trace", str(tmp_path / "w.yaml"), "--model", "tiny", "--num-gpu-blocks-override", "60"]
    words += ["--max-model-len", "256", "--max-concurrency", "3", "--max-num-seqs", "2", "--out", str(tmp_path / "out")]
    assert main([*words, *(["--hardware", "a100-80g"] if command == "simulate" else [])]) == 0
    assert "Limit: sequences: " in " ".join(capsys.readouterr().out.split())
    found = results.read_results(tmp_path / "out")
    steps = found.tables.steps
    assert {*SIGNAL_COLUMNS, "gpu_busy_ns"} <= set(steps)
    assert (steps["num_running"] + steps["num_waiting"]).max() == 3
    assert steps["waiting_for_sequences"].sum() == steps["num_waiting"].sum() > 0
    assert 0 < found.summary["gpu_busy"] <= 1
    assert (steps["gpu_busy_ns"] <= steps["end_ns"] - steps["start_ns"]).all()
