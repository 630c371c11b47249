"""ServeGen pools: workloads that are drawn from a description of clients."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
from test_formats_csv import complaint, write

import traces

TRACE_0 = "0,0,0,,0,0\r\n600,0.1,6.7,Gamma,0.0223,73.0\r\n1200,0.5,0.9,Weibull,1.12,2.0\r\n"
TRACE_1 = "0,0.2,1.0,Gamma,1.0,5.0\r\n600,0.1,1.0,Gamma,1.0,10.0\r\n1200,0,0,,0,0\r\n\r\n"
DATASET_0 = {
    "0": {"input_tokens": "{}", "output_tokens": "{}", "reason_ratio": "{}"},
    "1200": {"input_tokens": "{45: 0.25, 46: 0.75}", "output_tokens": "{9: 1.0}", "reason_ratio": "{0.5: 1.0}"},
}
DATASET_1 = {"0": {"input_tokens": "{7: 2.0, 8: 0.0}", "output_tokens": "{0: 1.0}"}}


def pool(path: Path, files: dict[str, str]) -> Path:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"data/pool/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    data = raw.getvalue()
    path.write_bytes(
        lzma.compress(data) if path.suffix == ".xz" else gzip.compress(data) if path.suffix == ".gz" else data
    )
    return path


def whole(path: Path, **changes: str) -> Path:
    files = {
        "chunk-0-trace.csv": TRACE_0,
        "chunk-0-dataset.json": json.dumps(DATASET_0),
        "chunk-1-trace.csv": TRACE_1,
        "chunk-1-dataset.json": json.dumps(DATASET_1),
        "README": "of no use here",
    }
    return pool(path, files | {name.replace("_", "-").replace("--", "."): text for name, text in changes.items()})


def test_a_pool_sends_as_many_requests_as_it_says(tmp_path: Path) -> None:
    """Each client has rate x 600 requests in a window, however bursty, with lengths from its table of the time."""
    trace = traces.load(whole(tmp_path / "p.tar"), duration_s=1800)
    assert len(trace) == 60 + 300 + 120 + 60
    assert np.bincount(trace.tenant).tolist() == [360, 180]
    first = trace.tenant == 0
    assert set(trace.prompt_tokens[first].tolist()) == {45, 46}
    assert 0.65 < (trace.prompt_tokens[first] == 46).mean() < 0.85
    assert set(trace.prompt_tokens[~first].tolist()) == {7}
    assert set(trace.output_tokens.tolist()) == {9, 1}  # an output of 0 tokens is 1
    for packed in ("p.tar.xz", "p.tar.gz"):
        assert traces.load(whole(tmp_path / packed), duration_s=1800) == trace


def test_the_shape_of_the_gaps_is_the_pools(tmp_path: Path) -> None:
    """Gamma gaps of shape 0.0223 come in bursts (coefficient of variation over 3), of shape 1 they do not."""
    trace = traces.load(whole(tmp_path / "p.tar"), start_s=600, duration_s=600, rate_per_s=20)
    gaps = [np.diff(trace.arrival_ns[trace.tenant == client]) for client in (0, 1)]
    bursty, plain = (float(gap.std() / gap.mean()) for gap in gaps)
    assert bursty > 3
    assert 0.9 < plain < 1.1


def test_a_part_of_the_day_is_a_part_of_the_whole(tmp_path: Path) -> None:
    """Another start or length does not change what is drawn, another seed does; a rate scales it."""
    path = whole(tmp_path / "p.tar")
    day = traces.load(path, duration_s=1800)
    part = traces.load(path, start_s=900, duration_s=600)
    gaps, part_gaps = np.diff(day.arrival_ns), np.diff(part.arrival_ns)
    begin = int(np.flatnonzero(gaps == part_gaps[0])[0])
    assert (gaps[begin : begin + len(part_gaps)] == part_gaps).all()
    assert (day.prompt_tokens[begin : begin + len(part)] == part.prompt_tokens).all()
    assert traces.load(path, duration_s=1800, seed=1) != day
    assert traces.load(path, duration_s=1800, seed=0) == day
    assert len(traces.load(path, duration_s=1800, rate_per_s=3)) == pytest.approx(5400, abs=4)
    assert "nobody sends from 1e+06 s" in complaint(path, start_s=1_000_000)
    assert "give a shorter duration_s or a lower rate_per_s" in complaint(path, rate_per_s=100_000)
    assert "duration_s is 0" in complaint(path, duration_s=0)
    assert "seed is -1" in complaint(path, seed=-1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chunk_0_trace__csv": "0,x\r\n"}, "chunk-0-trace.csv, line 1: is not start, rate"),
        ({"chunk_0_trace__csv": "\r\n0,1,1,Zipf,1,1\r\n"}, "chunk-0-trace.csv, line 2: has rate 1 and the gaps 'Zipf'"),
        ({"chunk_0_trace__csv": "0,1,1,Gamma,0,1\r\n"}, "line 1: has rate 1 and the gaps 'Gamma' of shape 0"),
        ({"chunk_1_dataset__json": "[]"}, "chunk-1-dataset.json: is not a JSON object"),
        (
            {"chunk_1_dataset__json": '{"0": {"input_tokens": "{1: 1}"}}'},
            "chunk-1-dataset.json, output_tokens at 0 s: must be text like {45: 0.5, 46: 0.5}",
        ),
        (
            {"chunk_1_dataset__json": '{"0": {"input_tokens": "{1: -1}", "output_tokens": "{2: 1}"}}'},
            "input_tokens at 0 s: needs lengths of 0 or more",
        ),
        (
            {"chunk_1_dataset__json": '{"0": {"input_tokens": "{__import__(1): 1}", "output_tokens": "{2: 1}"}}'},
            "must be text like",
        ),
    ],
)
def test_a_wrong_member_is_named(tmp_path: Path, changes: dict[str, str], says: str) -> None:
    """The error names the pool, the member and the line or the time of day."""
    assert says in complaint(whole(tmp_path / "p.tar", **changes))


def test_clients_without_lengths_are_left_out(tmp_path: Path) -> None:
    """A client with no dataset takes no part; a pool of only such, a cut one, and a single member say what to do."""
    only = {"chunk-0-trace.csv": TRACE_0, "chunk-1-trace.csv": TRACE_1, "chunk-1-dataset.json": json.dumps(DATASET_1)}
    trace = traces.load(pool(tmp_path / "p.tar", only), duration_s=1800)
    assert set(trace.tenant.tolist()) == {1}
    assert "has no client with both" in complaint(pool(tmp_path / "q.tar", {"chunk-0-trace.csv": TRACE_0}))
    cut = tmp_path / "cut.tar"
    cut.write_bytes((tmp_path / "p.tar").read_bytes()[:700])
    assert "damaged tar" in complaint(cut)
    assert "give a tar of the pool's folder" in complaint(write(tmp_path, "chunk-0-trace.csv", TRACE_0))


PMF = "field,tokens,probability\ninput_tokens,9,1e-8\ninput_tokens,12,0.6\ninput_tokens,20,0.4\noutput_tokens,3,1\n"
RATES = (
    "t_s,total_rate_rps,rate_weighted_client_cv,active_clients,top_client_share\n"
    "0,10.0,2.5,5,0.6\n600,4.0,1.0,1,1.0\n1200,0,0,0,0\n"
)


def test_a_summed_pool_is_drawn_from_its_rates(tmp_path: Path) -> None:
    """Lengths come from the probabilities, counts and the top client's share from the rates' file beside it."""
    path = write(tmp_path, "m_length_pmf.csv", PMF)
    (tmp_path / "m_rate_10min.csv.gz").write_bytes(gzip.compress(RATES.encode()))
    trace = traces.load(path)
    counts = np.bincount(trace.tenant)
    assert counts.tolist() == [3600, 600, 600, 600, 600]
    assert set(trace.prompt_tokens.tolist()) <= {9, 12, 20}
    assert 0.55 < (trace.prompt_tokens == 12).mean() < 0.65
    assert len(traces.load(path, start_s=600)) == 2400
    assert "nobody sends from 1200 s" in complaint(path, start_s=1200)
    assert "give the file *_length_pmf.csv beside it" in complaint(tmp_path / "m_rate_10min.csv.gz")


def test_a_summed_pool_alone_needs_a_rate(tmp_path: Path) -> None:
    """Without the rates' file, arrivals are Poisson at a rate that must be given."""
    path = write(tmp_path, "m_length_pmf.csv", PMF)
    assert "has no *_rate_10min.csv beside it; put it there, or give rate_per_s" in complaint(path)
    numbers = traces.stats(traces.load(path, rate_per_s=5.0, duration_s=1200))
    assert numbers["n"] == 6000
    assert 0.95 < numbers["cv_interarrival"] < 1.05
    bad = write(tmp_path, "n_length_pmf.csv", PMF + "reason_tokens,3,1\n")
    assert "line 6: has the field 'reason_tokens'" in complaint(bad)


def test_the_published_pool_has_its_own_rate(shared_data: Path) -> None:
    """The first window of the reasoning pool has the 8,918 requests that its clients' rates add up to."""
    folder = shared_data / "traces" / "servegen"
    trace = traces.load(folder / "reason-deepseek-r1.tar.xz")
    assert len(trace) == 8918
    assert len(np.unique(trace.tenant)) > 10
    small = traces.load(folder / "m-small_length_pmf.csv.gz", rate_per_s=50)
    assert len(small) == pytest.approx(30_000, abs=25)
    assert 100 < small.prompt_tokens.mean() < 130
