"""The parts of `experiments.gpu_validation` that run the engine, its peers and its twin."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.exec.copies import measure_copies
from engine.exec.llm import LLM
from engine.exec.runner import layout_on
from engine.exec.sampler import SamplingParams
from engine.exec.weights import LoadedModel
from engine.models.config import DecoderConfig
from experiments.errors import UsageError
from experiments.gpu_validation import Validation
from experiments.gputime import time_ns
from kernels.attention import layout_step

__all__ = ["async_part", "equality_part", "graphs_part", "swap_part", "throughput_part", "twin_part"]

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Logits of the reference that are so close may change places by rounding."""
POLICIES = ("fcfs", "sjf-oracle", "sjf-predicted", "lpm", "fair", "aging")


@contextlib.contextmanager
def _models(v: Validation, shape: dict[str, int], dtype: torch.dtype, **options: Any) -> Iterator[tuple[Any, LLM]]:
    """The same random weights in transformers and in the engine."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise UsageError("transformers is not installed here, so there is nothing to compare with") from None
    fields: dict[str, Any] = {**shape, "eos_token_id": None, "bos_token_id": None, "tie_word_embeddings": False}
    config = LlamaConfig(**fields, dtype=dtype)
    torch.manual_seed(0)
    with v.device:
        model: Any = LlamaForCausalLM(config)
        model = model.to(dtype).eval()
    loaded = LoadedModel("random", DecoderConfig.from_hf(_described(config)), model.state_dict(), None)
    name = str(dtype).removeprefix("torch.")
    llm = LLM("random", loaded, dtype=name, device=v.device.type, **options)
    try:
        yield model, llm
    finally:
        llm.close()
        del model, llm, loaded
        gc.collect()
        if v.device.type == "cuda":
            torch.cuda.empty_cache()


def _described(config: Any) -> dict[str, Any]:
    content: dict[str, Any] = config.to_dict()
    return content | {"architectures": ["LlamaForCausalLM"]}


def _prompts(vocab: int, count: int, low: int, high: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, vocab, int(n)).tolist() for n in np.geomspace(low, high, count)]


def equality_part(v: Validation) -> dict[str, Any]:
    """Greedy tokens of the engine against transformers' logits along the same text: a small model, and one of 8B."""
    found = {"small": _equality(v, SMALL, torch.float32, 8, 24)}
    if not v.smoke:
        found["llama 8B shape"] = _equality(v, LLAMA_8B, torch.bfloat16, 8, 48)
    wrong = {name: one["wrong"] for name, one in found.items() if one["wrong"]}
    if wrong:
        raise UsageError(f"tokens that transformers puts clearly behind another: {wrong}")
    return found


def _equality(v: Validation, shape: dict[str, int], dtype: torch.dtype, count: int, tokens: int) -> dict[str, Any]:
    with _models(v, shape, dtype, num_gpu_blocks_override=256, max_num_batched_tokens=256, max_num_seqs=16) as (
        model,
        llm,
    ):
        prompts = _prompts(shape["vocab_size"], count, 8, 120 if v.smoke else 300)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        equal = ties = wrong = 0
        for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
            ours = result.outputs[0].token_ids
            with torch.inference_mode():
                text = torch.tensor([prompt + ours[:-1]], device=v.device)
                logits = model(text, logits_to_keep=tokens).logits[0].float()
            best = logits.max(-1)
            behind = best.values - logits[torch.arange(tokens), ours]
            same = best.indices.cpu() == torch.tensor(ours)
            equal += int(same.sum())
            near = ~same & (behind.cpu() <= NEAR_TIE[dtype])
            ties += int(near.sum())
            wrong += tokens - int(same.sum()) - int(near.sum())
    return {"tokens": count * tokens, "equal": equal, "near_ties": ties, "wrong": wrong}


