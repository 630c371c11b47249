"""What every experiment rests on: kept parts, checked usage, written files, missing data."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_results import toy_tables

from engine.core.errors import InvariantError
from engine.core.presets import SchedulerConfig
from experiments import experimentcmd
from experiments.cli import main
from experiments.config import Config
from experiments.experiment import Column, Context, ExperimentResult, Settled, Table, check_usage, shared_folder
from experiments.terminal import Terminal
from sim.hardware import device
from sim.models import preset
from sim.steptime import roofline
from traces import generate

SPEC = {
    "kind": "synthetic",
    "num_requests": 60,
    "seed": 3,
    "arrival": {"process": "poisson", "rate_per_s": 40},
    "prompt_tokens": {"dist": "uniform", "low": 10, "high": 90},
    "output_tokens": {"dist": "uniform", "low": 5, "high": 60},
    "prefix": {"num_prefixes": 2, "tokens": 40, "share": 0.5},
}


def context(tmp_path: Path, shared: Path | None = None, **options: Any) -> Context:
    """A context that writes to `tmp_path` and shows nothing."""
    return Context("toy", Config(**options), Terminal(quiet_stdout=True), tmp_path / "out", shared or tmp_path / "none")


def test_toy_usage_sums_to_the_pool() -> None:
    """The check passes where every step's parts sum to the pool, and counts the steps."""
    tables = toy_tables()
    assert check_usage(tables, 120) == len(tables.steps["step"])


@pytest.mark.parametrize(("name", "amount"), [("held", 1), ("cached", -1), ("external", 5)])
def test_one_slot_off_at_one_step_is_seen(name: str, amount: int) -> None:
    """A step whose parts do not sum to the pool ends the run with that step."""
    tables = toy_tables()
    column = np.array(tables.steps[name])
    column[7] += amount
    with pytest.raises(InvariantError, match=r"the usage of step 8 is .* slots of 1920 \(1 such\)"):
        check_usage(replace(tables, steps={**tables.steps, name: column}), 120)


def test_negative_parts_are_seen_though_they_sum() -> None:
    """A part below zero is a fault even where the sum is right."""
    tables = toy_tables()
    free, tail = np.array(tables.steps["free"]), np.array(tables.steps["tail"])
    tail[3] += free[3] + 1
    free[3] = -1
    with pytest.raises(InvariantError, match="step 4"):
        check_usage(replace(tables, steps={**tables.steps, "free": free, "tail": tail}), 120)


def test_usage_is_checked_within_fast_forwarded_runs(tmp_path: Path) -> None:
    """A simulation's steps are all checked, those within runs included, and counted in the manifest."""
    toy = context(tmp_path)
    step_time = roofline(preset("smollm2"), device("l4"))
    options = SchedulerConfig(num_blocks=60, max_model_len=2048)
    found, tables = toy.simulate("toy", generate(SPEC), options, step_time)
    steps = int(np.sum(tables.steps["num_steps"]))
    assert len(tables.steps["step"]) < steps  # there are runs
    assert toy.manifest()["usage_check"] == {
        "runs": 1,
        "steps": steps,
        "steps_by_run": {"toy": steps},
        "differences": 0,
    }
    broken = [list(takes) for takes in tables.steps["run_takes"]]
    at = next(i for i, takes in enumerate(broken) if len(takes) > 1 and tables.steps["num_steps"][i] > 1)
    broken[at] = [takes + 60 for takes in broken[at]]
    with pytest.raises(InvariantError):
        check_usage(replace(tables, steps={**tables.steps, "run_takes": broken}), 60)
    assert found.end_ns > 0


def test_a_part_is_computed_once(tmp_path: Path) -> None:
    """A second run reads a part that is as it was, with the checks and data that belong to it."""
    calls = []

    def compute(toy: Context) -> dict[str, Any]:
        calls.append(1)
        toy.check_usage("run", toy_tables(), 120)
        return {"value": (1, 2)}

    first = context(tmp_path)
    value = first.part("a", lambda: compute(first), size=8)
    again = context(tmp_path)
    assert again.part("a", lambda: compute(again), size=8) == value == {"value": [1, 2]}
    assert len(calls) == 1
    assert again.manifest() == first.manifest()
    assert again.manifest()["usage_check"]["runs"] == 1


