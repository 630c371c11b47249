"""The compiled build of the core against its Python sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import engine.compiled
from engine.compiled import FOLDER, MODULES, prefer_compiled

PROGRAMS = """
import json, sys
from hypothesis import HealthCheck, Phase, given, settings
from shadow import play
from strategies import cases
import engine.core.scheduler, sim.executor

results = []

@settings(max_examples=300, phases=[Phase.generate], derandomize=True, database=None, deadline=None,
          suppress_health_check=list(HealthCheck))
@given(cases())
def programs(case):
    played = play(case)
    results.append([sorted(played.outputs.items()), sorted(played.finished.items()), played.preemptions, played.hits,
                    played.turns])

programs()
print(json.dumps({"files": [engine.core.scheduler.__file__, sim.executor.__file__], "results": results}))
"""

SIMULATE = """
import json, sys
from experiments.cli import main
import engine.core.scheduler

assert main(sys.argv[1:]) == 0
print(json.dumps({"files": [engine.core.scheduler.__file__]}))
"""

TRACE = """
kind: synthetic
num_requests: 400
seed: 11
arrival: {process: poisson, rate_per_s: 40}
prompt_tokens: {dist: lognormal, mean: 300, sigma: 0.8}
output_tokens: {dist: lognormal, mean: 120, sigma: 0.7}
prefix: {num_prefixes: 5, tokens: 100, share: 0.7}
sessions: {turns: {dist: uniform, low: 1, high: 3}, think_s: {dist: fixed, value: 1}}
"""


def run(code: str, pure: bool, *arguments: str) -> dict[str, object]:
    """The last line that `code` prints, in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "KVTWIN_PURE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    if pure:
        environment["KVTWIN_PURE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def need_compiled() -> None:
    path: list[str] = []
    pure = os.environ.pop("KVTWIN_PURE", None)
    prefer_compiled("engine.core", path)
    if pure is not None:
        os.environ["KVTWIN_PURE"] = pure
    if not path:
        pytest.skip("no compiled build of these sources (make venv makes one where there is a C compiler)")


def test_compiled_programs_do_what_the_sources_do() -> None:
    """On 300 programs over the shadow executor, every check holds and everything comes out the same."""
    need_compiled()
    compiled, pure = run(PROGRAMS, pure=False), run(PROGRAMS, pure=True)
    assert all(str(file).startswith(str(FOLDER)) for file in compiled["files"])  # type: ignore[attr-defined]
    assert all(str(file).endswith(".py") for file in pure["files"])  # type: ignore[attr-defined]
    assert compiled["results"] == pure["results"]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--async-scheduling", "--preset", "vllm-0.19"),
        ("--no-fast-forward",),
        ("--eviction-policy", "lfu", "--prefix-index", "radix"),
        ("--allocator", "contiguous-pow2", "--placement", "buddy"),
        ("--batching", "prefill-first", "--victim-policy", "most-memory"),
    ],
)
def test_a_compiled_simulation_writes_the_same_bytes(tmp_path: Path, options: tuple[str, ...]) -> None:
    """With preemptions, prefix hits and sessions, the tables of both builds are equal to the byte."""
    need_compiled()
    (tmp_path / "trace.yaml").write_text(TRACE)
    for name in ("compiled", "pure"):
        out = tmp_path / name
        common = ("--trace", str(tmp_path / "trace.yaml"), "--model", "llama-3-8b", "--hardware", "a100-80g")
        memory = ("--num-gpu-blocks-override", "700", "--max-model-len", "8000")
        run(SIMULATE, name == "pure", "simulate", *common, *memory, *options, "--out", str(out))
    summary = json.loads((tmp_path / "pure" / "summary.json").read_text())
    if "--allocator" not in options:  # those preempt nobody and cache nothing
        assert summary["num_preemptions"] > 10
        assert summary["prefix_hit_tokens"] > 1000
    for name in ("requests.parquet", "steps.parquet", "summary.json"):
        assert (tmp_path / "compiled" / name).read_bytes() == (tmp_path / "pure" / name).read_bytes(), name


def test_an_experiment_runs_on_the_compiled_build(tmp_path: Path) -> None:
    """An experiment, with its checks of every step's memory, gives the same numbers with both builds."""
    need_compiled()
    found = {}
    for name in ("compiled", "pure"):
        out = tmp_path / name
        run(SIMULATE, name == "pure", "experiment", "chunked", "--out", str(out), "--claims", str(out / "claims"))
        found[name] = {row.name: json.loads(row.read_text())["numbers"] for row in (out / "claims").iterdir()}
    assert found["compiled"]
    assert found["compiled"] == found["pure"]


def test_compiled_modules_of_other_sources_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that was made from other sources, or by another Python, is passed over."""
    monkeypatch.delenv("KVTWIN_PURE", raising=False)
    monkeypatch.setattr("engine.compiled.FOLDER", tmp_path)
    (tmp_path / "sources.json").write_text(json.dumps(dict.fromkeys(MODULES, "another")))
    path: list[str] = []
    prefer_compiled("engine.core", path)
    assert path == []


def test_a_change_in_one_package_puts_the_whole_build_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled modules of one package are not mixed with sources of another: they refuse each other's objects."""
    monkeypatch.delenv("KVTWIN_PURE", raising=False)
    for package, modules in MODULES.items():
        folder = tmp_path / package.replace(".", "/")
        folder.mkdir(parents=True)
        for module in modules:
            (folder / f"{module}.py").write_text("")
    monkeypatch.setattr(engine.compiled, "ROOT", tmp_path)
    monkeypatch.setattr(engine.compiled, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sources.json").write_text(json.dumps(dict.fromkeys(MODULES, engine.compiled._digest())))

    def found() -> list[bool]:
        paths: dict[str, list[str]] = {package: [] for package in MODULES}
        for package, path in paths.items():
            prefer_compiled(package, path)
        return [bool(path) for path in paths.values()]

    assert all(found())
    (tmp_path / "engine/core/types.py").write_text("# changed")
    assert not any(found())
