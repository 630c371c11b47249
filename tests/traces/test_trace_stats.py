"""What stats says, against hand-made cases, a slow second implementation, and the published traces."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_strategies import generator_specs

import traces

FILES = {
    "azure2023_conv": "azure2023/AzureLLMInferenceTrace_conv.csv.xz",
    "azure2023_code": "azure2023/AzureLLMInferenceTrace_code.csv.xz",
    "mooncake_conversation": "mooncake/conversation_trace.jsonl.xz",
    "mooncake_synthetic": "mooncake/synthetic_trace.jsonl.xz",
    "sharegpt-llama-3.1-8b-300-sps10": "sharegpt/sharegpt-llama-3.1-8b-300-sps10.blk16.jsonl.xz",
    "workload_me2_01_mixed": "llmservingsim/workload_me2_01_mixed.jsonl.xz",
    "ragpulse": "ragpulse/0_trace.jsonl.xz",
    "sharegpt-qwen3-32b-300-sps10": "sharegpt/sharegpt-qwen3-32b-300-sps10.blk16.jsonl.xz",
}
MILLIONS = (1_000_000, 2_000_000, 4_000_000, 8_000_000)


def slow_shares(trace: traces.Trace, capacity: int | None, full: bool) -> float | None:
    """Share of leading ids that hit a cache of `capacity` tokens, written as plainly as can be."""
    block = trace.span_block
    cache: list[tuple[int, int]] = []  # (id, tokens it takes up), oldest first
    hits = total = 0
    for row in range(len(trace)):
        own = trace.span_offsets[row] < trace.span_offsets[row + 1]
        spans = [(i, block or n) for i, n in trace.spans(row) if own and not (full and block and n < block)]
        total += len(spans)
        for span in spans:
            if span not in cache:
                break
            hits += 1
        output = trace.output_id(row)
        if output is not None:
            spans.append((output, int(trace.output_tokens[row])))
        for span in reversed(spans):
            if span in cache:
                cache.remove(span)
            cache.append(span)
        while capacity is not None and sum(n for _, n in cache) > capacity:
            cache.pop(0)
    return hits / total if total else None


def test_a_small_trace_by_hand() -> None:
    """Rate, burstiness, lengths, waste and reuse of four rows, worked out on paper."""
    seconds = np.array([0, 0, 4, 12]) * 10**9
    trace = traces.make_trace(
        seconds,
        [10, 6, 12, 4],
        [6, 10, 4, 4],
        spans=([0, 3, 5, 8, 9], [1, 2, 3, 1, 4, 1, 2, 5, 6], [4, 4, 2, 4, 2, 4, 4, 4, 4]),
        span_block=4,
    )
    numbers = traces.stats(trace, [8, 1000])
    assert numbers["n"] == 4
    assert numbers["duration_s"] == 12.0
    assert numbers["rate"] == pytest.approx(1 / 3)
    assert numbers["cv_interarrival"] == pytest.approx(np.sqrt((16 + 0 + 16) / 3) / 4)
    assert numbers["zero_gap_frac"] == pytest.approx(1 / 3)
    assert numbers["dispersion_10s"] == pytest.approx(1 / 2)  # windows hold 3 and 1
    assert numbers["peak_rate_10s"] == pytest.approx(0.3)
    assert numbers["input"] == {"mean": 8.0, "p10": 4, "p50": 8, "p90": 11, "p95": 11, "p99": 11, "max": 12, "min": 4}
    assert numbers["waste_fixed_block"]["16"] == pytest.approx(1 - 56 / 64)
    assert numbers["reserve_maxlen_waste"]["2048"] == pytest.approx(1 - 14 / 2048)
    assert numbers["prefix_reuse_share"] == {"all_ids": 3 / 9, "full_ids": 3 / 7}
    assert numbers["prefix"]["token_hit"] == pytest.approx(12 / 32)
    assert numbers["prefix"]["unique"] == 6
    # Room for two ids. After row 0 of three: 1 and 2 (the head is the youngest); after row 1: 1 and 4; row 2 hits 1.
    assert numbers["lru_hit_share"]["8"]["all_ids"] == pytest.approx(2 / 9)
    assert numbers["lru_hit_share"]["1000"] == numbers["prefix_reuse_share"]
    json.dumps(numbers, allow_nan=False)


@given(generator_specs(), st.integers(1, 400), st.booleans())
def test_reuse_agrees_with_a_plain_second_implementation(spec: dict[str, object], capacity: int, full: bool) -> None:
    """Vectorised reuse and the LRU cache equal lists that are searched, on traces with sessions and prefixes."""
    trace = traces.generate(spec)
    numbers = traces.stats(trace, [capacity])
    key = "full_ids" if full else "all_ids"
    assert numbers["prefix_reuse_share"][key] == slow_shares(trace, None, full)
    assert numbers["lru_hit_share"][str(capacity)][key] == slow_shares(trace, capacity, full)


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=12), st.integers(1, 12))
def test_reuse_of_blocks_agrees_too(paths: list[list[int]], blocks: int) -> None:
    """The same for traces of blocks with partial ends, which `full_ids` neither counts nor keeps."""
    names: dict[tuple[int, ...], int] = {}
    ids, tokens, offsets = [], [], [0]
    for path in paths:
        partial = bool(path) and path[-1] == 2
        for end in range(1, len(path) + 1):
            ids.append(names.setdefault((*path[:end], int(end == len(path) and partial)), len(names)))
            tokens.append(3 if end == len(path) and partial else 8)
        offsets.append(len(ids))
    prompt = [sum(tokens[a:b]) or 1 for a, b in pairwise(offsets)]
    rows = range(len(paths))
    trace = traces.make_trace(list(rows), prompt, [1 for _ in rows], spans=(offsets, ids, tokens), span_block=8)
    numbers = traces.stats(trace, [8 * blocks])
    for key, full in (("all_ids", False), ("full_ids", True)):
        assert numbers["prefix_reuse_share"][key] == slow_shares(trace, None, full)
        assert numbers["lru_hit_share"][str(8 * blocks)][key] == slow_shares(trace, 8 * blocks, full)


def test_nothing_to_divide_by_is_none() -> None:
    """One request, or a closed loop, has no rate; a trace without ids has no reuse; and all is JSON."""
    numbers = traces.stats(traces.make_trace([0], [5], [5]), [10])
    for key in ("rate", "cv_interarrival", "zero_gap_frac", "prefix"):
        assert numbers[key] is None
    assert numbers["prefix_reuse_share"] == {"all_ids": None, "full_ids": None}
    assert numbers["lru_hit_share"]["10"] == {"all_ids": None, "full_ids": None}
    json.dumps(numbers, allow_nan=False)
    with pytest.raises(traces.TraceError, match="room for 1 or more"):
        traces.stats(traces.make_trace([0], [5], [5]), [0])


def differences(published: dict[str, Any], ours: dict[str, Any], where: str = "") -> list[str]:
    """Numbers that are not the published ones at the published number of digits."""
    out = []
    for key, value in published.items():
        if isinstance(value, dict):
            out += differences(value, ours[key], f"{where}{key}.")
        elif key not in ("name", "monotone", "zero_in", "zero_out"):
            digits = len(str(value).partition(".")[2])
            if round(ours[key], digits) != value:
                out.append(f"{where}{key}: {ours[key]} is not {value}")
    return out


@pytest.mark.parametrize("name", FILES)
def test_published_statistics_are_met(shared_data: Path, name: str) -> None:
    """Every number of the data's own statistics comes out, to the last digit given."""
    folder = shared_data / "traces"
    published = next(entry for entry in json.loads((folder / "stats.json").read_text()) if entry["name"] == name)
    sizes = [int(size) for size in published.get("lru", {})]
    ours = traces.stats(traces.load(folder / FILES[name]), sizes)
    sharegpt = name.startswith("sharegpt")
    which = "full_ids" if sharegpt else "all_ids"  # of ShareGPT, only whole blocks were counted as ids
    ours["lru"] = {size: share[which] for size, share in ours["lru_hit_share"].items()}
    if sharegpt:
        ours["prefix"] = ours["prefix_full_ids"]
    assert differences(published, ours) == []


