"""The claims ledger: what two articles say, and what our own runs say about it.

`claims.yaml` holds the claims. An experiment's run writes `ID.json` for each row that it settles into the folder of
rows, never a hand; `kvtwin claims` puts both together, on the terminal and as docs/claims.md.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import results
from experiments.errors import ResultsError, UsageError

if TYPE_CHECKING:
    from experiments.config import Config
    from experiments.terminal import Terminal

__all__ = [
    "STATUSES",
    "Claim",
    "Settled",
    "execute",
    "read_claims",
    "read_rows",
    "render",
    "show_settled",
    "write_row",
]

STATUSES = ("reproduced", "reproduced-only-if", "does-not-follow", "open")
_WORDS = {
    "reproduced": "reproduced",
    "reproduced-only-if": "reproduced only if",
    "does-not-follow": "does not follow",
    "open": "open",
}
_ARTICLES = {
    "A": "Article A: five traps of PagedAttention and GPU memory",
    "B": "Article B: why contiguous KV caches waste memory, and what PagedAttention does about it",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of claims.yaml."""

    id: str
    claim: str
    theirs: str
    """The source's figure; empty where it gives none."""
    mechanism: str
    """What decides it."""
    experiment: str
    """The experiment that settles it."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What a run says about a claim."""

    id: str
    status: str
    """One of STATUSES; `open`: the run has figures, but they decide nothing."""
    ours: str
    """Our figures, in a sentence or less."""
    condition: str = ""
    """Reproduced only if: when. Does not follow: what the claim's numbers would require."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The figures themselves."""


def read_claims() -> dict[str, Claim]:
    """All rows of claims.yaml by id, in its order.

    Raises:
        ResultsError: a row is not as it should be.
    """
    import yaml

    path = Path(__file__).with_name("claims.yaml")
    found: dict[str, Claim] = {}
    for row in yaml.safe_load(path.read_text(encoding="utf-8")):
        if set(row) != {"id", "claim", "theirs", "mechanism", "experiment", "status"} or row["id"] in found:
            raise ResultsError(
                f"{path.name}: the row {row.get('id')} lacks a key, has one too many, or is there twice."
            )
        if row["status"] != "open":
            raise ResultsError(f"{path.name}: the status of {row['id']} must be open; only a run settles a row.")
        found[row["id"]] = Claim(**{key: str(value) for key, value in row.items() if key != "status"})
    return found


def write_row(folder: Path, settled: Settled, experiment: str, manifest: Mapping[str, Any]) -> None:
    """Writes one row of the ledger, with what it rests on.

    Raises:
        ResultsError: there is no such claim, it belongs to another experiment, or the row is incomplete; a fault of
            the experiment's module.
    """
    claim = read_claims().get(settled.id)
    if claim is None or claim.experiment != experiment:
        owner = "nobody" if claim is None else claim.experiment
        raise ResultsError(f"{experiment} settles {settled.id}, which claims.yaml gives to {owner}.")
    if settled.status not in STATUSES:
        raise ResultsError(f"{experiment} gives {settled.id} the status {settled.status}; it must be among {STATUSES}.")
    if settled.status in ("reproduced-only-if", "does-not-follow") and not settled.condition:
        raise ResultsError(f"{experiment} gives {settled.id} the status {settled.status} without a condition.")
    content = {
        "id": settled.id,
        "status": settled.status,
        "theirs": claim.theirs,
        "ours": settled.ours,
        "condition": settled.condition,
        "numbers": dict(settled.numbers),
        "experiment": experiment,
        "manifest": {key: manifest[key] for key in _REFERENCE if key in manifest},
    }
    results.write_json(folder / f"{settled.id}.json", content)


_REFERENCE = ("commit", "modified", "code", "versions", "seed", "configuration", "data", "usage_check")
"""Of a manifest, what a row keeps."""


