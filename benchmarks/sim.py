"""How fast the simulator is: `make bench-sim`.

The work: prompts of 512 tokens, 256 output tokens, Poisson arrivals at 4 a second, Llama-2-7B on one A100-80G, at most
128 sequences, prefix cache and block accounting on. Each row is a whole command, `kvtwin simulate`, with start-up and
writing of the tables; CPU time is user time, so others on the machine disturb less than they would wall time. Nothing
here is a test. The bars are those of one core of 2.x GHz; beside them stands what a plain Python loop takes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from simcommand import Took, loop_s, simulate, table, took, workload  # noqa: E402

CONVERSATION = Path("data") / "traces" / "mooncake" / "conversation_trace.jsonl.xz"


def row(name: str, num: int, one: Took, start_s: float) -> list[str]:
    after = max(one.user_s - start_s, 1e-9)
    return [
        name,
        f"{num:,}",
        f"{one.user_s:.2f}",
        f"{one.wall_s:.2f}",
        f"{one.peak_mb:.0f}",
        f"{num / one.user_s:,.0f}",
        f"{num / after:,.0f}",
        f"{1e6 * after / num:.0f}",
    ]


def conversation(out: Path) -> Took | None:
    """The Mooncake conversation trace on Llama-3.1-70B over four H100, where $KVTWIN_SHARED has it."""
    trace = Path(os.environ.get("KVTWIN_SHARED", "shared")) / CONVERSATION
    if not trace.is_file():
        return None
    command = [sys.executable, "-m", "experiments.cli", "simulate", "--trace", str(trace), "--out", str(out)]
    command += ["--model", "llama-3.1-70b", "--hardware", "h100", "--tensor-parallel-size", "4"]
    return took([*command, "--max-model-len", "131072", "--block-size", "16"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,10000,100000", help="numbers of requests (default: %(default)s)")
    parser.add_argument("--pure", action="store_true", help="run the Python sources, not the compiled build")
    parser.add_argument("--single-steps", type=int, default=10_000, help="requests without fast-forward; 0: none")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    pure = args.pure
    titles = ["", "requests", "user s", "wall s", "peak MB", "req/CPU-s", "after start-up", "us a request"]
    rows = [titles]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = simulate(workload(folder, 1), folder / "out", pure=pure)
        if first.code:
            print(first.errors.strip(), file=sys.stderr)
            return 2
        start = first.user_s
        rows.append(row("start-up, one request", 1, first, 0.0))
        for num in sizes:
            rows.append(row("4/s", num, simulate(workload(folder, num), folder / "out", pure=pure), start))
        saturated = simulate(workload(folder, 10_000, 40.0), folder / "out", pure=pure)
        rows.append(row("40/s, saturated", 10_000, saturated, start))
        if args.single_steps:
            num = args.single_steps
            single = simulate(workload(folder, num), folder / "out", "--no-fast-forward", pure=pure)
            rows.append(row("4/s, --no-fast-forward", num, single, start))
        mooncake = None if pure else conversation(folder / "out")
        if mooncake is not None:
            rows.append(row("Mooncake conversation", 12_031, mooncake, start))
    print(f"Python {sys.version.split()[0]}, {'sources' if pure else 'build of make venv'}, one process. ", end="")
    print(f"Ten million additions in a Python loop: {loop_s():.2f} CPU-seconds.")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
