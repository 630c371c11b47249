"""Our scheduler beside vLLM's own, real code of two versions, on the same random workloads, decision by decision.

Run by `make test-oracle`; needs the environment that `make oracle` builds. KVTWIN_ORACLE_WORKLOADS asks for another
number of workloads than 1,000.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest
from oracle_process import OracleProcess
from oracle_workloads import workload
from setup_oracle import VERSIONS, missing

from engine.core import preset
from experiments.decisions import first_difference, replay_workload

pytestmark = pytest.mark.oracle

PRESETS = {"0.19.1": "vllm-0.19", "0.33.0": "vllm-0.33"}
NUM_WORKLOADS = int(os.environ.get("KVTWIN_ORACLE_WORKLOADS", "1000"))
PROGRESS = 100
"""Workloads from one line of progress to the next."""


@pytest.fixture(scope="module", params=VERSIONS)
def oracles(request: pytest.FixtureRequest) -> Iterator[list[OracleProcess]]:
    """Two processes with the scheduler of one version, so that both cores have work."""
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    processes: list[OracleProcess] = []
    try:
        for _ in range(2):
            processes.append(OracleProcess(request.param))
        yield processes
    finally:
        for process in processes:
            process.close()


def for_version(number: int, version: str) -> dict[str, Any]:
    """The workload, without the options that the version does not have."""
    made = workload(number)
    if version == "0.19.1":
        made["config"].pop("watermark", None)
    return made


def compare(
    oracles: list[OracleProcess], preset_name: str, steps_in_flight: int, num: int
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """What was compared, and the first difference of each workload that has one."""
    version = oracles[0].version
    options = preset(preset_name)
    seen: Counter[str] = Counter()
    differences: list[dict[str, Any]] = []
    idle = deque(oracles)
    asked: deque[tuple[int, OracleProcess, Any]] = deque()

    def settle() -> None:
        number, process, ours = asked.popleft()
        theirs = process.receive()
        idle.append(process)
        count(seen, theirs)
        found = first_difference(theirs, ours)
        if found is not None:
            differences.append({"workload": number, **found})
        if seen["workloads"] % PROGRESS == 0:
            done = f"{seen['workloads']:,} of {num:,} workloads, {len(differences)} differ"
            print(f"  vLLM {version}, {steps_in_flight} in flight: {done}", file=sys.stderr, flush=True)

    for number in range(num):
        if not idle:
            settle()
        made = for_version(number, version)
        process = idle.popleft()
        process.send({**made, "steps_in_flight": steps_in_flight})
        asked.append((number, process, replay_workload(made, options, steps_in_flight, check=number % 10 == 0)))
    while asked:
        settle()
    return seen, differences


def count(seen: Counter[str], theirs: dict[str, Any]) -> None:
    """Adds up what vLLM decided on one workload."""
    steps = theirs["steps"]
    preemptions = sum(len(step[2]) for step in steps)
    seen["workloads"] += 1
    seen["workloads with preemptions"] += preemptions > 0
    seen["steps"] += len(steps)
    seen["rows"] += sum(len(step[1]) for step in steps)
    seen["preemptions"] += preemptions
    seen["hits"] += sum(hit[1] > 0 for step in steps for hit in step[6])
    seen["cached tokens hit"] += sum(hit[1] for step in steps for hit in step[6])
    seen["blocks taken"] += sum(len(step[7]) for step in steps)
    seen["evictions"] += sum(len(step[8]) for step in steps)
    for _, _, reason, _ in theirs["finished"]:
        seen[f"ended by {reason}"] += 1


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_every_decision_is_vllms(
    oracles: list[OracleProcess], steps_in_flight: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 1,000 workloads, most under pressure, each step schedules, hits, evicts, preempts and ends the same."""
    version = oracles[0].version
    with capsys.disabled():
        print(file=sys.stderr)
        seen, differences = compare(oracles, PRESETS[version], steps_in_flight, NUM_WORKLOADS)
        what = ", ".join(f"{number:,} {name}" for name, number in seen.items())
        print(
            f"vLLM {version} and preset {PRESETS[version]}, {steps_in_flight} step{'s' * (steps_in_flight > 1)} in "
            f"flight: {what}; {len(differences)} differences",
            file=sys.stderr,
        )
    assert differences == []
    assert seen["workloads"] == NUM_WORKLOADS
    assert seen["workloads with preemptions"] >= NUM_WORKLOADS / 2
    assert min(seen["hits"], seen["evictions"], seen["ended by stop"], seen["ended by abort"]) >= NUM_WORKLOADS / 5


def test_the_other_version_is_told_apart(oracles: list[OracleProcess]) -> None:
    """Under the other version's preset some of the same workloads differ, and the comparison sees it."""
    other = next(name for version, name in PRESETS.items() if version != oracles[0].version)
    _, differences = compare(oracles, other, 1, 60)
    assert 0 < len(differences) < 60
