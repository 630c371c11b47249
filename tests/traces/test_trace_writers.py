"""Writing traces in the formats of other tools, and what they have no place for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from trace_strategies import generator_specs

import traces


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
@pytest.mark.parametrize("name", ["azure-2023", "vidur", "mooncake"])
@settings(max_examples=15)
@given(spec=generator_specs())
def test_what_others_can_hold_reads_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, ending: str, spec: dict[str, object]
) -> None:
    """Arrivals (as fine as the format has them) and lengths come back, and writing that again gives the same bytes."""
    trace = traces.generate(spec)
    path = tmp_path_factory.mktemp("out") / f"t{traces.WRITERS[name].ending}{ending}"
    traces.save(trace, path, name)
    again = traces.load(path, format=name)
    step = 100 if name == "azure-2023" else 1
    assert abs(again.arrival_ns - trace.arrival_ns).max() <= step
    assert again.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    assert again.output_tokens.tolist() == trace.output_tokens.tolist()
    before = path.read_bytes()
    traces.save(again, path, name)
    assert path.read_bytes() == before


def test_mooncake_ids_share_what_the_trace_shares(tmp_path: Path) -> None:
    """Blocks of 512 tokens have equal ids in two rows exactly where all tokens up to their end are shared."""
    spans = ([0, 3, 5, 6], [1, 2, 3, 1, 4, 9], [600, 600, 100, 600, 1000, 700])
    trace = traces.make_trace([0, 1_500_000, 3_000_000], [1300, 1600, 700], [1, 2, 3], spans=spans)
    traces.save(trace, tmp_path / "m.jsonl", "mooncake")
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [row["timestamp"] for row in rows] == [0, 1.5, 3]
    assert [row["hash_ids"] for row in rows] == [[0, 1, 2], [0, 3, 4, 5], [6, 7]]
    assert traces.load(tmp_path / "m.jsonl").arrival_ns.tolist() == trace.arrival_ns.tolist()


def test_mooncake_comes_back_as_it_was(shared_data: Path, tmp_path: Path) -> None:
    """The published synthetic trace, read and written, has the same lengths, arrivals and reuse."""
    trace = traces.load(shared_data / "traces" / "mooncake" / "synthetic_trace.jsonl.xz").head(500)
    traces.save(trace, tmp_path / "m.jsonl", "mooncake")
    again = traces.load(tmp_path / "m.jsonl")
    first, second = traces.stats(trace, [100_000]), traces.stats(again, [100_000])
    for numbers in (first, second):
        del numbers["digest"], numbers["name"]
    assert first == second


def test_custom_prompts_share_words_where_prompts_share_tokens(tmp_path: Path) -> None:
    """The text for `vllm bench serve` has one word a token, and equal beginnings exactly where spans are equal."""
    spans = ([0, 2, 4], [1, 2, 1, 3], [300, 40, 300, 50])
    trace = traces.make_trace([0, 0], [340, 350], [5, 6], spans=spans)
    traces.save(trace, tmp_path / "c.jsonl", "vllm-custom")
    rows = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    words = [row["prompt"].split() for row in rows]
    assert [len(text) for text in words] == [340, 350]
    assert words[0][:300] == words[1][:300]
    assert words[0][300:340] != words[1][300:340]
    assert [row["output_tokens"] for row in rows] == [5, 6]


def test_what_is_lost_is_named(tmp_path: Path) -> None:
    """A format that cannot hold sessions, priorities or fine times says so; ours lose nothing."""
    spec = {
        "kind": "synthetic",
        "num_requests": 9,
        "arrival": {"process": "poisson", "rate_per_s": 3},
        "prompt_tokens": 5,
        "output_tokens": 3,
        "sessions": {"turns": 3},
        "priorities": 3,
    }
    trace = traces.generate(spec)
    assert traces.lost(trace, "kvtwin-jsonl") == []
    assert traces.lost(trace, "azure-2023") == [
        "shared prefixes",
        "which prompts repeat which outputs",
        "turns that wait for others",
        "priorities",
        "times below 100 ns",
    ]
    assert "arrival times" in traces.lost(trace, "vllm-custom")
    with pytest.raises(traces.TraceError, match="cannot write the trace format 'burstgpt'; can be written are"):
        traces.save(trace, tmp_path / "t.csv", "burstgpt")
