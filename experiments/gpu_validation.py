"""One command that validates and measures the engine on a GPU: `python -m experiments.gpu_validation --out DIR`.

It is a list of named parts, each with what it is worth and about how long it takes. They run in the order of their
worth; one that no longer fits the budget is left out, one that fails is recorded with its sentence, and the rest goes
on. After every part OUT/validation.json, its Parquet tables and its plots are whole files of all that is known by then.

With --smoke everything runs on the CPU with tiny sizes: that shows that the command works, and nothing about speed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.errors import one_sentence
from experiments.results import write_bytes, write_json, write_table

if TYPE_CHECKING:
    import torch

__all__ = ["Part", "Validation", "main", "run_parts"]

DEFAULT_BUDGET_S = 480.0


@dataclass
class Validation:
    """What parts share: where they run, what they found, and how long they may go on."""

    out: Path
    smoke: bool
    device: torch.device
    deadline: float
    clock: Callable[[], float] = time.monotonic
    found: dict[str, Any] = field(default_factory=dict)
    """Results of the parts that have ended, by name."""

    def left_s(self) -> float:
        return self.deadline - self.clock()

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """OUT/name.parquet; rows have equal keys, and there is one at least."""
        import pyarrow as pa

        columns: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0]}
        write_table(self.out / f"{name}.parquet", pa.table(columns))

    def plot(self, name: str, png: bytes) -> None:
        write_bytes(self.out / f"{name}.png", png)


@dataclass(frozen=True, slots=True)
class Part:
    """A thing to find out."""

    name: str
    value: float
    """What it is worth beside the others; the most valuable runs first."""
    cost_s: float
    """About how long it takes on a large GPU."""
    run: Callable[[Validation], Mapping[str, Any]]
    """Returns what goes into validation.json; raises an error whose sentence goes there instead."""


def run_parts(
    parts: Sequence[Part], validation: Validation, say: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Run the parts by falling value while the budget lasts; returns (and writes) an entry for each of them.

    `status` is done, failed or skipped; `sentence` says why. Ctrl-C ends the part that runs and all that follow.
    """
    entries: list[dict[str, Any]] = []
    queue = sorted(parts, key=lambda part: -part.value)
    interrupted = False
    for part in queue:
        entry: dict[str, Any] = {"name": part.name, "value": part.value, "estimate_s": part.cost_s, "seconds": 0.0}
        left = validation.left_s()
        if interrupted:
            entry |= {"status": "skipped", "sentence": "The run was interrupted before."}
        elif left < (0 if validation.smoke else part.cost_s):
            entry |= {
                "status": "skipped",
                "sentence": f"It takes about {part.cost_s:.0f} s, and {max(0.0, left):.0f} s of the budget are left.",
            }
        else:
            began = validation.clock()
            try:
                result = dict(part.run(validation))
                validation.found[part.name] = result
                entry |= {"status": "done", "result": result}
            except KeyboardInterrupt:
                interrupted = True
                entry |= {"status": "failed", "sentence": "It was interrupted."}
            except Exception as error:  # noqa: BLE001 (one part's fault must not take the others' figures with it)
                sentence = one_sentence(error) or f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
                entry |= {"status": "failed", "sentence": sentence}
            entry["seconds"] = round(validation.clock() - began, 3)
        entries.append(entry)
        say(f"{part.name}: {entry['status']} in {entry['seconds']:.1f} s. {entry.get('sentence', '')}".rstrip())
        write_json(
            validation.out / "validation.json",
            {
                "smoke": validation.smoke,
                "device": validation.device.type,
                "complete": len(entries) == len(queue) and not interrupted,
                "parts": entries,
            },
        )
    return entries


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0: it ran (validation.json says what failed), 1: a part failed, 2: it cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_validation", description=__doc__)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder that results go to")
    parser.add_argument(
        "--budget-s", type=float, default=DEFAULT_BUDGET_S, metavar="S", help="how long it may take (default 480)"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU: shows that the command works")
    parser.add_argument("--only", nargs="+", metavar="PART", help="only these parts")
    args = parser.parse_args(arguments)
    from experiments.gpuparts import PARTS

    try:
        from engine.exec.device import check_device

        unknown = set(args.only or ()) - {part.name for part in PARTS}
        if unknown or not args.budget_s > 0:
            what = (
                f"there is no part {min(unknown)!r}; choose from {', '.join(p.name for p in PARTS)}" if unknown else ""
            )
            raise SystemExit(f"error: {what or '--budget-s must be above 0'}.")
        device = check_device("cpu" if args.smoke else "cuda")
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
    except SystemExit as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:
        sentence = one_sentence(error)
        if sentence is None:
            raise
        print(f"error: {sentence} (--smoke runs with tiny sizes on the CPU.)", file=sys.stderr)
        return 2
    validation = Validation(out, args.smoke, device, time.monotonic() + args.budget_s)
    chosen = [part for part in PARTS if args.only is None or part.name in args.only]
    entries = run_parts(chosen, validation, lambda text: print(text, flush=True))
    print(f"Written to {out / 'validation.json'}.")
    return 1 if any(entry["status"] == "failed" for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
