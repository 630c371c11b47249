"""Results folders: same input, same bytes; whole or not at all; read back as written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_results import toy_tables, write_toy

from experiments import results
from experiments.errors import ResultsError, UsageError


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    """Every file but the timing is byte-identical for the same input."""
    first, second = write_toy(tmp_path / "a", "real"), write_toy(tmp_path / "b", "real")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert {"manifest.json", "requests.parquet", "steps.parquet", "summary.json", "timing.json"} <= set(names)
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_tables_come_back_as_written(tmp_path: Path) -> None:
    """Numbers, texts and list columns survive a round trip."""
    columns = {
        "request": np.arange(3),
        "outcome": ["stop", "length", "rejected"],
        "step_ends_ns": [np.array([1, 2]), np.empty(0, dtype=np.int64), np.array([7])],
        "run_takes": [np.array([1], dtype=np.int32), np.array([2, 3], dtype=np.int32), []],
    }
    results.write_table(tmp_path / "t.parquet", columns)
    found = results.read_table(tmp_path / "t.parquet")
    assert found["request"].tolist() == [0, 1, 2]
    assert found["outcome"].tolist() == columns["outcome"]
    assert [list(item) for item in found["step_ends_ns"]] == [[1, 2], [], [7]]
    assert [list(item) for item in found["run_takes"]] == [[1], [2, 3], []]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """A value that JSON cannot hold raises, and what was there stays, with nothing beside it."""
    path = tmp_path / "x.json"
    results.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        results.write_json(path, {"a": float("nan")})
    assert results.read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_run_claims_its_folder_and_says_when_it_is_not_complete(tmp_path: Path) -> None:
    """From the start of a run until its end the manifest says incomplete, and no result of an older run is left."""
    folder = write_toy(tmp_path / "r", "real")
    assert results.read_results(folder).manifest["complete"] is True
    results.begin(str(folder), {"kind": "real"})
    assert results.read_json(folder / "manifest.json")["complete"] is False
    with pytest.raises(ResultsError, match="unfinished"):
        results.read_results(folder)


def test_what_is_no_results_folder_is_refused(tmp_path: Path) -> None:
    """A missing folder, one of the other kind and a broken table are each named."""
    with pytest.raises(ResultsError, match=r"manifest\.json"):
        results.read_results(tmp_path / "nothing")
    folder = write_toy(tmp_path / "r", "real")
    with pytest.raises(ResultsError, match="kvtwin simulate"):
        results.read_results(folder, "simulated")
    (folder / "steps.parquet").write_bytes(b"no parquet")
    with pytest.raises(ResultsError, match=r"steps\.parquet"):
        results.read_results(folder)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="is a file"):
        results.begin(str(file), {})


def test_steps_in_flight_and_block_size_come_from_the_manifest(tmp_path: Path) -> None:
    """What expansion needs is read from the configuration that the run had."""
    tables = toy_tables(num_requests=3)
    manifest = {"kind": "real", "configuration": {"block_size": 8, "async_scheduling": True}}
    folder = results.begin(str(tmp_path / "r"), manifest)
    results.finish(folder, manifest, tables, {}, {})
    found = results.read_results(folder).tables
    assert (found.steps_in_flight, found.block_size) == (2, 8)
