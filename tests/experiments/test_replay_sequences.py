"""Decisions of real runs with swaps, host tier, forks and beams, decided again; both executors record what moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.cli import main
from experiments.replay import replay_differences
from experiments.results import read_results, read_table

TRACE = """
kind: synthetic
num_requests: 60
seed: 5
arrival: {process: poisson, rate_per_s: 2000}
prompt_tokens: {dist: uniform, low: 8, high: 60}
output_tokens: {dist: uniform, low: 4, high: 60}
prefix: {num_prefixes: 3, tokens: 40, share: 0.8}
"""
MEMORY = ["--max-num-seqs", "24", "--max-num-batched-tokens", "192"]
SWAP = ["--preemption-mode", "swap", "--swap-space", "0.01"]
CASES = {
    "forks": (["--n", "3"], 60, ("preempted", "copied_blocks")),
    "requests": (["--n", "3", "--parallel-sampling", "requests"], 60, ("preempted",)),
    "beams": (["--beam-width", "3"], 46, ("copied_blocks",)),
    "swaps": (SWAP, 60, ("swap_out_blocks", "swap_in_blocks")),
    "swapped forks": ([*SWAP, "--n", "2"], 60, ("swap_out_blocks", "swap_in_blocks", "copied_blocks")),
    "host tier": (["--kv-offloading-size", "0.002"], 60, ("num_transfers",)),
}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_core_repeats_every_decision(case: str, steps: int, tmp_path: Path) -> None:
    """Rows, blocks, block moves, forks and ends of a real run are decided again without a difference."""
    more, blocks, moved = CASES[case]
    (tmp_path / "trace.yaml").write_text(TRACE)
    options = ["--trace", str(tmp_path / "trace.yaml"), "--model", "tiny", *MEMORY, *more]
    options += ["--num-gpu-blocks-override", str(blocks)]
    if steps == 2:
        options.append("--async-scheduling")
    assert main(["run", "--device", "cpu", *options, "--out", str(tmp_path / "real")]) == 0
    assert main(["simulate", *options, "--hardware", "a100-80g", "--out", str(tmp_path / "sim")]) == 0
    real, simulated = read_results(tmp_path / "real"), read_results(tmp_path / "sim")
    counts = read_table(tmp_path / "real" / "steps.parquet")
    for name in moved:
        assert counts[name].sum() > 0, name
    per_row = 3 if case in ("forks", "requests", "beams") else 2 if case == "swapped forks" else 1
    for results in (real, simulated):
        assert results.summary["num_requests"] == 60 * per_row
        assert results.summary["num_rejected"] == 0
    assert replay_differences(tmp_path / "real", tmp_path / "sim") == []


def test_another_way_to_preempt_is_seen(tmp_path: Path) -> None:
    """A run that recomputed, decided again under swap, differs from the first preemption on."""
    (tmp_path / "trace.yaml").write_text(TRACE)
    options = ["--trace", str(tmp_path / "trace.yaml"), "--model", "tiny", *MEMORY, "--num-gpu-blocks-override", "60"]
    assert main(["run", "--device", "cpu", *options, *SWAP, "--out", str(tmp_path / "real")]) == 0
    assert main(["simulate", *options, "--hardware", "a100-80g", "--out", str(tmp_path / "sim")]) == 0
    found = replay_differences(tmp_path / "real", tmp_path / "sim")
    assert found
    assert found[0].field in ("moves", "taken", "starts")