def test_a_part_is_computed_again_when_something_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other inputs, another seed, other data or other code make a part invalid, and the run says which."""
    folder = tmp_path / "shared" / "data"
    folder.mkdir(parents=True)
    (folder / "numbers.txt").write_text("1")

    def part(toy: Context, **inputs: Any) -> str:
        return str(toy.part("a", lambda: toy.path("numbers.txt").read_text(), **inputs))

    def fresh(**options: Any) -> Context:
        return context(tmp_path, tmp_path / "shared", **options)

    assert part(fresh()) == "1"
    assert part(fresh(), size=9) == "1"
    assert "settings have changed" in capsys.readouterr().err
    part(fresh(seed=1), size=9)
    assert "options have changed" in capsys.readouterr().err
    (folder / "numbers.txt").write_text("2")
    from experiments import experiment

    experiment._digest_of.cache_clear()
    assert part(fresh(seed=1), size=9) == "2"
    assert "numbers.txt has changed" in capsys.readouterr().err.replace("\n", "")
    monkeypatch.setattr(experiment, "code_digest", lambda: "other")
    part(fresh(seed=1), size=9)
    assert "the code has changed" in capsys.readouterr().err.replace("\n", " ")


def test_a_damaged_part_is_computed_again(tmp_path: Path) -> None:
    """A part that cannot be read counts as none."""
    toy = context(tmp_path)
    toy.part("a", lambda: 1)
    (tmp_path / "out" / "parts" / "a.json").write_text("{")
    assert toy.part("a", lambda: 2) == 2


def run_toy(toy: Context) -> ExperimentResult:
    """An experiment of one table, one picture and one row."""
    table = Table("sizes", "Sizes", [Column("name"), Column("share", form=".1%")], [("a", 0.25), ("b", None)])
    row = Settled("B10", "does-not-follow", "0 presets", "another name", {"presets": 0})
    return ExperimentResult([table], {"dot": b"\x89PNG"}, {"share": 0.25}, [row], ["A sentence."])


@pytest.fixture
def toy_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts `run_toy` in the place of the arithmetic experiment."""
    import experiments.arithmetic

    monkeypatch.setattr(experiments.arithmetic, "run", run_toy)


@pytest.mark.usefixtures("toy_module")
def test_the_command_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables, pictures, summary, a complete manifest and the rows of the ledger; a second run gives the same bytes."""
    words = ["experiment", "arithmetic", "--out", str(tmp_path / "o"), "--claims", str(tmp_path / "c"), "--seed", "5"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "25.0%" in shown.out
    assert "A sentence." in shown.out
    assert "did not settle" in shown.err.replace("\n", " ")
    with open(tmp_path / "o" / "sizes.csv", newline="") as stream:
        assert list(csv.reader(stream)) == [["name", "share"], ["a", "0.25"], ["b", ""]]
    assert (tmp_path / "o" / "dot.png").read_bytes() == b"\x89PNG"
    manifest = json.loads((tmp_path / "o" / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["seed"] == 5
    row = json.loads((tmp_path / "c" / "B10.json").read_text())
    assert row["status"] == "does-not-follow"
    assert row["manifest"]["code"] == manifest["code"]
    assert row["theirs"] == "98 %"
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.name != "timing.json"}
    assert main(words) == 0
    assert all(path.read_bytes() == content for path, content in files.items())


@pytest.mark.usefixtures("toy_module")
def test_json_prints_the_summary_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json, standard output is summary.json."""
    words = ["experiment", "arithmetic", "--out", str(tmp_path / "o"), "--claims", str(tmp_path / "c"), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == {"share": 0.25}


def test_missing_data_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An experiment whose data is not there ends with exit code 2 and the fix; the manifest stays incomplete."""
    import experiments.arithmetic

    monkeypatch.setattr(experiments.arithmetic, "run", lambda toy: toy.trace("traces/none.csv"))
    (tmp_path / "shared").mkdir()
    words = ["experiment", "arithmetic", "--out", str(tmp_path / "o"), "--shared", str(tmp_path / "shared")]
    assert main(words) == 2
    assert "none.csv, which is not there; name the shared folder with --shared." in capsys.readouterr().err
    assert not json.loads((tmp_path / "o" / "manifest.json").read_text())["complete"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("experiment wast", "There is no experiment wast"),
        ("experiment arithmetic --shared no/such", "--shared no/such is not a folder."),
        ("experiment arithmetic --sed 4", "did you mean --seed"),
    ],
)
def test_bad_input_is_refused(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one sentence."""
    assert main(words.split()) == 2
    assert named in capsys.readouterr().err


def test_the_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name the command lists what there is, and every entry can be imported."""
    import importlib

    assert main(["experiment"]) == 0
    shown = capsys.readouterr().out
    for name, entry in experimentcmd.EXPERIMENTS.items():
        assert f" {name} " in shown
        assert callable(importlib.import_module(entry.module).run)


def test_the_shared_folder_is_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option ranks above the variable, the variable above the folder beside the checkout."""
    monkeypatch.setenv("KVTWIN_SHARED", str(tmp_path / "variable"))
    assert shared_folder(str(tmp_path)) == tmp_path
    assert shared_folder(None) == tmp_path / "variable"
    monkeypatch.delenv("KVTWIN_SHARED")
    assert shared_folder(None).name == "shared"
