"""`kvtwin ab`: sides, paired differences, and the command with the tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.ab import read_pairs
from experiments.cli import main
from experiments.config import Config
from experiments.errors import UsageError
from experiments.paired import METRICS, agreement, difference, interval, t_quantile, value_of
from experiments.sides import side_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("default", "scheduling_policy", "fcfs"),
        ("sjf", "scheduling_policy", "sjf"),
        ("most-memory", "victim_policy", "most-memory"),
        ("static", "batching", "static"),
        ("contiguous-pow2", "allocator", "contiguous-pow2"),
        ("swap", "preemption_mode", "swap"),
        ("radix", "prefix_index", "radix"),
        ("block_size=32", "block_size", 32),
        ("block-size=8,watermark=0.2", "watermark", 0.2),
        ("vllm-v0", "batching", "prefill-first"),
        ("preset=vllm-v0,batching=mixed", "batching", "mixed"),
        ("mine.py:Mine", "policy", ("mine.py:Mine",)),
        ("policy=a.py:B", "policy", ("a.py:B",)),
    ],
)
def test_a_side_is_what_it_is_called(text: str, name: str, value: Any) -> None:
    """A side is a preset, a policy's or option value's name, a class in a file, or options; the rest stays."""
    side = side_of(text, Config(max_num_seqs=7) if not text.startswith(("vllm", "preset")) else Config())
    assert getattr(side, name) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sfj", "no side called 'sfj'; did you mean"),
        ("priority", "may be several things; write scheduling_policy=priority or eviction_policy=priority"),
        ("blok_size=3", "unknown option blok_size; did you mean block_size"),
        ("block_size=0", "block_size must be at least 1"),
        ("block_size=8,fcfs", "key=value,key=value, but has 'fcfs'"),
        ("model=tiny", "model is the same for both sides; give it as --model"),
    ],
)
def test_a_side_that_cannot_be_is_one_sentence(text: str, reason: str) -> None:
    """What is wrong with a side is said in one sentence with a way out."""
    with pytest.raises(UsageError) as error:
        side_of(text, Config())
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("dof", "value"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (7, 2.36462), (30, 2.04227)])
def test_t_quantiles_are_those_of_the_tables(dof: int, value: float) -> None:
    """t(0.975) by its own integral equals the printed tables."""
    assert t_quantile(dof) == pytest.approx(value, abs=1e-4)


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    """Of 2,000 samples of 4 normal values, 95 % of the intervals hold the mean (within 3 standard errors)."""
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(2000):
        limits = interval((rng.normal(3.0, 2.0, 4)).tolist())
        assert limits is not None
        held += limits[0] <= 3.0 <= limits[1]
    assert abs(held / 2000 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 2000)
    assert interval([1.0]) is None


def test_differences_are_of_pairs() -> None:
    """A drift that is in both runs of a pair does not widen the interval of their difference."""
    found = difference([(1.0, 1.5), (2.0, 2.5), (3.0, 3.5)], (1.0, 1.2))
    assert found["real"]["difference"] == pytest.approx(0.5)
    assert found["real"]["interval"] == pytest.approx([0.5, 0.5])
    assert found["real"]["difference_pct"] == pytest.approx(25)
    assert found["simulated"]["difference_pct"] == pytest.approx(20)
    assert found["verdict"] == "same sign"


@pytest.mark.parametrize(
    ("limits", "difference_", "simulated", "verdict"),
    [
        ([1.0, 3.0], 2.0, 0.1, "same sign"),
        ([1.0, 3.0], 2.0, -0.1, "other sign"),
        ([1.0, 3.0], 2.0, 0.0, "other sign"),
        ([-3.0, -1.0], -2.0, -9.0, "same sign"),
        ([-1.0, 3.0], 1.0, 5.0, "not clear"),
        ([0.0, 0.0], 0.0, 0.0, "not clear"),
        (None, 1.0, 5.0, "not clear"),
    ],
)
def test_a_verdict_needs_an_interval_without_0(
    limits: list[float] | None, difference_: float, simulated: float, verdict: str
) -> None:
    """Only where reality is clear is the simulator right or wrong; no difference at all is wrong."""
    real = {"interval": limits, "difference": difference_}
    assert agreement(real, {"difference": simulated}) == verdict


def test_one_side_alone_has_no_verdict() -> None:
    """Without real runs, or without a simulation, nothing is judged."""
    assert difference([], (1.0, 2.0))["verdict"] is None
    assert difference([(1.0, 2.0)], None)["verdict"] is None
    assert difference([(None, 2.0)], None)["real"] is None


def test_the_shipped_pairs_can_all_be_run() -> None:
    """experiments/ab_pairs.yaml holds at least eight pairs of sides that exist and differ."""
    pairs, repeat, config = read_pairs(str(ROOT / "experiments" / "ab_pairs.yaml"), Config())
    assert len(pairs) >= 8
    assert repeat is not None
    assert Path(str(config.trace)).is_file()
    assert all(pair.sides[0] != pair.sides[1] and pair.metric in METRICS for pair in pairs)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pears: []\n", "unknown key pears; did you mean pairs"),
        ("pairs: []\n", "must list pairs"),
        ("pairs: [{name: x, a: fcfs}]\n", "Pair 1 in .* must have name, a and b"),
        ("pairs: [{name: ../x, a: fcfs, b: sjf}]\n", "needs a name of its own"),
        ("pairs: [{name: x, a: fcfs, b: sjf}, {name: x, a: fcfs, b: sjf}]\n", "Pair 2 .* needs a name of its own"),
        ("pairs: [{name: x, a: fcfs, b: sjf, metric: e2e}]\n", "no metric e2e"),
        ("repeat: 0\npairs: [{name: x, a: fcfs, b: sjf}]\n", "repeat in .* must be a whole number of 1"),
        ("options: {blocks: 1}\npairs: [{name: x, a: fcfs, b: sjf}]\n", "unknown option blocks"),
    ],
)
def test_a_pairs_file_that_cannot_be_is_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    """What is wrong with a file of pairs is said in one sentence."""
    path = tmp_path / "pairs.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=reason):
        read_pairs(str(path), Config())


WORKLOAD = """
kind: synthetic
num_requests: 16
seed: 1
arrival: {process: constant, rate_per_s: 2000}
prompt_tokens: {dist: uniform, low: 8, high: 40}
output_tokens: {dist: uniform, low: 2, high: 24}
tenants: 2
priorities: 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workload that comes at once, and a calibration of the tiny model."""
    path = tmp_path_factory.mktemp("ab")
    (path / "w.yaml").write_text(WORKLOAD)
    profile = ["--model", "tiny", "--num-gpu-blocks-override", "64", "--max-model-len", "128", "--max-num-seqs", "4"]
    profile += ["--max-num-batched-tokens", "64", "--time-budget-s", "6"]
    assert main(["profile", *profile, "--out", str(path / "p.parquet")]) == 0
    assert main(["calibrate", str(path / "p.parquet"), "--out", str(path / "c.json")]) == 0
    return path


def command(folder: Path, *more: str) -> list[str]:
    options = ["--model", "tiny", "--num-gpu-blocks-override", "24", "--max-model-len", "128", "--max-num-seqs", "4"]
    options += ["--max-num-batched-tokens", "64", "--calibration", str(folder / "c.json")]
    return ["ab", *options, *more]


def test_two_sides_in_both_worlds_and_once_more(folder: Path, tmp_path: Path) -> None:
    """ab.json has every metric of both; the same command again runs nothing, and more repeats run only what is new."""
    out = tmp_path / "out"
    words = command(folder, "--trace", str(folder / "w.yaml"), "--a", "fcfs", "--b", "sjf-oracle", "--out", str(out))
    assert main([*words, "--repeat", "2"]) == 0
    content = json.loads((out / "ab.json").read_text())
    pair = content["pairs"][0]
    assert set(pair["metrics"]) == set(METRICS)
    assert pair["metrics"]["e2e_s.mean"]["pairs"] == 2
    assert pair["metrics"]["e2e_s.mean"]["simulated"]["difference"] < 0
    assert pair["options"] == {"scheduling_policy": ["fcfs", "sjf-oracle"]}
    assert (out / "ab.png").stat().st_size > 1000
    summary = json.loads((out / "real-a-1" / "summary.json").read_text())
    assert value_of(summary, "hit_share") is not None
    before = {path: path.stat().st_mtime_ns for path in out.glob("real-*/summary.json")}
    assert len(before) == 4
    assert main([*words, "--repeat", "3"]) == 0
    after = {path: path.stat().st_mtime_ns for path in out.glob("real-*/summary.json")}
    assert len(after) == 6
    assert all(after[path] == when for path, when in before.items())


def test_a_file_of_pairs_in_the_simulator_alone(folder: Path, tmp_path: Path) -> None:
    """--pairs with --where sim: one entry a pair, simulated only, and no verdicts."""
    pairs = tmp_path / "pairs.yaml"
    pairs.write_text(
        f"trace: {folder / 'w.yaml'}\npairs:\n"
        "  - {name: one, a: mixed, b: static}\n  - {name: two, a: default, b: block_size=8, metric: ttft_s.mean}\n"
    )
    assert main(command(folder, "--pairs", str(pairs), "--where", "sim", "--out", str(tmp_path / "out"))) == 0
    content = json.loads((tmp_path / "out" / "ab.json").read_text())
    assert [pair["name"] for pair in content["pairs"]] == ["one", "two"]
    assert content["summary"] == {"pairs": 2, "clear": 0, "same_sign": 0, "other_sign": 0}
    one = content["pairs"][0]["metrics"]["e2e_s.mean"]
    assert one["real"] is None
    assert one["simulated"]["difference"] > 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--a", "fcfs"], "needs --a and --b, or --pairs"),
        (["--a", "fcfs", "--b", "sjf", "--pairs", "x.yaml"], "either --a and --b or --pairs"),
        (["--a", "fcfs", "--b", "sjf", "--where", "moon"], "--where takes sim, engine"),
        (["--a", "fcfs", "--b", "sjf", "--repeat", "0"], "--repeat must be at least 1"),
        (["--a", "fcfs", "--b", "nowhere.py:Mine"], "there is no file nowhere.py"),
        (["--a", "fcfs", "--b", "watermark=2"], "watermark must be"),
        (["--a", "fcfs", "--b", "sjf", "--metric", "ttft"], "There is no metric ttft"),
    ],
)
def test_bad_words_are_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    """Whatever cannot be is said before anything runs, with exit code 2."""
    trace = ["--trace", str(folder / "w.yaml"), "--out", str(tmp_path / "out")]
    assert main(command(folder, *trace, *words)) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_engine_and_simulator_call_a_configuration_the_same(tmp_path: Path) -> None:
    """A calibration made with a config.json fits the simulation of that file, whatever it is called."""
    from engine.exec.weights import load_model
    from sim.models import load_model as spec_of

    text = (ROOT / "experiments" / "ab_model.json").read_text(encoding="utf-8")
    for name in ("ab_model.json", "config.json"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        assert load_model(path, "dummy").name == spec_of(path).name
