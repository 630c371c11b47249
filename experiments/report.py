"""Pages for a browser: one file each, pictures inside, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from experiments import compare
from experiments.results import Results, write_text

__all__ = ["comparison_body", "machine", "page", "picture", "table", "write_comparison"]

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #e2e2e2; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; border-bottom: 2px solid #999; }
td.within { color: #00674a; } td.outside { color: #b3400a; font-weight: 600; } td.inconclusive { color: #7a5a00; }
img { max-width: 100%; height: auto; }
figure { margin: 1.2rem 0; } figcaption, .small { color: #555; font-size: .9rem; }
pre { background: #f5f5f5; padding: .8rem 1rem; white-space: pre-wrap; border-radius: 4px; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1rem; }
"""

CAPTIONS = {
    "latency": "Latency distributions. Thin blue: real runs. Broad orange: the simulation.",
    "kv_pool": "Where every slot of the KV pool is, over time: the first real run beside the simulation.",
    "batches": "What the steps were made of, over time: means over short stretches.",
}


def page(title: str, body: str) -> str:
    """A whole HTML document."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_CSS}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table; a cell that is a verdict gets its colour."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for row in rows:
        cells = "".join(
            f'<td class="{escape(cell)}">{escape(cell)}</td>'
            if cell in compare.VERDICTS
            else f"<td>{escape(cell)}</td>"
            for cell in row
        )
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table>"


def picture(png: bytes, caption: str) -> str:
    """A picture inside the page."""
    data = base64.b64encode(png).decode()
    text = escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def machine() -> str:
    """The machine that this runs on, in a few words."""
    import os
    import platform

    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores, {platform.system()} {platform.release()}"


def comparison_body(content: Mapping[str, Any], bands: Mapping[str, Any] | None, figures: Mapping[str, bytes]) -> str:
    """Table, sentences, pictures and what the verdicts mean."""
    rows = compare.table_rows(dict(content["metrics"]), dict(bands) if bands else None)
    notes = "".join(f"<p>{escape(line)}</p>\n" for line in compare.sentences(dict(content)))
    meaning = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in content["verdicts"].items())
    runs = content["num_real_runs"]
    what = (
        f"<p class=small>real: mean of {runs} run{'s' if runs != 1 else ''}. Range: largest minus smallest of them, in "
        "percent of their mean. Error: simulated against real, signed. Band: the simulation repeated with its step "
        "time off by as much as the calibration may be. TTFT is the time from arrival to the first token, TPOT the "
        "time per further output token.</p>"
    )
    images = "\n".join(picture(data, CAPTIONS[name]) for name, data in figures.items())
    return f"{table(*compare.without_empty(compare.COLUMNS, rows))}\n{what}\n{notes}<dl>{meaning}</dl>\n{images}"


def write_comparison(
    path: Path,
    content: Mapping[str, Any],
    bands: Mapping[str, Any] | None,
    figures: Mapping[str, bytes],
    real: Sequence[Results],
    simulated: Results,
) -> None:
    """The page of `kvtwin compare`."""
    sources = ", ".join(escape(str(run.path)) for run in real)
    what = f"<p>Real: {sources}. Simulated: {escape(str(simulated.path))}.</p>\n"
    write_text(path, page("Real and simulated", what + comparison_body(content, bands, figures)))