def read_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows that runs have written, by id.

    Raises:
        ResultsError: a file there is no row of ours.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        row = results.read_json(path)
        if not isinstance(row, dict) or row.get("id") != path.stem or row.get("status") not in STATUSES:
            raise ResultsError(f"{path} is no row of the ledger; delete it, or run its experiment again.")
        found[path.stem] = row
    return found


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin claims`: all rows as a table, and docs/claims.md; with --check, only whether that file is up to date."""
    from experiments.experimentcmd import EXPERIMENTS

    claims, rows = read_claims(), read_rows(Path(args.claims))
    strange = sorted(rows.keys() - claims.keys())
    if strange:
        raise ResultsError(f"{args.claims}/{strange[0]}.json belongs to no claim; delete it.")
    text = render(claims, rows, frozenset(EXPERIMENTS))
    counts = Counter(_status(rows.get(id)) for id in claims)
    summary: dict[str, Any] = {"rows": len(claims), **{status: counts[status] for status in STATUSES}}
    assert config.out is not None  # has a default
    out = Path(config.out)
    if args.check:
        if not out.is_file():
            raise UsageError(f"{out} is not there; `kvtwin claims --out {out}` writes it.")
        if out.read_text(encoding="utf-8") != text:
            raise UsageError(f"{out} is stale; `kvtwin claims --out {out}` renders it again.")
        terminal.print(f"{out} is up to date.")
        return summary
    results.write_text(out, text)
    _show(claims, rows, terminal)
    terminal.print(_counts(summary))
    terminal.note(f"Written to {out}.")
    return summary


def _status(row: Mapping[str, Any] | None) -> str:
    return "open" if row is None else str(row["status"])


def _counts(summary: Mapping[str, Any]) -> str:
    return f"{summary['rows']} claims: " + ", ".join(f"{summary[s]} {_WORDS[s]}" for s in STATUSES) + "."


def _show(claims: Mapping[str, Claim], rows: Mapping[str, Mapping[str, Any]], terminal: Terminal) -> None:
    cells = []
    for id, claim in claims.items():
        row = rows.get(id)
        ours = "" if row is None else row["ours"]
        cells.append((id, claim.claim, claim.theirs, ours, _status(row), claim.experiment))
    _table("The claims ledger", ("id", "claim", "theirs", "ours", "verdict", "experiment"), cells, terminal)


def show_settled(settled: Sequence[Settled], terminal: Terminal) -> None:
    """The rows that a run has settled, on the terminal."""
    cells = [(row.id, row.ours, row.status, row.condition) for row in settled]
    _table("Rows of the ledger", ("id", "ours", "verdict", "condition"), cells, terminal)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], terminal: Terminal) -> None:
    """A table whose cells are wrapped, in the colour of each row's verdict."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column == "id")
    colours = {"reproduced": "green", "reproduced-only-if": "yellow", "does-not-follow": "red", "open": "dim"}
    for row in rows:
        style = next(colours[cell] for cell in row if cell in colours)
        table.add_row(*(_WORDS.get(cell, cell).replace("[", r"\[") for cell in row), style=style)
    terminal.print(table)


def render(claims: Mapping[str, Claim], rows: Mapping[str, Mapping[str, Any]], existing: frozenset[str]) -> str:
    """docs/claims.md. `existing`: the experiments that can be run."""
    counts = Counter(_status(rows.get(id)) for id in claims)
    lines = [
        "# The claims ledger",
        "",
        "Two articles made these claims. A row is settled by an experiment's run, never by hand: `kvtwin experiment",
        "NAME` writes it to `results/claims/`, with the code, seed and data it rests on, and `kvtwin claims` renders",
        "this page.",
        "",
        "- **reproduced**: our figure agrees with theirs.",
        "- **reproduced only if**: it does under the condition that is named.",
        "- **does not follow**: it does not; the condition says what the claim's own numbers would require.",
        "- **open**: nothing that has run yet decides it.",
        "",
        _counts({"rows": len(claims), **{status: counts[status] for status in STATUSES}}),
    ]
    for letter, title in _ARTICLES.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| id | claim | theirs | ours | verdict | experiment |",
            "|---|---|---|---|---|---|",
        ]
        for id, claim in claims.items():
            if id.startswith(letter):
                lines.append(_line(claim, rows.get(id), existing))
    lines += ["", "## What decides each", "", "| id | mechanism | rests on |", "|---|---|---|"]
    for id, claim in claims.items():
        lines.append(f"| {id} | {_cell(claim.mechanism)} | {_reference(rows.get(id))} |")
    return "\n".join(lines) + "\n"


def _line(claim: Claim, row: Mapping[str, Any] | None, existing: frozenset[str]) -> str:
    status = _status(row)
    verdict = f"**{_WORDS[status]}**"
    ours = ""
    if row is not None:
        ours = row["ours"]
        if row["condition"]:
            verdict += f": {row['condition']}"
    experiment = f"`{claim.experiment}`" if claim.experiment in existing else f"{claim.experiment} (not written yet)"
    cells: Sequence[str] = (claim.claim, claim.theirs, ours, verdict, experiment)
    return f"| {claim.id} | " + " | ".join(_cell(text) for text in cells) + " |"


def _reference(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    manifest = row["manifest"]
    commit = manifest.get("commit")
    words = [f"code {str(manifest['code'])[:12]}", f"seed {manifest['seed']}"]
    if commit and not manifest.get("modified"):
        words.insert(0, f"commit {commit[:12]}")
    if manifest["data"]:
        words.append(", ".join(Path(name).name for name in manifest["data"]))
    return _cell("; ".join(words))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
