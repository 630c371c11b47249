"""The demo, cut down to seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.exec import DownloadError
from engine.exec.llm import LLM
from experiments import demo
from experiments.cli import main


def test_the_demo_runs_without_a_network_and_uses_its_profile_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says that the default model is missing, ends with a page, and a second time does not profile again."""

    def offline(model: Any = "smollm2", **options: Any) -> LLM:
        if model == "smollm2":
            raise DownloadError("the default model could not be downloaded: there is no network")
        return LLM(model=model, **options)

    monkeypatch.setattr(demo, "LLM", offline)
    monkeypatch.setattr(demo, "OPTIONS", {**demo.OPTIONS, "time_budget_s": 5.0})
    monkeypatch.setattr(demo, "RUN_SECONDS", 0.5)
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out)]) == 0
    first = capsys.readouterr()
    assert "could not be downloaded" in first.err
    content = json.loads((out / "compare.json").read_text())
    assert content["num_real_runs"] == 3
    assert content["decision_differences"] == 0
    page = (out / "index.html").read_text()
    assert "tiny random model" in page
    assert page.count("data:image/png;base64,") == 3
    assert "TTFT mean" in first.out
    profile = (out / "profile.parquet").read_bytes()

    assert main(["demo", "--out", str(out)]) == 0
    assert "used again" in capsys.readouterr().err.replace("\n", " ")
    assert (out / "profile.parquet").read_bytes() == profile
