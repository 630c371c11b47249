"""`kvtwin plan`: the budget from options or from a pasted command line, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from experiments.cli import main
from experiments.errors import UsageError
from experiments.serveline import read_serve_line


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_options_and_a_pasted_line_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """A line, quoted or behind --, gives the plan that its options give; the command's own options win."""
    plain = planned(capsys, "--model", "llama-3.1-8b", "--hardware", "rtx4090", "--max-model-len", "32768")
    line = "VLLM_USE_V1=1 vllm serve meta-llama/Llama-3.1-8B --port 8000 --max-model-len 32K"
    quoted = planned(capsys, line, "--hardware", "rtx4090")
    behind = planned(capsys, "--hardware", "rtx4090", "--json", "--", *line.split()[1:])
    assert plain == quoted == behind
    assert plain["vllm_num_gpu_blocks"] == plain["kv_blocks"] + 1  # type: ignore[operator]
    assert plain["kv_tokens"] == 16 * plain["kv_blocks"]  # type: ignore[operator]
    assert plain["verdict"] == "starts"
    assert {"weights", "activations", "context", "graphs", "kv_cache", "headroom"} <= set(plain["budget_bytes"])  # type: ignore[call-overload]
    smaller = planned(capsys, line, "--hardware", "rtx4090", "--max-model-len", "8192")
    assert smaller["options"]["max_model_len"] == 8192  # type: ignore[index]


def test_a_refusal_has_vllms_words_and_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    """29,000 tokens on an RTX 3090 are refused; the advice names the lengths that start, on both sides."""
    words = ("--model", "llama-3.1-8b", "--hardware", "rtx3090", "--vllm-version", "0.6.4", "--max-model-len", "29000")
    found = planned(capsys, *words, "--max-num-seqs", "8")
    assert found["verdict"] == "refused"
    assert "max seq len (29000) is larger" in str(found["error"])
    advice = " ".join(found["advice"])  # type: ignore[arg-type]
    assert "from 32,769" in advice
    assert "--gpu-memory-utilization" in advice
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert "Refused: The model's max seq len" in shown
    assert "rotary_tables" in shown


def test_concurrency_at_given_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    """Short requests are limited by max_num_seqs, long ones by KV."""
    found = planned(
        capsys, "--model", "llama-3-8b", "--hardware", "a100-80g", "--lengths", "100,8000", "--vllm-version", "0.33"
    )
    assert [entry["limited_by"] for entry in found["concurrency"]] == ["max_num_seqs", "kv"]  # type: ignore[union-attr]
    assert found["options"]["gpu_memory_utilization"] == 0.92  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs --model"),
        (["--model", "llama-3-8b"], "needs --hardware"),
        (["--model", "llama-3-8b", "--hardware", "rtx4900"], "rtx4090"),
        (["--model", "lama-3-8b", "--hardware", "h100"], "llama-3-8b"),
        (["--model", "llama-3-8b", "--hardware", "h100", "--vllm-version", "new"], "'new' is no version"),
        (["--model", "llama-3-8b", "--hardware", "h100", "--max-model-len", "9000"], "ends at 8192"),
        (["--model", "llama-3-8b", "--hardware", "h100", "--lengths", "many"], "--lengths takes numbers"),
        (["--model", "llama-3-8b", "--hardware", "h100", "--quantization", "int3"], "Unknown weight format"),
        (["llama-3-8b", "--hardware", "h100"], "begins with `vllm serve`"),
        (["vllm serve --port 1", "--hardware", "h100"], "names no model"),
        (["vllm serve llama-3-8b --max-num-seqs many", "--hardware", "h100"], "of the command line must be a whole"),
        (["vllm serve 'llama", "--hardware", "h100"], "cannot be read"),
        (["vllm serve llama-3-8b -dp many", "--hardware", "h100"], "--data-parallel-size must be"),
    ],
)
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    """Whatever is wrong, exit code 2 and one sentence that names it."""
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_lines_are_read_as_vllm_reads_them() -> None:
    """Short flags, =, switches, negations, sizes with units and older entry points."""
    found, ignored = read_serve_line(
        [
            "vllm serve m -tp 2 --max-model-len=32k --enforce-eager --no-enable-chunked-prefill -q awq --dtype half",
            "--api-key x",
        ]
    )
    assert found == {
        "model": "m",
        "tensor_parallel_size": "2",
        "max_model_len": "32000",
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "quantization": "awq",
        "dtype": "float16",
    }
    assert ignored == ["--api-key"]
    old, _ = read_serve_line(["python -m vllm.entrypoints.openai.api_server --model m --kv-cache-dtype fp8_e5m2"])
    assert old == {"model": "m", "kv_cache_dtype": "fp8"}
    with pytest.raises(UsageError, match="beside the model"):
        read_serve_line(["vllm", "serve", "a", "b"])


def test_planning_loads_no_torch() -> None:
    """A plan by vLLM's declared rules is arithmetic."""
    code = (
        "import sys; from experiments.cli import main;"
        "main(['plan', '--model', 'llama-3-8b', '--hardware', 'h100', '--json']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_experts_split_whole_over_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    """Two replicas of the attention with half of the experts each leave more KV than one device with all of them."""
    base = ("--model", "mixtral-8x7b", "--hardware", "h200", "--max-model-len", "8192")
    alone = planned(capsys, *base)
    shared = planned(capsys, *base, "--data-parallel-size", "2", "--enable-expert-parallel")
    line = planned(capsys, "vllm serve mixtral-8x7b -dp 2 -ep --max-model-len 8192", "--hardware", "h200")
    assert line == shared
    assert shared["weight_bytes"]["matrices"] < 0.6 * alone["weight_bytes"]["matrices"]  # type: ignore[index]
    assert shared["kv_blocks"] > alone["kv_blocks"]  # type: ignore[operator]


def test_the_engines_own_peak_may_stand_for_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    """Traced, Llama-3.1-8B keeps 148.5 KiB a token and not 108; all other terms stay."""
    pytest.importorskip("torch", reason="tracing runs the engine's models, which need torch")
    words = ("--model", "llama-3.1-8b", "--hardware", "h100")
    declared, traced = planned(capsys, *words), planned(capsys, *words, "--activations", "traced")
    layers = [found["peak_bytes"]["layers"] for found in (declared, traced)]  # type: ignore[index]
    assert (layers[1] - layers[0]) / 8192 / 1024 == pytest.approx(148.5 - 108, abs=1.5)
    assert declared["peak_bytes"]["sampler"] == traced["peak_bytes"]["sampler"]  # type: ignore[index]
