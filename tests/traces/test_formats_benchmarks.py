"""Results of benchmark clients, read as the requests that were sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_formats_csv import complaint, write
from test_formats_hashed import as_lines

import traces

VLLM: dict[str, Any] = {
    "date": "20261130-200955",
    "num_prompts": 4,
    "request_throughput": 9.7,
    "input_lens": [84, 85, 10, 72],
    "output_lens": [16, 8, 0, 4],
    "ttfts": [0.1, 0.2, 0.0, 0.1],
    "start_times": [2027.5, 2028.75, 2028.0, 2027.625],
    "errors": ["", "", "refused", ""],
}
GUIDELLM: dict[str, Any] = {
    "metadata": {"guidellm_version": "0.8.1"},
    "benchmarks": [
        {
            "requests": {
                "successful": [
                    {"prompt_tokens": 64, "output_tokens": 16, "request_start_time": 1796068532.25},
                    {"prompt_tokens": 32, "output_tokens": 8, "request_start_time": 1796068532.0},
                    {"prompt_tokens": 32, "output_tokens": None, "request_start_time": 1796068533.0},
                ],
                "errored": None,
                "incomplete": [{}],
            }
        }
    ],
}
GENAI = {
    "aggregated_metrics": {},
    "individual_request_metrics": [
        {"ttft": 0.1, "num_input_tokens": 62, "num_output_tokens": 16, "error_code": None},
        {"ttft": 0.1, "num_input_tokens": 61, "num_output_tokens": 15, "error_code": 500},
        {"ttft": 0.1, "num_input_tokens": 59, "num_output_tokens": 14, "error_code": None},
    ],
    "_time_unit": "s",
}


def aiperf(start_ns: int, cancelled: bool = False, usage: bool = True) -> dict[str, object]:
    metrics = {"input_sequence_length": {"value": 64}, "output_sequence_length": {"value": 32}}
    if usage:
        metrics |= {"usage_prompt_tokens": {"value": 68}, "usage_completion_tokens": {"value": 16}}
    return {"metadata": {"request_start_ns": start_ns, "was_cancelled": cancelled}, "metrics": metrics}


def test_vllm_results_are_the_requests_that_were_sent(tmp_path: Path) -> None:
    """Starts become arrivals in order, lengths are the result's, and a failed request is left out."""
    trace = traces.load(write(tmp_path, "v.json", json.dumps(VLLM)))
    assert trace.arrival_ns.tolist() == [0, 125_000_000, 1_250_000_000]
    assert trace.prompt_tokens.tolist() == [84, 72, 85]
    assert trace.output_tokens.tolist() == [16, 4, 8]
    assert trace.dropped == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_lens": None}, "has no list input_lens, so requests cannot be told; run it with --save-detailed"),
        ({"start_times": None}, "has no list start_times"),
        ({"output_lens": [1]}, "has 4 input_lens, 1 output_lens, 4 start_times"),
        ({"output_lens": [1, "x", 1, 1]}, "request 1: output_lens is 'x'"),
        ({"start_times": [0, 1, 2, -3]}, "request 3: start_times is -3"),
        ({"output_lens": [0, 0, 0, 0]}, "only failures"),
    ],
)
def test_a_wrong_vllm_result_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    """The error names the list or the request; two results in one file are told apart by the line."""
    assert says in complaint(write(tmp_path, "v.json", json.dumps({**VLLM, **change})))
    twice = write(tmp_path, "w.json", json.dumps(VLLM) + "\n" + json.dumps(VLLM))
    assert "line 2: begins a second JSON value" in complaint(twice)


def test_guidellm_reads_one_benchmark(tmp_path: Path) -> None:
    """Requests are sorted by their start, failures left out; of several benchmarks one has to be named."""
    trace = traces.load(write(tmp_path, "g.json", json.dumps(GUIDELLM)))
    assert trace.arrival_ns.tolist() == [0, 250_000_000]
    assert trace.prompt_tokens.tolist() == [32, 64]
    assert trace.dropped == 2
    two = write(tmp_path, "h.json", json.dumps({**GUIDELLM, "benchmarks": GUIDELLM["benchmarks"] * 2}))
    assert "has 2 benchmarks; say which with benchmark=0 to 1" in complaint(two)
    assert traces.load(two, benchmark=1) == trace
    assert "benchmark must be from 0 to 1" in complaint(two, benchmark=2)
    assert "has no list of benchmarks" in complaint(
        write(tmp_path, "i.json", json.dumps({**GUIDELLM, "benchmarks": {}}))
    )


def test_aiperf_counts_what_the_server_counted(tmp_path: Path) -> None:
    """The server's usage goes before the client's own count; a cancelled request is left out; ns stay exact."""
    rows = [aiperf(1796068592547932407), aiperf(1796068592547932400), aiperf(1796068592547932500, cancelled=True)]
    trace = traces.load(write(tmp_path, "a.jsonl", as_lines(rows)))
    assert trace.arrival_ns.tolist() == [0, 7]
    assert trace.prompt_tokens.tolist() == [68, 68]
    assert trace.output_tokens.tolist() == [16, 16]
    assert trace.dropped == 1
    own = traces.load(write(tmp_path, "b.jsonl", as_lines([aiperf(5, usage=False)])))
    assert (own.prompt_tokens.tolist(), own.output_tokens.tolist()) == ([64], [32])
    assert "line 2: has no metadata and metrics" in complaint(write(tmp_path, "c.jsonl", as_lines([aiperf(5), {}])))


def test_genai_bench_has_lengths_alone(tmp_path: Path) -> None:
    """Lengths of what succeeded, all at 0 or at a seeded rate."""
    path = write(tmp_path, "g.json", json.dumps(GENAI, indent=1))
    trace = traces.load(path)
    assert trace.prompt_tokens.tolist() == [62, 59]
    assert trace.arrival_ns.tolist() == [0, 0]
    assert trace.dropped == 1
    assert traces.load(path, rate_per_s=1, seed=5).arrival_ns[1] > 0


def test_summaries_are_no_traces(tmp_path: Path) -> None:
    """aiperf's summaries, and JSON that breaks off, say what to do instead."""
    summary = write(tmp_path, "s.json", json.dumps({"schema_version": "1.4", "aiperf_version": "0.13.0"}))
    assert "give the file profile_export.jsonl of the same run" in complaint(summary)
    table = write(tmp_path, "s.csv", "Metric,avg,min,max,sum\nx,1,1,1,1\n")
    assert "give the file profile_export.jsonl of the same run" in complaint(table)
    assert "line 1: is not JSON" in complaint(write(tmp_path, "v.json", json.dumps(VLLM)[:-20]))


def test_real_outputs_read(shared_data: Path) -> None:
    """What the four clients really wrote gives the numbers of requests and tokens that they report."""
    folder = shared_data / "traces" / "bench_outputs"
    vllm = traces.load(folder / "vllm_bench_serve_0.33_detailed.json")
    assert (len(vllm), vllm.prompt_tokens.sum(), vllm.output_tokens.sum()) == (20, 1339, 320)
    guidellm = traces.load(folder / "guidellm_0.8.1.json.xz")
    assert (len(guidellm), guidellm.dropped) == (25, 1)
    aiperf_trace = traces.load(folder / "aiperf_0.13_profile_export.head3.jsonl")
    assert aiperf_trace.output_tokens.tolist() == [16, 16, 16]
    genai = traces.load(folder / "genai_bench_0.0.5_run.json")
    assert (len(genai), genai.prompt_tokens.sum()) == (28, 1777)
