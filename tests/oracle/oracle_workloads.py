"""Random workloads for the comparison with vLLM's schedulers: crowded pools, shared prefixes, follow-up turns."""

from __future__ import annotations

from random import Random
from typing import Any

from experiments.decisions import output_token

__all__ = ["workload"]

_LETTERS = (3, 7)
"""Few different tokens, so that prefixes meet by chance as well."""


def workload(number: int) -> dict[str, Any]:
    """Workload `number`: `{"config", "requests"}` (see experiments/decisions.py), always the same one."""
    draw = Random(f"oracle {number}")
    size = draw.choice([8, 16, 16, 16, 32])
    max_num_seqs = draw.choice([1, 2, 4, 8, 16, 32, 32, 32])
    config = {
        "block_size": size,
        "num_gpu_blocks": 1 + draw.choice([3, 5, 7, 11, 15, 15, 23]),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(max_num_seqs, draw.choice([16, 33, 64, 128, 512])),
        "max_model_len": draw.choice([256, 1024, 1024]),
        "enable_prefix_caching": draw.random() < 0.85,
    }
    if draw.random() < 0.2:
        config["long_prefill_token_threshold"] = draw.choice([5, 16, 40])
    if draw.random() < 0.2:
        config["watermark"] = draw.choice([0.02, 0.1, 0.2, 0.34])
    requests: list[dict[str, Any]] = []
    slots = (config["num_gpu_blocks"] - 1) * size
    roots = [_text(draw, draw.choice([size, 2 * size, 2 * size + 1, 3 * size - 1])) for _ in range(draw.randint(1, 3))]
    turn = 0
    for id in range(draw.randint(4, 16)):
        turn += draw.choice([0, 0, 0, 0, 1, 2, 5])
        request = _request(draw, id, turn, min(slots, config["max_model_len"]), size, roots, requests)
        # What it may take in all has to fit into the pool; more than the model's length is cut there, not refused.
        longest = min(len(request["prompt"]) + request["out"] - 1, config["max_model_len"])
        if longest <= slots and len(request["prompt"]) < config["max_model_len"]:
            requests.append(request)
    return {"config": config, "requests": requests}


def _text(draw: Random, num_tokens: int) -> list[int]:
    return [draw.randint(*_LETTERS) for _ in range(num_tokens)]


def _request(
    draw: Random,
    id: int,
    turn: int,
    room: int,
    size: int,
    roots: list[list[int]],
    earlier: list[dict[str, Any]],
) -> dict[str, Any]:
    kind = draw.random()
    if earlier and kind < 0.35:
        previous = draw.choice(earlier[-6:])
        num_outputs = min(previous["out"], previous.get("stop", previous["out"]))
        said = [output_token(previous, k) for k in range(num_outputs)]
        prompt = previous["prompt"] + said + _text(draw, draw.randint(1, 20))
    elif kind < 0.75:
        prompt = draw.choice(roots) + _text(draw, draw.choice([0, 1, draw.randint(0, 2 * size)]))
    else:
        prompt = _text(draw, draw.randint(1, 6 * size))
    # Half of what fits, so that several are about to run and cannot all go on.
    out = draw.choice([1, 2, size - 1, size, size + 1, draw.randint(1, 40), draw.randint(20, 70), room])
    out = max(1, min(out, room // 2 + 1, 120))
    prompt = prompt[: max(1, room - out + draw.choice([0, 1, 1]))]
    request: dict[str, Any] = {"id": id, "step": turn, "prompt": prompt, "out": out}
    if draw.random() < 0.25:
        request["stop"] = draw.randint(1, out)
    if draw.random() < 0.06:
        request["abort"] = turn + draw.randint(0, 30)
    return request
