"""What a decision of the core costs, beside vLLM's own scheduler doing the same work: `make bench-core`.

Each row is a steady state: `schedule` and `complete` of steps in which every running request decodes one token, and one
in sixteen takes a block. With the oracle's environment (`make oracle`), both of its vLLM versions do the same. Medians
of CPU time, so that others on the machine disturb little; nothing here is a test.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "oracle")]

BLOCK_SIZE = 16
CASES = {
    "256 decodes, token ids": {"num_seqs": 256, "num_blocks": 20_000, "full": False},
    "256 decodes, no token ids": {"num_seqs": 256, "num_blocks": 20_000, "full": False},
    "256 decodes, 100,000 blocks full of cached content": {"num_seqs": 256, "num_blocks": 100_000, "full": True},
}
POOLS = (1_000, 10_000, 100_000, 1_000_000)


def steps(num_seqs: int, num_blocks: int, full: bool, repeats: int, tokens: bool) -> dict[str, float]:
    """Median CPU time of `schedule` and `complete`, in microseconds. vllm_side.py does the same with vLLM."""
    from engine.core import RequestSpec, Scheduler, SchedulerConfig, StepOutcome, TokenIdentity, preset

    options: dict[str, Any] = {**preset("vllm-0.33"), "max_num_seqs": num_seqs, "max_num_batched_tokens": 1 << 20}
    scheduler = Scheduler(SchedulerConfig(num_blocks=num_blocks, max_model_len=65_536, **options))
    times: list[tuple[float, float]] = []

    def add(prompt: list[int], out: int) -> None:
        identity = TokenIdentity(prompt, BLOCK_SIZE) if tokens else None
        scheduler.add(RequestSpec(0, len(prompt), out, identity), 0)

    def run(turns: int) -> None:
        for _ in range(turns):
            start = time.thread_time()
            plan = scheduler.schedule(0)
            decided = time.thread_time()
            rows = plan.decodes.rows() if tokens else []
            sampled = {row.request: 7 for row in rows}
            sampled.update({item.request: 7 for item in plan.prefills})
            outcome = StepOutcome(1, sampled if tokens else None)
            done = time.thread_time()
            scheduler.complete(plan, outcome)
            times.append((decided - start, time.thread_time() - done))

    left = num_blocks if full else 0
    while left:
        blocks = min(left, 4_000)
        add([left + 10, *[3] * (blocks * BLOCK_SIZE - 1)], 1)
        run(1)
        left -= blocks
    if full:
        assert scheduler.manager.pool.num_kept_free == num_blocks
    for i in range(num_seqs):
        add([200_000 + i, *[5] * (127 + i % BLOCK_SIZE)], repeats + 20)
    run(5)
    times.clear()
    gc.collect()
    gc.freeze()
    run(repeats)
    gc.unfreeze()
    return {
        "schedule_us": median(a for a, _ in times) * 1e6,
        "complete_us": median(b for _, b in times) * 1e6,
        "step_us": median(a + b for a, b in times) * 1e6,
    }


def pool_operations(num_blocks: int, num: int = 16, rounds: int = 400) -> dict[str, float]:
    """Median CPU time in ns a block of the operations on a pool whose free blocks all hold cached content."""
    from engine.core.index import HashIndex
    from engine.core.pool import BlockPool
    from engine.core.types import BlockHash, BlockId

    pool, index = BlockPool(num_blocks), HashIndex()
    blocks, _ = pool.take(num_blocks)
    for block in blocks:
        index.insert(BlockHash(int(block)), None, block)
    pool.keep(blocks)
    pool.drop(blocks)
    draw = random.Random(0)
    times: dict[str, list[float]] = {"take": [], "drop": [], "share": [], "drop shared": [], "find": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.thread_time()
        found = call()
        times[name].append((time.thread_time() - start) / num * 1e9)
        return found

    fresh = num_blocks
    for _ in range(rounds):
        taken, evicted = timed("take", lambda: pool.take(num))
        index.remove(evicted)
        for block in taken:
            index.insert(BlockHash(fresh), None, block)
            fresh += 1
        pool.keep(taken)
        timed("drop", lambda taken=taken: pool.drop(taken))
        hits = [BlockId(i) for i in draw.sample(range(num_blocks), num)]
        timed("share", lambda hits=hits: pool.share(hits))
        timed("drop shared", lambda hits=hits: pool.drop(hits))
        keys = [BlockHash(draw.randrange(fresh)) for _ in range(num)]
        timed("find", lambda keys=keys: [index.find(key) for key in keys])
    return {name: median(values) for name, values in times.items()}


def measure(repeats: int) -> dict[str, Any]:
    """Everything of ours, in this process, by the build of the core that it has."""
    import engine.core.scheduler as core

    return {
        "file": str(core.__file__),
        "cases": {name: steps(**case, repeats=repeats, tokens="no token" not in name) for name, case in CASES.items()},
        "pools": {str(size): pool_operations(size) for size in POOLS},
    }


def in_a_process(pure: bool, repeats: int) -> dict[str, Any]:
    """`measure` by the sources, or by the compiled build where there is one that fits them."""
    environment = {k: v for k, v in os.environ.items() if k != "KVTWIN_PURE"} | ({"KVTWIN_PURE": "1"} if pure else {})
    command = [sys.executable, str(Path(__file__)), "--measure", "--repeats", str(repeats)]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def vllms(repeats: int) -> dict[str, dict[str, Any]]:
    """The cases by vLLM's own schedulers, by version; says why where there are none."""
    from oracle_process import OracleProcess
    from setup_oracle import VERSIONS, missing

    found: dict[str, dict[str, Any]] = {}
    for version in VERSIONS:
        reason = missing(version)
        if reason is not None:
            print(f"Without vLLM {version}: {reason}.", file=sys.stderr)
            continue
        found[f"vLLM {version}"] = {}
        cached: dict[str, Any] = {}
        for name, case in CASES.items():
            print(f"vLLM {version}: {name} ...", file=sys.stderr, flush=True)
            key = json.dumps(case)
            if key not in cached:
                with OracleProcess(version) as oracle:
                    cached[key] = oracle.ask({"bench": {**case, "repeats": repeats}})
            found[f"vLLM {version}"][name] = cached[key]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=300, help="steps of each case (default: 300)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.repeats)))
        return 0
    print("The core: Python sources, then the compiled build ...", file=sys.stderr, flush=True)
    builds = {"sources": in_a_process(True, arguments.repeats)}
    compiled = in_a_process(False, arguments.repeats)
    if compiled["file"].endswith(".py"):
        print("There is no compiled build of these sources; `make venv` makes one.", file=sys.stderr)
    else:
        builds["compiled"] = compiled
    sides = {name: build["cases"] for name, build in builds.items()} | vllms(arguments.repeats)
    if arguments.json:
        print(json.dumps({"cases": sides, "pools": {name: build["pools"] for name, build in builds.items()}}, indent=2))
        return 0
    print_tables(sides, builds)
    return 0


def print_tables(sides: dict[str, dict[str, Any]], builds: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150)
    table = Table(title="schedule + complete of a step, microseconds of CPU (median)")
    for column in ("case", "side", "schedule", "complete", "both", *(f"times {name}" for name in builds)):
        table.add_column(column, justify="left" if column in ("case", "side") else "right")
    for case in CASES:
        for side, measured in sides.items():
            step = measured[case]
            ratios = [f"{step['step_us'] / sides[name][case]['step_us']:.1f}" for name in builds]
            row = (step["schedule_us"], step["complete_us"], step["step_us"])
            table.add_row(case, side, *(f"{value:.0f}" for value in row), *ratios)
        table.add_section()
    console.print(table)
    table = Table(title="Operations of a pool full of cached content, ns of CPU a block (median of batches of 16)")
    for column in ("build", "blocks", "take", "drop", "share", "drop shared", "find"):
        table.add_column(column, justify="left" if column == "build" else "right")
    for name, build in builds.items():
        for size, operations in build["pools"].items():
            table.add_row(name, f"{int(size):,}", *(f"{value:.0f}" for value in operations.values()))
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
