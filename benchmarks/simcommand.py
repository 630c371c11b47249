"""Commands of the speed benchmarks, run one after another, and what each took."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PROMPT, OUTPUT = 512, 256
"""Tokens of every request."""
RATE = 4.0
"""Requests a second, Poisson."""
MAX_NUM_SEQS = 128
BLOCKS = 7_000
"""Of 16 tokens: about what Llama-2-7B leaves on an A100-80G."""


@dataclass(frozen=True)
class Took:
    """What a command took, by the kernel's account of the process and its children."""

    user_s: float
    wall_s: float
    peak_mb: float
    code: int
    errors: str


def took(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Took:
    """Run a command to its end; its output is dropped, its errors are kept."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    return Took(usage.ru_utime, wall, usage.ru_maxrss / 1024, process.returncode, errors)


def workload(folder: Path, num: int, rate: float = RATE) -> Path:
    """The description of a trace of `num` requests."""
    path = folder / f"poisson_{rate:g}_{num}.yaml"
    path.write_text(
        f"kind: synthetic\nnum_requests: {num}\nseed: 0\narrival: {{process: poisson, rate_per_s: {rate}}}\n"
        f"prompt_tokens: {PROMPT}\noutput_tokens: {OUTPUT}\n",
        encoding="utf-8",
    )
    return path


def simulate(trace: Path, out: Path, *options: str, pure: bool = False) -> Took:
    """`kvtwin simulate` of the benchmarks' model and device; prefix cache and block accounting are on."""
    command = [sys.executable, "-m", "experiments.cli", "simulate", "--trace", str(trace), "--out", str(out)]
    command += ["--model", "llama-2-7b", "--hardware", "a100-80g", "--max-num-seqs", str(MAX_NUM_SEQS)]
    command += ["--num-gpu-blocks-override", str(BLOCKS), *options]
    return took(command, {**os.environ, "KVTWIN_PURE": "1" if pure else ""})


def loop_s() -> float:
    """CPU-seconds of ten million additions in plain Python, to tell machines (and busy hours) apart."""
    began = time.process_time()
    total = 0
    for i in range(10_000_000):
        total += i
    return time.process_time() - began


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text, the first being titles, as columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
