"""Results of benchmark clients, read as the requests that were sent.

vllm: `vllm bench serve --save-result --save-detailed`, one JSON object with lists input_lens, output_lens, start_times
(s, of an unknown clock) and errors. Releases before start_times existed, and results without --save-detailed, have no
arrivals or no lengths.

guidellm: one JSON object with `benchmarks`, each a run at one rate; with several, `benchmark` says which (from 0). A
request has request_start_time, prompt_tokens, output_tokens. Only the successful are read.

aiperf: JSON Lines, profile_export.jsonl: request_start_ns and lengths of each request. The client's own count of the
output may be twice the server's (here 32 and 16): usage_completion_tokens and usage_prompt_tokens, which the server
reports, are taken where they are there. Requests of warm-up phases are read too. The files profile_export_aiperf.json
and .csv hold sums and percentiles only.

genai-bench: one JSON object with individual_request_metrics: lengths without arrivals, in the order in which they
finished. They all arrive at 0, or as a Poisson process of `rate_per_s`, seeded.

Failed and cancelled requests, and those without input or output tokens, are left out everywhere. All requests arrive
when they were sent, also where a client waited for an answer before.
"""

from __future__ import annotations

from typing import Any

from traces.errors import TraceError
from traces.files import TraceFile, is_integer
from traces.readers.base import Format, Rows, starts_ns
from traces.schema import Trace

__all__ = ["FORMATS", "why_no_trace"]

_VLLM_LISTS = ("input_lens", "output_lens", "start_times")


def _head_text(file: TraceFile) -> str:
    return file.beginning[:65536].decode("utf-8-sig", errors="replace").lstrip()


def _is_vllm(file: TraceFile) -> bool:
    text = _head_text(file)
    return text.startswith("{") and '"request_throughput"' in text and '"num_prompts"' in text


def _is_guidellm(file: TraceFile) -> bool:
    text = _head_text(file)
    return text.startswith("{") and '"guidellm_version"' in text


def _is_aiperf(file: TraceFile) -> bool:
    row = file.first_object()
    return isinstance(row.get("metadata"), dict) and isinstance(row.get("metrics"), dict)


def _is_genai(file: TraceFile) -> bool:
    text = _head_text(file)
    return text.startswith("{") and ('"individual_request_metrics"' in text or '"aggregated_metrics"' in text)


def why_no_trace(file: TraceFile) -> str | None:
    """What to do with a benchmark's file that has no requests."""
    text = _head_text(file)
    if '"aiperf_version"' in text or text.startswith("Metric,avg,min,max"):
        return "has aiperf's sums and percentiles, and no requests; give the file profile_export.jsonl of the same run"
    return None


def _read_vllm(file: TraceFile) -> Trace:
    result = file.json_object()
    for key in _VLLM_LISTS:
        if not isinstance(result.get(key), list):
            advice = "of a release that writes it" if key == "start_times" else "run it with --save-detailed"
            raise TraceError(f"{file.path}: has no list {key}, so requests cannot be told; {advice}")
    lists = [result[key] for key in _VLLM_LISTS]
    errors = result.get("errors")
    if not isinstance(errors, list) or len(errors) != len(lists[0]):
        errors = [""] * len(lists[0])
    if len({len(part) for part in lists}) != 1:
        sizes = ", ".join(f"{len(part)} {key}" for key, part in zip(_VLLM_LISTS, lists, strict=True))
        raise TraceError(f"{file.path}: has {sizes}; the lists must be equally long, so write the file again")
    rows = Rows(file)
    for at, (prompt, output, start, error) in enumerate(zip(*lists, errors, strict=True)):
        values = {"input_lens": prompt, "output_lens": output, "start_times": start}
        if error:
            rows.dropped += 1
        else:
            _add(rows, f"request {at}", values, _VLLM_LISTS, 10**9)
    return rows.trace()


