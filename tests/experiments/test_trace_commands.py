"""`kvtwin trace ...` and `--trace` with files of every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trace_files import sample_files

import traces
from experiments.cli import main

SIMULATE = ["--model", "llama-3.1-8b", "--hardware", "a100", "--num-gpu-blocks-override", "500", "--no-bands"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The summary of a command that succeeds."""
    code = main([*words, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    summary: dict[str, Any] = json.loads(out)
    return summary


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a refused command says."""
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_every_format_can_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulator serves the first requests of a file of each format, all of them to the end."""
    for name, path in sample_files(tmp_path).items():
        summary = run(
            capsys, "simulate", "--trace", str(path), "--num-requests", "3", "--out", str(tmp_path / name), *SIMULATE
        )
        assert summary["num_requests"] == min(3, len(traces.load(path))), name
        assert summary["num_rejected"] == 0, name


def test_help_lists_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvtwin trace --help` names every format that is read, with its options, and every one that is written."""
    assert main(["trace", "--help"]) == 0
    text = capsys.readouterr().out
    for entry in traces.FORMATS.values():
        assert f"  {entry.name} " in text
        assert all(f"{option} (" in text for option in entry.options)
    for name in traces.WRITERS:
        assert f"  {name} " in text


def test_format_and_options_reach_the_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--format overrides the guess, --trace-option sets what a format takes, and --seed reaches those that draw."""
    samples = sample_files(tmp_path)
    stats = ("trace", "stats")
    assert run(capsys, *stats, str(samples["sharegpt"]), "--trace-option", "chars_per_token=1")["input"]["max"] == 5
    pool = (*stats, str(samples["servegen-pool"]), "--trace-option", "duration_s=300")
    first, again, other = (run(capsys, *pool, "--seed", seed)["digest"] for seed in ("0", "0", "3"))
    assert first == again
    assert first != other
    assert run(capsys, *stats, str(samples["vidur"]), "--seed", "3", "--format", "vidur")["n"] == 2
    assert "is a folder; a trace is one file" in refused(capsys, *stats, str(tmp_path))
    wrong = refused(capsys, *stats, str(samples["vidur"]), "--format", "mooncake")
    assert "line 1: is not JSON" in wrong
    assert "unknown trace format 'vidr'; known are" in refused(
        capsys, *stats, str(samples["vidur"]), "--format", "vidr"
    )
    assert "has no option 'turns'; it takes rate_per_s, seed" in refused(
        capsys, *stats, str(samples["vidur"]), "--trace-option", "turns=1"
    )
    assert "--trace-option takes KEY=VALUE, but got 'turns'" in refused(
        capsys, *stats, str(samples["vidur"]), "--trace-option", "turns"
    )


def test_convert_writes_other_formats_and_says_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A converted file is read back as the same requests; sessions have no place in most formats, which is said."""
    samples = sample_files(tmp_path)
    agent = str(samples["agent-calls"])
    for name, writer in traces.WRITERS.items():
        out = tmp_path / f"out-{name}{writer.ending}"
        summary = run(capsys, "trace", "convert", agent, "--to", name, "--out", str(out))
        assert "turns that wait for others" in summary["lost"]
        if name != "vllm-custom":
            assert run(capsys, "trace", "stats", str(out))["in_tokens"] == 32 + 48
    own = run(capsys, "trace", "convert", agent, "--out", str(tmp_path / "own.parquet"))
    assert own["lost"] == []
    assert own["digest"] == run(capsys, "trace", "stats", str(tmp_path / "own.parquet"))["digest"]
    assert "cannot write the trace format 'excel'; can be written are" in refused(
        capsys, "trace", "convert", agent, "--to", "excel", "--out", str(tmp_path / "t.xls")
    )