def test_reuse_of_the_mooncake_conversation_trace(shared_data: Path) -> None:
    """36.6 % of all ids are reused and 38.2 % of full ones; with 1, 2, 4, 8 million tokens of LRU cache, less."""
    numbers = traces.stats(traces.load(shared_data / "traces" / FILES["mooncake_conversation"]), MILLIONS)

    def percent(shares: dict[str, float]) -> tuple[float, float]:
        return round(100 * shares["all_ids"], 1), round(100 * shares["full_ids"], 1)

    assert percent(numbers["prefix_reuse_share"]) == (36.6, 38.2)
    lru = [percent(numbers["lru_hit_share"][str(size)]) for size in MILLIONS]
    assert lru == [(5.3, 5.7), (8.5, 9.1), (17.5, 18.9), (26.1, 27.7)]


@pytest.mark.parametrize("kind", ["open", "shared", "closed", "single"])
def test_every_kind_of_trace_can_be_drawn(tmp_path: Path, kind: str) -> None:
    """plot_stats writes a PNG for open and closed loops, with and without ids, down to a single request."""
    spec: dict[str, Any] = {
        "kind": "synthetic",
        "num_requests": 1 if kind == "single" else 50,
        "arrival": {"process": "poisson", "rate_per_s": 3},
        "prompt_tokens": {"dist": "lognormal", "mean": 50, "sigma": 1},
        "output_tokens": 3,
    }
    if kind == "shared":
        spec["prefix"] = {"num_prefixes": 2, "tokens": 5}
    if kind == "closed":
        spec["arrival"] = {"process": "closed-loop", "concurrency": 3}
    traces.plot_stats(traces.generate(spec), tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """A missing folder is an error with the path, not a traceback of the drawing library."""
    with pytest.raises(traces.TraceError, match="cannot be written"):
        traces.plot_stats(traces.make_trace([0, 9], [1, 1], [1, 1]), tmp_path / "no" / "t.png")
