"""The simulator against a real engine: 300 requests that vLLM 0.19 served on an RTX 4090, its KV cache saturated."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from engine.core.presets import SchedulerConfig, preset
from experiments.config import Config
from experiments.rundir import RealRun, read_run
from experiments.validate import Basis, basis_of, compare_run, predict
from sim import models
from sim.hardware import device
from sim.simulate import SimResult, simulate
from sim.steptime import roofline
from traces import Trace

BLOCKS = 2587


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    return shared_data / "vllm_rtx4090_llama3.1_8b"


@pytest.fixture(scope="module")
def served(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "requests.csv")


@pytest.fixture(scope="module")
def run(folder: Path) -> RealRun:
    return read_run(folder)


@pytest.fixture(scope="module")
def trace(run: RealRun) -> Trace:
    """What the engine got, and which blocks of the prompts are equal."""
    return run.trace


@pytest.fixture(scope="module")
def options() -> SchedulerConfig:
    return SchedulerConfig(num_blocks=BLOCKS, max_model_len=32768, steps_in_flight=2, **preset("vllm-0.19"))


def errors(result: SimResult, served: pd.DataFrame) -> dict[str, float]:
    """Relative errors of the means (from queued on), and the mean error of single requests but for the first five."""
    ours = pd.DataFrame(result.requests()).sort_values("row").reset_index(drop=True)
    tokens = served["output_tokens"] - 1
    theirs = {
        "ttft": served["first_token_s"] - served["queued_s"],
        "tpot": (served["last_token_s"] - served["first_token_s"]) / tokens,
        "latency": served["last_token_s"] - served["queued_s"],
    }
    mine = {
        "ttft": (ours["first_token_ns"] - ours["queued_ns"]) / 1e9,
        "tpot": (ours["finish_ns"] - ours["first_token_ns"]) / 1e9 / tokens,
        "latency": (ours["finish_ns"] - ours["queued_ns"]) / 1e9,
    }
    found = {name: mine[name].mean() / theirs[name].mean() - 1 for name in mine}
    found |= {f"single_{name}": (mine[name] / theirs[name] - 1)[5:].abs().mean() for name in mine}
    return found | {"preemptions": int(ours["num_preemptions"].sum())}


def report_of(run: RealRun, basis: Basis) -> dict[str, float]:
    """What validate.json says, in percent: errors of means (from queued on), and of single requests."""
    report = compare_run(run, basis, predict(run, basis), bands=False)
    found = {
        name: report["metrics"][column]["mean"]["error_pct"]
        for name, column in (("ttft", "ttft_queued_s"), ("tpot", "tpot_s"), ("latency", "e2e_queued_s"))
    }
    found["single_ttft"] = report["per_request_mape_pct"]["ttft_queued_s"]
    found["single_latency"] = report["per_request_mape_pct"]["e2e_queued_s"]
    return found | {name: report[name] for name in ("num_preemptions", "running_mean_abs_error", "kv_blocks")}


def test_kernel_tables_predict_the_run(run: RealRun) -> None:
    """With the tables of that GPU, the recorded blocks and nothing fitted to the run: means within 1.5 %, single
    latencies within 1.5 % and first tokens within 5 %, 180 to 215 preemptions."""
    found = report_of(run, basis_of(run, Config()))
    assert found["kv_blocks"] == BLOCKS
    assert max(abs(found[name]) for name in ("ttft", "tpot", "latency")) < 1.5
    assert found["single_latency"] < 1.5
    assert found["single_ttft"] < 5
    assert 180 <= found["num_preemptions"] <= 215
    assert found["running_mean_abs_error"] < 1.0


def test_six_terms_fitted_on_a_sweep_predict_the_run(run: RealRun) -> None:
    """With a sweep of at most 300 batches of those tables: TPOT within 3 %, TTFT within 4 %, latency in between, single
    requests within 5 %, 180 to 215 preemptions."""
    basis = basis_of(run, Config(), form="six-terms")
    assert "calibrated on" in basis.step_time.label
    found = report_of(run, basis)
    assert abs(found["tpot"]) < 3
    assert abs(found["ttft"]) < 4
    assert abs(found["latency"]) < 4
    assert found["single_ttft"] < 5
    assert 180 <= found["num_preemptions"] <= 215


def test_the_roofline_is_as_far_off_as_it_says(served: pd.DataFrame, trace: Trace, options: SchedulerConfig) -> None:
    """From the device's description alone, every mean lies within the 27 % that the label admits."""
    model = roofline(models.preset("llama-3.1-8b"), device("rtx4090"))
    found = errors(simulate(trace, options, model), served)
    assert max(abs(found[name]) for name in ("ttft", "tpot", "latency")) < 0.27


def test_one_step_in_flight_would_be_wrong(served: pd.DataFrame, trace: Trace, options: SchedulerConfig) -> None:
    """The engine kept two steps in flight; simulated so, a request's first token comes later than with one."""
    model = roofline(models.preset("llama-3.1-8b"), device("rtx4090"))
    synchronous = SchedulerConfig(num_blocks=BLOCKS, max_model_len=32768, steps_in_flight=1, **preset("vllm-0.19"))
    early = pd.DataFrame(simulate(trace.head(20), synchronous, model).requests())
    late = pd.DataFrame(simulate(trace.head(20), options, model).requests())
    waits = [(table["first_token_ns"] - table["queued_ns"]).median() for table in (early, late)]
    assert waits[0] < 0.95 * waits[1]
