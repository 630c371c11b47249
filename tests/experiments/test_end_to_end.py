"""The commands in a row, with the tiny random model: run, profile, calibrate, simulate, compare."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import metrics, results
from experiments.blocks import read_blocks
from experiments.cli import main
from experiments.interruption import Interruption

WORKLOAD = """
kind: synthetic
num_requests: 24
seed: 5
arrival: {process: closed-loop, concurrency: 8}
prompt_tokens: {dist: uniform, low: 8, high: 60}
output_tokens: {dist: uniform, low: 4, high: 40}
prefix: {num_prefixes: 2, tokens: {dist: fixed, value: 32}, share: 0.7}
"""
OPTIONS = [
    *("--num-gpu-blocks-override", "24", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
    *("--max-model-len", "256", "--model", "tiny"),
]
VICTIM = """
from engine.core import Victim

class FirstIn(Victim):
    def choose(self, candidates):
        return candidates[0].id
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a workload, a calibration made by hand, a real run and its simulation."""
    path = tmp_path_factory.mktemp("twin")
    (path / "w.yaml").write_text(WORKLOAD)
    profile = [*OPTIONS[2:], "--num-gpu-blocks-override", "200", "--time-budget-s", "8"]
    assert main(["profile", *profile, "--out", str(path / "profile.parquet")]) == 0
    assert main(["calibrate", str(path / "profile.parquet"), "--out", str(path / "calibration.json")]) == 0
    common = ["--trace", str(path / "w.yaml"), *OPTIONS]
    assert main(["run", *common, "--out", str(path / "real")]) == 0
    assert main(["simulate", *common, "--calibration", str(path / "calibration.json"), "--out", str(path / "sim")]) == 0
    return path


def compared(folder: Path, simulated: Path, out: Path) -> dict[str, Any]:
    """compare.json of the real run against `simulated`, decisions included."""
    assert main(["compare", str(folder / "real"), str(simulated), "--decisions", "--out", str(out)]) == 0
    content: dict[str, Any] = json.loads((out / "compare.json").read_text())
    return content


def test_a_run_leaves_everything_that_is_promised(folder: Path) -> None:
    """Both kinds of run write the same files; the real one also its recording."""
    common = {"manifest.json", "requests.parquet", "steps.parquet", "timing.json", "summary.json"}
    assert common | {"replay.parquet", "tokens.parquet"} <= {p.name for p in (folder / "real").iterdir()}
    assert common <= {p.name for p in (folder / "sim").iterdir()}
    for name, kind in (("real", "real"), ("sim", "simulated")):
        found = results.read_results(folder / name, kind)
        assert found.manifest["complete"] is True
        assert {"kind", "configuration", "versions", "seed", "trace_digest"} <= set(found.manifest)
        assert set(results.read_json(folder / name / "timing.json")) == {"wall_s", "cpu_s"}
        assert found.summary["num_requests"] == 24
        assert found.summary["kv_blocks"] == 24


def test_a_request_generates_what_the_trace_says(folder: Path) -> None:
    """Output lengths are the trace's, in the engine and in the simulator alike."""
    real, sim = (results.read_results(folder / name).tables.requests for name in ("real", "sim"))
    for table in (real, sim):
        assert (table["output_tokens"] == table["max_tokens"]).all()
    order = [np.argsort(table["row"]) for table in (real, sim)]
    for name in ("prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(real[name][order[0]], sim[name][order[1]])


def test_the_simulator_repeats_the_engines_decisions(folder: Path, tmp_path: Path) -> None:
    """A run that preempts and hits, decided again from what the engine recorded: no step differs."""
    content = compared(folder, folder / "sim", tmp_path)
    assert content["counts"]["num_preemptions"]["real"][0] > 0
    assert content["counts"]["prefix_hit_tokens"]["real"][0] > 0
    assert content["decision_differences"] == 0


def test_a_planted_difference_is_found(folder: Path, tmp_path: Path) -> None:
    """Another free order, or another victim out of a user's file: the steps that differ are counted."""
    (tmp_path / "victim.py").write_text(VICTIM)
    for number, change in enumerate((["--free-order", "single-queue"], ["--policy", f"{tmp_path}/victim.py:FirstIn"])):
        out = tmp_path / f"changed-{number}"
        common = ["--trace", str(folder / "w.yaml"), *OPTIONS, "--calibration", str(folder / "calibration.json")]
        assert main(["simulate", *common, *change, "--no-bands", "--out", str(out)]) == 0
        assert compared(folder, out, tmp_path / f"compared-{number}")["decision_differences"] > 0


EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "policies"


@pytest.mark.parametrize(
    "policy", ["shortest_with_patience.py:ShortestWithPatience", "gentle_prefill.py:GentlePrefill"]
)
def test_a_policy_file_runs_in_both(folder: Path, tmp_path: Path, policy: str) -> None:
    """The same file decides in the simulator and in the engine: replayed, no step differs, and without it some do."""
    common = ["--trace", str(folder / "w.yaml"), *OPTIONS, "--policy", f"{EXAMPLES}/{policy}"]
    assert main(["run", *common, "--out", str(tmp_path / "real")]) == 0
    simulate = ["simulate", *common, "--calibration", str(folder / "calibration.json"), "--no-bands"]
    assert main([*simulate, "--out", str(tmp_path / "sim")]) == 0
    assert compared(tmp_path, tmp_path / "sim", tmp_path / "same")["decision_differences"] == 0
    assert compared(folder, tmp_path / "sim", tmp_path / "other")["decision_differences"] > 0


def test_a_simulation_gives_the_same_bytes_twice(folder: Path, tmp_path: Path) -> None:
    """Everything but the timing is byte-identical, with runs of steps and without."""
    common = ["--trace", str(folder / "w.yaml"), *OPTIONS, "--calibration", str(folder / "calibration.json")]
    assert main(["simulate", *common, "--out", str(tmp_path / "again")]) == 0
    for name in (
        "requests.parquet",
        "steps.parquet",
        "gaps.parquet",
        "summary.json",
        "prediction.json",
        "manifest.json",
    ):
        assert (tmp_path / "again" / name).read_bytes() == (folder / "sim" / name).read_bytes(), name
    assert main(["simulate", *common, "--no-fast-forward", "--out", str(tmp_path / "slow")]) == 0
    assert (tmp_path / "slow" / "summary.json").read_bytes() == (folder / "sim" / "summary.json").read_bytes()


def test_predictions_come_with_bands_that_contain_them(folder: Path) -> None:
    """Every metric lies within its band, and the basis is named."""
    about = results.read_json(folder / "sim" / "prediction.json")
    summary = results.read_json(folder / "sim" / "summary.json")
    assert about["basis"] == "calibration"
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        for statistic, (low, high) in about["bands"][name].items():
            assert low <= summary[name][statistic] <= high
    # In a closed loop nothing but the steps takes time, so latencies are proportional to them.
    assert about["elasticity"]["e2e_s"]["mean"] == pytest.approx(1, abs=0.05)


def test_json_prints_the_summary_and_nothing_else(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is one JSON document, the content of summary.json."""
    common = ["--trace", str(folder / "w.yaml"), *OPTIONS, "--calibration", str(folder / "calibration.json")]
    assert main(["simulate", *common, "--out", str(tmp_path / "s"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == results.read_json(tmp_path / "s" / "summary.json")


def test_a_profile_of_other_settings_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Profiling into a file that holds another profile is refused, and the file stays."""
    path = folder / "profile.parquet"
    before = path.read_bytes()
    assert main(["profile", *OPTIONS, "--block-size", "8", "--out", str(path)]) == 2
    assert "another file" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_an_interrupted_run_keeps_what_there_is(folder: Path, tmp_path: Path) -> None:
    """Ctrl-C ends a run with exit code 130 and a readable folder that says it is not complete."""
    (tmp_path / "slow.yaml").write_text(
        "kind: synthetic\nnum_requests: 50\narrival: {process: constant, rate_per_s: 5}\n"
        "prompt_tokens: {dist: fixed, value: 8}\noutput_tokens: {dist: fixed, value: 4}\n"
    )
    import _thread

    timer = threading.Timer(2.0, _thread.interrupt_main)
    timer.start()
    out = tmp_path / "cut"
    assert main(["run", "--trace", str(tmp_path / "slow.yaml"), *OPTIONS, "--out", str(out)]) == 130
    timer.join()
    found = results.read_results(out, "real")
    assert found.manifest["complete"] is False
    assert 0 < found.summary["num_requests"] < 50


@pytest.mark.parametrize("where", ["simulation", "bands"])
def test_an_interrupted_simulation_keeps_what_there_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """Ctrl-C ends a simulation after a whole step, with exit code 130 and a readable folder that is not complete."""
    common = ["--trace", str(folder / "w.yaml"), *OPTIONS, "--calibration", str(folder / "calibration.json")]
    words = ["simulate", *common, "--no-fast-forward", "--record-blocks", "--out", str(tmp_path)]
    asked, wanted = 0, 1 << 40

    def ask(self: Interruption) -> bool:
        nonlocal asked
        asked += 1
        if asked == wanted:
            signal.raise_signal(signal.SIGINT)
        return self._came

    monkeypatch.setattr(Interruption, "__call__", ask)
    assert main([*words, "--no-bands"]) == 0
    whole = results.read_results(tmp_path).tables
    wanted, asked = asked // 2 if where == "simulation" else asked + 20, 0
    capsys.readouterr()
    assert main(words) == 130
    assert "interrupted" in capsys.readouterr().err
    found = results.read_results(tmp_path, "simulated")
    assert found.manifest["complete"] is False
    assert results.read_json(tmp_path / "prediction.json")["bands"] is None
    steps = found.tables.steps["step"]
    assert len(steps) > 0
    assert (len(steps) < len(whole.steps["step"])) == (where == "simulation")
    for name in ("start_ns", "end_ns", "num_decodes", "prefill_tokens", "held", "finished"):
        np.testing.assert_array_equal(found.tables.steps[name], whole.steps[name][: len(steps)], err_msg=name)
    blocks = read_blocks(tmp_path)
    assert blocks is not None
    assert blocks.last_step >= steps[-1]
    assert main(["plot", "memory", str(tmp_path), "--panels", "1"]) == 0


def test_a_second_interruption_is_not_waited_for() -> None:
    """The first Ctrl-C is a question's answer, the next one is raised; afterwards all is as before."""
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_real_run_records_the_blocks_that_its_usage_counts(folder: Path, tmp_path: Path) -> None:
    """The engine's own record of blocks agrees with its table of steps, in every step."""
    common = ["--trace", str(folder / "w.yaml"), *OPTIONS]
    assert main(["run", *common, "--record-blocks", "--out", str(tmp_path)]) == 0
    steps = metrics.expand_steps(results.read_results(tmp_path).tables)
    history = read_blocks(tmp_path)
    assert history is not None
    for place, state in enumerate(history.states(steps["step"].tolist())):
        used = int((state.owners > 0).sum()) * 16
        cached = int(state.cached.sum()) * 16
        assert (used, cached) == (steps["held"][place] + steps["tail"][place], steps["cached"][place])
    assert main(["plot", "memory", str(tmp_path), "--at", "100ms"]) == 0
    assert {"memory.png", "blocks.png", "blocks.html"} <= {path.name for path in tmp_path.iterdir()}


def test_a_device_that_would_not_be_used_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A calibration and a number of blocks leave nothing for --hardware to say."""
    words = ["--trace", str(folder / "w.yaml"), *OPTIONS, "--calibration", str(folder / "calibration.json")]
    assert main(["simulate", *words, "--hardware", "h100", "--out", str(tmp_path / "o")]) == 2
    assert "leave --hardware out" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--policy", "{folder}/broken.py:Mine"], "broken.py"),
        (["--policy", "{folder}/none.py:Mine"], "none.py"),
        (["--policy", "broken"], "broken"),
        (["--trace", "{folder}/malformed.csv"], "malformed.csv, line 3"),
        (["--trace", "{folder}/none.csv"], "none.csv"),
        (["--model", "{folder}/none.gguf"], "none.gguf"),
        (["--num-gpu-blocks-override", "1"], "can never fit"),
        (["--max-model-len", "100000"], "--max-model-len"),
        (["--max-num-batched-tokens", "4"], "--max-num-seqs"),
        (["--device", "cuda"], "cuda"),
        (["--out", "{folder}/w.yaml"], "is a file"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], named: str
) -> None:
    """Exit code 2, one line on standard error that names the thing, nothing on standard output, no traceback."""
    (folder / "broken.py").write_text("class Mine(\n")
    (folder / "malformed.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9,x,109\n"
    )
    (folder / "w.yaml").touch()
    words = ["run", "--trace", str(folder / "w.yaml"), *OPTIONS, "--out", str(tmp_path / "o")]
    words += [part.format(folder=folder) for part in change]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert len(lines) == 1, captured.err
    assert named in lines[0]