def throughput_part(v: Validation) -> dict[str, Any]:
    """Output tokens a second of the engine, of transformers' static generate and of its continuous batching."""
    shape, dtype = (SMALL, torch.float32) if v.smoke else (LLAMA_8B, torch.bfloat16)
    count, length, tokens = (8, 24, 12) if v.smoke else (64, 256, 128)
    with _models(v, shape, dtype, num_gpu_blocks_override=64 if v.smoke else 4096) as (model, llm):
        prompts = [np.random.default_rng(i).integers(0, shape["vocab_size"], length).tolist() for i in range(count)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.generate(prompts[:2], params)
        found: dict[str, Any] = {"kvtwin": _rate(v, lambda: llm.generate(prompts, params), count * tokens)}
        batch = torch.tensor(prompts, device=v.device)

        def static() -> None:
            with torch.inference_mode():
                model.generate(batch, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)

        found["transformers, static"] = _rate(v, static, count * tokens)
        try:
            found["transformers, continuous"] = _rate(v, lambda: _continuous(model, prompts, tokens), count * tokens)
        except Exception as error:  # noqa: BLE001 (it has no CPU path in some releases)
            found["transformers, continuous"] = None
            found["note"] = f"generate_batch did not run: {' '.join(str(error).split())[:200]}"
    for peer in ("static", "continuous"):
        theirs = found[f"transformers, {peer}"]
        found[f"times {peer}"] = found["kvtwin"] / theirs if theirs else None
    return found


def _continuous(model: Any, prompts: list[list[int]], tokens: int) -> None:
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    config = make(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    made = sum(len(output.generated_tokens) for output in outputs.values())
    if made != len(prompts) * tokens:
        raise UsageError(f"it made {made} tokens of {len(prompts) * tokens}")


def _rate(v: Validation, call: Any, tokens: int) -> float:
    began = time.perf_counter()
    call()
    if v.device.type == "cuda":
        torch.cuda.synchronize()
    return float(tokens / (time.perf_counter() - began))


def async_part(v: Validation) -> dict[str, Any]:
    """Two steps in flight against one: the same tokens, and how long both take."""
    seconds: dict[str, float] = {}
    outputs: dict[str, list[list[int]]] = {}
    # In turn, and the best of each: whoever comes first pays for what a process does once.
    for name, two in (("one step in flight", False), ("two steps in flight", True)) * 3:
        llm = LLM(
            "tiny",
            dtype="float32",
            device=v.device.type,
            num_gpu_blocks_override=96,
            max_model_len=256,
            async_scheduling=two,
        )
        prompts = _prompts(256, 24, 8, 64)
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
        llm.generate(prompts[:2], params)
        began = time.perf_counter()
        outputs[name] = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
        seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - began)
        llm.close()
    one, two_steps = outputs.values()
    different = sum(a != b for a, b in zip(one, two_steps, strict=True))
    if different:
        raise UsageError(f"{different} of {len(one)} outputs differ with two steps in flight")
    slow, fast = seconds.values()
    return {"seconds": seconds, "gain": slow / fast, "different_outputs": different}


def twin_part(v: Validation) -> dict[str, Any]:
    """Profile, calibration, served traces and their simulations: decisions, times, and the order of six policies."""
    from experiments.cli import main as kvtwin

    out = v.out / "twin"
    out.mkdir(parents=True, exist_ok=True)
    trace = out / "trace.yaml"
    requests, rate = (12, 200) if v.smoke else (400, 400)
    trace.write_text(
        f"kind: synthetic\nnum_requests: {requests}\nseed: 5\narrival: {{process: poisson, rate_per_s: {rate}}}\n"
        "prompt_tokens: {dist: uniform, low: 8, high: 60}\noutput_tokens: {dist: uniform, low: 4, high: 60}\n"
        "prefix: {num_prefixes: 3, tokens: 40, share: 0.8}\n",
        encoding="utf-8",
    )
    engine = ["--model", "tiny", "--num-gpu-blocks-override", "60", "--max-num-seqs", "24"]
    engine += ["--max-num-batched-tokens", "192"]
    device = ["--device", v.device.type]
    profile, calibration = out / "profile.parquet", out / "calibration.json"
    profile.unlink(missing_ok=True)

    def run(*arguments: str) -> None:
        log_file = (out / "log.txt").open("a", encoding="utf-8")
        with log_file as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            code = kvtwin(list(arguments))
        if code:
            raise UsageError(f"kvtwin {arguments[0]} ended with {code}; {out / 'log.txt'} says why")

    budget = "3" if v.smoke else "60"
    run("profile", *engine, *device, "--time-budget-s", budget, "--out", str(profile))
    run("calibrate", str(profile), "--out", str(calibration))
    means: dict[str, list[float]] = {"real": [], "simulated": []}
    decisions = {}
    served: list[str] = []
    for policy in POLICIES:
        if served and v.left_s() < 0:
            break
        options = [*engine, "--trace", str(trace), "--scheduling-policy", policy]
        real, simulated = out / f"{policy}-real", out / f"{policy}-simulated"
        run("run", *options, *device, "--out", str(real))
        run("simulate", *options, "--calibration", str(calibration), "--no-bands", "--out", str(simulated))
        run("compare", str(real), str(simulated), "--decisions", "--out", str(out / f"{policy}-compared"))
        content = json.loads((out / f"{policy}-compared" / "compare.json").read_text(encoding="utf-8"))
        decisions[policy] = content["decision_differences"]
        for side, folder in (("real", real), ("simulated", simulated)):
            means[side].append(_mean_latency(folder))
        served.append(policy)
        v.table(
            "policies",
            [
                {"policy": name, "real_s": means["real"][i], "simulated_s": means["simulated"][i]}
                for i, name in enumerate(served)
            ],
        )
    # Where the simulation sees no difference, it puts nobody first.
    pairs = [(a, b) for a, b in combinations(range(len(served)), 2) if means["simulated"][a] != means["simulated"][b]]
    agree = sum(
        (means["real"][a] < means["real"][b]) == (means["simulated"][a] < means["simulated"][b]) for a, b in pairs
    )
    return {
        "policies": served,
        "mean_latency_s": means,
        "error": [s / r - 1 for r, s in zip(means["real"], means["simulated"], strict=True)],
        "decision_differences": decisions,
        "pairs_in_the_same_order": agree,
        "pairs_that_the_simulation_orders": len(pairs),
    }


def _mean_latency(folder: Path) -> float:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return float(summary["e2e_s"]["mean"])


def graphs_part(v: Validation) -> dict[str, Any]:
    """A decode step as one CUDA graph against the same step launched kernel by kernel."""
    llm = LLM("tiny", dtype="float32", device=v.device.type, num_gpu_blocks_override=96, max_model_len=256)
    engine = llm.engine
    rows = [(40 + i, np.arange(4 * i, 4 * i + 4)) for i in range(8)]
    layout = layout_on(v.device, layout_step(rows, [], engine.cache.block_size, engine.cache.padding_block))
    tokens = torch.zeros(8, dtype=torch.int64, device=v.device)

    def step() -> torch.Tensor:
        return engine.decoder.logits(engine.decoder.forward(tokens, layout, engine.cache))

    with torch.inference_mode():
        eager = time_ns(step, v.device)
        if v.device.type != "cuda":
            return {"eager_ns": eager, "graph_ns": None, "note": "a CPU has no CUDA graphs"}
        graph = torch.cuda.CUDAGraph()
        expected = step()
        with torch.cuda.graph(graph):
            logits = step()
        replayed = time_ns(graph.replay, v.device)
        if not torch.allclose(logits, expected, rtol=1e-4, atol=1e-5):
            raise UsageError("the replayed graph has other logits than the step that it records")
    llm.close()
    return {"eager_ns": eager, "graph_ns": replayed, "gain": eager / replayed}


def swap_part(v: Validation) -> dict[str, Any]:
    """Block moves to and from the host and within the device, in batches."""
    llm = LLM("tiny", dtype="float32", device=v.device.type, num_gpu_blocks_override=96, max_model_len=256)
    entries = measure_copies(llm.engine.cache, repeats=2 if v.smoke else 9)
    llm.close()
    v.table("swap", entries)
    return {"copies": entries}
