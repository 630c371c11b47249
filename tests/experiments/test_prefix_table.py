"""--prefix-stats: why prompts were not hit, in both worlds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from experiments.cli import main
from experiments.results import read_table

TRACE = """
kind: synthetic
num_requests: 24
seed: 3
arrival: {process: poisson, rate_per_s: 40}
prompt_tokens: {dist: uniform, low: 8, high: 40}
output_tokens: {dist: uniform, low: 2, high: 12}
prefix: {num_prefixes: 3, tokens: {dist: fixed, value: 48}, share: 0.8}
tenants: 2
"""
OPTIONS = ("--model", "tiny", "--num-gpu-blocks-override", "24", "--max-num-seqs", "4", "--prefix-stats", "--json")


def test_simulate_and_run_keep_the_same_kind_of_account(tmp_path: Path) -> None:
    """Every prompt token is in one column of prefix.parquet, hits are those of requests.parquet, and tenants sum up."""
    trace = tmp_path / "trace.yaml"
    trace.write_text(TRACE, encoding="utf-8")
    for name, more in (("simulate", ("--hardware", "a100-80g")), ("run", ())):
        out = tmp_path / name
        assert main([name, "--trace", str(trace), "--out", str(out), *OPTIONS, *more]) == 0
        rows, requests = read_table(out / "prefix.parquet"), read_table(out / "requests.parquet")
        assert len(rows["request"]) == 24
        place = {request: i for i, request in enumerate(requests["request"].tolist())}
        at = [place[request] for request in rows["request"].tolist()]
        assert np.array_equal(rows["asked_tokens"], requests["prompt_tokens"][at])
        assert np.array_equal(rows["hit_tokens"] + rows["host_hit_tokens"], requests["cached_tokens"][at])
        missed = [n for n in rows if n.endswith("_tokens") and "hit" not in n and n != "asked_tokens"]
        parts = rows["hit_tokens"] + rows["host_hit_tokens"] + sum(rows[n] for n in missed)
        assert np.array_equal(parts, rows["asked_tokens"])
        tenants = json.loads((out / "summary.json").read_text())["prefix"]
        assert [entry["tenant"] for entry in tenants] == [0, 1]
        assert sum(entry["asked_tokens"] for entry in tenants) == rows["asked_tokens"].sum()
        assert rows["hit_tokens"].sum() > 0
        assert rows["other_salt_tokens"].sum() > 0
