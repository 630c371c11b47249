"""The claims ledger: its rows, who may write them, and the page that is rendered from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.claims import STATUSES, Settled, read_claims, read_rows, render, write_row
from experiments.cli import main
from experiments.errors import ResultsError
from experiments.experimentcmd import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[2]
MANIFEST: dict[str, Any] = {
    "commit": "c" * 40,
    "modified": False,
    "code": "d" * 64,
    "seed": 7,
    "data": {"traces/a.csv": "e"},
}


def test_every_claim_is_there() -> None:
    """52 claims of the first article and 14 of the second, each with what decides it and an experiment."""
    claims = read_claims()
    assert list(claims) == [f"A{i:02}" for i in range(1, 53)] + [f"B{i:02}" for i in range(1, 15)]
    assert all(claim.claim and claim.mechanism and claim.experiment for claim in claims.values())


def test_every_experiment_settles_something() -> None:
    """Each experiment that can be run owns at least one row."""
    assert set(EXPERIMENTS) <= {claim.experiment for claim in read_claims().values()}


@pytest.mark.parametrize(
    ("settled", "experiment", "said"),
    [
        (Settled("Z01", "open", ""), "waste", "gives to nobody"),
        (Settled("A14", "open", ""), "fork", "gives to waste"),
        (Settled("A14", "true", ""), "waste", "the status true"),
        (Settled("A14", "does-not-follow", "15"), "waste", "without a condition"),
    ],
)
def test_a_row_that_cannot_be_is_refused(settled: Settled, experiment: str, said: str, tmp_path: Path) -> None:
    """A row needs a claim of its own experiment, a known status, and a condition where the status has one."""
    with pytest.raises(ResultsError, match=said):
        write_row(tmp_path, settled, experiment, MANIFEST)
    assert not list(tmp_path.iterdir())


def test_the_page_says_what_the_rows_say(tmp_path: Path) -> None:
    """A settled row shows its figures, verdict, condition and what it rests on; the others are open."""
    write_row(tmp_path, Settled("A14", "reproduced-only-if", "15 | 32", "blocks of 16", {"x": 1}), "waste", MANIFEST)
    text = render(read_claims(), read_rows(tmp_path), frozenset({"waste"}))
    assert "66 claims: 0 reproduced, 1 reproduced only if, 0 does not follow, 65 open." in text
    line = next(line for line in text.splitlines() if line.startswith("| A14 |"))
    assert r"15 \| 32" in line
    assert "**reproduced only if**: blocks of 16" in line
    assert f"commit {'c' * 12}; code {'d' * 12}; seed 7; a.csv" in text
    assert "| A15 |" in text
    assert "not written yet" not in line
    assert "failover (not written yet)" in text


def test_the_command_renders_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check accepts what was just rendered, and refuses it once a row has changed."""
    rows, page = tmp_path / "rows", tmp_path / "claims.md"
    words = ["claims", "--claims", str(rows), "--out", str(page)]
    assert main([*words, "--check"]) == 2
    assert "is not there" in capsys.readouterr().err
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "rows": 66,
        "reproduced": 0,
        "reproduced-only-if": 0,
        "does-not-follow": 0,
        "open": 66,
    }
    assert main([*words, "--check"]) == 0
    write_row(rows, Settled("A14", "reproduced", "15"), "waste", MANIFEST)
    assert main([*words, "--check"]) == 2
    assert "stale" in capsys.readouterr().err
    assert main(words) == 0
    assert main([*words, "--check"]) == 0


@pytest.mark.parametrize("content", ["{", "[]", '{"id": "A15", "status": "open"}', '{"id": "A14", "status": "true"}'])
def test_a_file_that_is_no_row_is_named(content: str, tmp_path: Path) -> None:
    """A damaged row is refused by name, not skipped."""
    (tmp_path / "A14.json").write_text(content)
    with pytest.raises(ResultsError, match=r"A14\.json"):
        read_rows(tmp_path)


def test_the_committed_rows_make_the_committed_page() -> None:
    """docs/claims.md is what the rows in results/claims render to, and each row is one its experiment may write."""
    rows = read_rows(ROOT / "results" / "claims")
    claims = read_claims()
    for id, row in rows.items():
        assert row["experiment"] == claims[id].experiment
        assert row["theirs"] == claims[id].theirs
        assert row["status"] in STATUSES
    assert (ROOT / "docs" / "claims.md").read_text() == render(claims, rows, frozenset(EXPERIMENTS))