def _read_guidellm(file: TraceFile, benchmark: int | None) -> Trace:
    runs = file.json_object().get("benchmarks")
    if not isinstance(runs, list) or not runs:
        raise TraceError(f"{file.path}: has no list of benchmarks; let guidellm write it again")
    if benchmark is None and len(runs) > 1:
        raise TraceError(f"{file.path}: has {len(runs)} benchmarks; say which with benchmark=0 to {len(runs) - 1}")
    at = benchmark or 0
    if not is_integer(at) or not 0 <= at < len(runs):
        raise TraceError(f"{file.path}: has {len(runs)} benchmarks, so benchmark must be from 0 to {len(runs) - 1}")
    requests = runs[at].get("requests") if isinstance(runs[at], dict) else None
    if not isinstance(requests, dict) or not isinstance(requests.get("successful"), list):
        raise TraceError(f"{file.path}: benchmark {at} has no list of successful requests; let guidellm keep them")
    rows = Rows(file)
    for kind in ("errored", "incomplete"):
        rows.dropped += len(requests.get(kind) or ())
    for place, request in enumerate(requests["successful"]):
        values = request if isinstance(request, dict) else {}
        _add(
            rows, f"successful request {place}", values, ("prompt_tokens", "output_tokens", "request_start_time"), 10**9
        )
    return rows.trace()


def _read_aiperf(file: TraceFile) -> Trace:
    rows = Rows(file)
    for number, row in file.json_rows():
        metadata, metrics = row.get("metadata"), row.get("metrics")
        if not isinstance(metadata, dict) or not isinstance(metrics, dict):
            raise file.error(number, "has no metadata and metrics; each line needs both")
        if metadata.get("was_cancelled") or row.get("error"):
            rows.dropped += 1
            continue
        values = {
            "request_start_ns": metadata.get("request_start_ns"),
            "prompt tokens": _measured(metrics, "usage_prompt_tokens", "input_sequence_length"),
            "output tokens": _measured(metrics, "usage_completion_tokens", "output_sequence_length"),
        }
        _add(rows, f"line {number}", values, ("prompt tokens", "output tokens", "request_start_ns"), 1)
    return rows.trace()


def _measured(metrics: dict[str, Any], *names: str) -> object:
    """The first of the metrics that is there."""
    for name in names:
        entry = metrics.get(name)
        if isinstance(entry, dict) and entry.get("value") is not None:
            return entry["value"]
    return None


def _read_genai(file: TraceFile, rate_per_s: float | None, seed: int) -> Trace:
    requests = file.json_object().get("individual_request_metrics")
    if not isinstance(requests, list):
        raise TraceError(
            f"{file.path}: has no list of individual_request_metrics; give the file of one run, not a summary"
        )
    rows = Rows(file)
    for at, request in enumerate(requests):
        values = request if isinstance(request, dict) else {}
        if values.get("error_code") is not None:
            rows.dropped += 1
        else:
            _add(rows, f"request {at}", {**values, "at": 0}, ("num_input_tokens", "num_output_tokens", "at"), 10**9)
    return rows.trace(starts_ns(file, len(rows), rate_per_s, seed))


def _add(rows: Rows, where: str, values: dict[str, Any], keys: tuple[str, str, str], tick_ns: int) -> None:
    """One request from its prompt tokens, output tokens and start, in ticks of `tick_ns`."""
    counts = []
    for key in keys[:2]:
        value = values.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            value = 0
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise TraceError(f"{rows.file.path}, {where}: {key} is {value!r}; it must be a whole number of 0 or more")
        counts.append(value)
    if 0 in counts:
        rows.dropped += 1
        return
    start = values.get(keys[2])
    if isinstance(start, bool) or not isinstance(start, int | float) or not 0 <= start * tick_ns < 2**62:
        raise TraceError(f"{rows.file.path}, {where}: {keys[2]} is {start!r}; it must be a number of 0 or more")
    # The whole ticks apart: seconds since 1970 times 1e9 are beyond what a float holds exactly.
    when = int(start) * tick_ns + round((start - int(start)) * tick_ns)
    rows.add(len(rows), when, counts[0], counts[1])


FORMATS = (
    Format("vllm-bench", "JSON of vllm bench serve --save-detailed", _is_vllm, _read_vllm, options={}),
    Format("guidellm", "JSON of guidellm", _is_guidellm, _read_guidellm, options={"benchmark": None}),
    Format("aiperf", "JSON Lines of aiperf, profile_export.jsonl", _is_aiperf, _read_aiperf, options={}),
    Format(
        "genai-bench",
        "JSON of one genai-bench run (no arrivals)",
        _is_genai,
        _read_genai,
        options={"rate_per_s": None, "seed": 0},
    ),
)
