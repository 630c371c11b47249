"""The list of parts that a GPU is validated by: order, budget, faults, and what is written when."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from experiments.errors import UsageError  # noqa: E402
from experiments.gpu_validation import Part, Validation, main, run_parts  # noqa: E402


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def validation(tmp_path, budget, clock, smoke=False):
    return Validation(tmp_path, smoke, torch.device("cpu"), budget, clock)


def test_parts_run_by_value_within_the_budget_and_faults_stay_alone(tmp_path):
    """The most valuable comes first; what no longer fits is left out, smaller parts behind it run, a fault is told."""
    clock, order = Clock(), []

    def part(name, value, cost, takes=None, error=None):
        def run(v):
            content = json.loads((tmp_path / "validation.json").read_text()) if order else {"parts": []}
            assert [entry["name"] for entry in content["parts"] if entry["status"] != "skipped"] == order
            order.append(name)
            clock.now += cost if takes is None else takes
            if error is not None:
                raise error
            return {"seen": sorted(v.found)}

        return Part(name, value, cost, run)

    parts = [
        part("last", 1, 5),
        part("first", 9, 10, takes=30),
        part("broken", 8, 10, error=UsageError("It is broken")),
        part("faulty", 7, 5, error=ZeroDivisionError("of ours")),
        part("large", 6, 60),
        part("small", 5, 10),
    ]
    entries = run_parts(parts, validation(tmp_path, 70.0, clock), lambda text: None)
    assert order == ["first", "broken", "faulty", "small", "last"]
    by_name = {entry["name"]: entry for entry in entries}
    assert by_name["broken"]["sentence"] == "It is broken."
    assert by_name["faulty"]["sentence"] == "ZeroDivisionError: of ours"
    assert by_name["large"]["status"] == "skipped"
    assert by_name["large"]["sentence"] == "It takes about 60 s, and 25 s of the budget are left."
    assert by_name["small"]["result"] == {"seen": ["first"]}
    assert json.loads((tmp_path / "validation.json").read_text()) == {
        "smoke": False,
        "device": "cpu",
        "complete": True,
        "parts": entries,
    }


def test_an_interrupted_run_leaves_a_whole_file(tmp_path):
    """Ctrl-C ends the part that runs; the others are listed as left out, and the file says that it is not complete."""

    def interrupted(v):
        raise KeyboardInterrupt

    parts = [Part("a", 3, 1, lambda v: {"x": 1}), Part("b", 2, 1, interrupted), Part("c", 1, 1, lambda v: {})]
    run_parts(parts, validation(tmp_path, 100.0, Clock()), lambda text: None)
    content = json.loads((tmp_path / "validation.json").read_text())
    assert [entry["status"] for entry in content["parts"]] == ["done", "failed", "skipped"]
    assert content["complete"] is False


def test_without_a_gpu_the_command_says_so(tmp_path, capsys):
    """Without --smoke and without a CUDA GPU it ends with exit code 2 and one line that names --smoke."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU here")
    assert main(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert "no CUDA GPU" in error
    assert "--smoke" in error
    assert len(error.splitlines()) == 1


def test_a_part_that_is_not_there_is_named(tmp_path, capsys):
    """--only with another name lists the parts."""
    assert main(["--out", str(tmp_path), "--smoke", "--only", "atention"]) == 2
    assert "there is no part 'atention'; choose from device, kernels, attention" in capsys.readouterr().err


def test_the_parts_about_kernels_and_block_moves_run_on_a_cpu(tmp_path):
    """With tiny sizes they end without a fault, and write tables that can be read."""
    code = main(["--out", str(tmp_path), "--smoke", "--only", "device", "kernels", "swap", "async"])
    content = json.loads((tmp_path / "validation.json").read_text())
    assert {entry["name"]: entry["status"] for entry in content["parts"]} == dict.fromkeys(
        ("device", "kernels", "async", "swap"), "done"
    )
    assert code == 0
    errors = pq.read_table(tmp_path / "kernels.parquet").to_pydict()
    assert all(error <= bound for error, bound in zip(errors["error"], errors["bound"], strict=True))
    assert len(errors["error"]) == 14
