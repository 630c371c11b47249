"""`kvtwin simulate --oom`: what it prints and writes, and what it needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.core.presets import SchedulerConfig
from experiments.cli import main
from experiments.config import Config
from experiments.errors import UsageError
from experiments.oom import guard_of

TRACE = """
kind: synthetic
num_requests: 30
arrival: {process: constant, rate_per_s: 2}
prompt_tokens: {dist: uniform, low: 20000, high: 28000}
output_tokens: {dist: fixed, value: 20}
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.yaml"
    path.write_text(TRACE)
    return str(path)


def test_the_batch_that_did_it_is_named(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A score matrix ends the engine; the summary has the batch, and the terminal says who died with it."""
    words = ["simulate", "--trace", trace, "--model", "mistral-7b", "--hardware", "a100-80g", "--oom", "crash"]
    assert main([*words, "--attention-backend", "eager", "--out", str(tmp_path / "eager")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "ended the engine and" in said
    assert "GiB for attention" in said
    found = json.loads((tmp_path / "eager" / "summary.json").read_text())["oom"]
    assert found["crashed"]
    assert found["num_events"] == 1
    assert found["lost_requests"] > 0
    assert found["events"][0]["prefills"]
    assert main([*words, "--out", str(tmp_path / "flash")]) == 0
    assert "Every step fitted" in capsys.readouterr().out
    assert json.loads((tmp_path / "flash" / "summary.json").read_text())["oom"]["num_events"] == 0


def test_profiled_transients_take_room_from_the_pool(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --profile-transients the pool is smaller and nothing runs out."""
    words = ["simulate", "--trace", trace, "--model", "mistral-7b", "--hardware", "a100-80g", "--oom", "report"]
    words += ["--attention-backend", "eager", "--json"]
    found = []
    for more in ([], ["--profile-transients"]):
        assert main([*words, *more, "--out", str(tmp_path / f"run{len(found)}")]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["oom"]["num_events"] > 0
    assert found[1]["oom"]["num_events"] == 0
    assert found[1]["kv_blocks"] < found[0]["kv_blocks"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hardware", "h100", "--attention-backend", "eager"], "add --oom crash"),
        (["--hardware", "h100", "--oom", "sometimes"], "--oom must be one of"),
        (["--hardware", "h100", "--oom", "crash", "--prompt-logprobs", "2"], "--prompt-logprobs must be"),
    ],
)
def test_bad_options_are_one_sentence(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """What cannot be checked, or is asked without the check, is refused by name."""
    assert main(["simulate", "--trace", trace, "--model", "mistral-7b", "--out", str(tmp_path / "o"), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_check_needs_a_device() -> None:
    """Without --hardware there is no memory that could run out."""
    options = SchedulerConfig(num_blocks=10, max_model_len=100)
    with pytest.raises(UsageError, match="--oom needs --hardware"):
        guard_of(Config(oom="crash"), options)
    assert guard_of(Config(), options) is None
