"""vLLM's own scheduler, driven step by step, without a model: runs in the oracle's environment (see setup_oracle.py).

    PYTHONPATH=<unpacked vLLM> python vllm_side.py <folder with a model's config.json>

One JSON document a line, on standard input and output. First it says `{"vllm": version}`. Then it answers each
`{"config", "requests", "steps_in_flight"}` with the decisions of vLLM on that workload (`play`), and each
`{"bench": ...}` with times (`bench`). The layout is that of recorded decisions (experiments/decisions.py). Whatever
vLLM prints goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import deque
from statistics import median
from typing import Any

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = sys.argv[1]
HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)
END = 2
"""The stop token of every request."""
PASSED_ON = ("max_num_seqs", "max_num_batched_tokens", "watermark", "long_prefill_token_threshold")

_models: dict[int, ModelConfig] = {}
_hashers: dict[int, Any] = {}


def make_scheduler(config: dict[str, Any], steps_in_flight: int) -> Any:
    """The real thing: one full-attention group over `num_gpu_blocks` blocks, one of which vLLM keeps for itself."""
    length, size, blocks = config["max_model_len"], config["block_size"], config["num_gpu_blocks"]
    if length not in _models:
        _models[length] = ModelConfig(
            model=MODEL, tokenizer=MODEL, skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=length
        )
    options = {name: config[name] for name in PASSED_ON if name in config}
    cache = CacheConfig(
        block_size=size, gpu_memory_utilization=0.9, enable_prefix_caching=config["enable_prefix_caching"]
    )
    cache.num_gpu_blocks = blocks
    whole = VllmConfig(
        model_config=_models[length],
        scheduler_config=SchedulerConfig(
            max_model_len=length,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=steps_in_flight == 2,
            **options,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float16)
    return (AsyncScheduler if steps_in_flight == 2 else Scheduler)(
        vllm_config=whole,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(whole),
        block_size=size,
        log_stats=False,
    )


def make_request(name: str, prompt: list[int], out: int, config: dict[str, Any]) -> Request:
    size = config["block_size"]
    if size not in _hashers:
        _hashers[size] = get_request_block_hasher(size, HASH)
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=out, ignore_eos=True, stop_token_ids=[END]),
        pooling_params=None,
        block_hasher=_hashers[size] if config["enable_prefix_caching"] else None,
    )


def output_token(request: dict[str, Any], k: int) -> int:
    """Output token k of a request of a workload."""
    return END if k + 1 == request.get("stop") else 3 + (request["id"] * 7919 + k * 104729) % 5


def watch_pool(pool: Any) -> tuple[list[int], list[int]]:
    """Lists that fill with the blocks taken and evicted, in order, counted without vLLM's null block."""
    taken: list[int] = []
    evicted: list[int] = []
    get_new_blocks, evict = pool.get_new_blocks, pool._maybe_evict_cached_block

    def get(num_blocks: int) -> Any:
        blocks = get_new_blocks(num_blocks)
        taken.extend(block.block_id - 1 for block in blocks)
        return blocks

    def maybe_evict(block: Any) -> bool:
        was_cached: bool = evict(block)
        if was_cached:
            evicted.append(block.block_id - 1)
        return was_cached

    pool.get_new_blocks, pool._maybe_evict_cached_block = get, maybe_evict
    return taken, evicted


def model_output(names: list[str], tokens: list[list[int]]) -> ModelRunnerOutput:
    """What a step that ran these requests gives, with these tokens sampled."""
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def answer_of(scheduler: Any, plan: Any, tokens: list[list[int]]) -> list[Any]:
    """The step has run; what vLLM makes of it."""
    done = model_output(list(plan.num_scheduled_tokens), tokens)
    return [output for part in scheduler.update_from_output(plan, done).values() for output in part.outputs]


def play(config: dict[str, Any], requests: list[dict[str, Any]], steps_in_flight: int) -> dict[str, Any]:
    """Each turn: requests come and go; schedule; then the oldest step in flight ends, if enough of them are."""
    scheduler = make_scheduler(config, steps_in_flight)
    pool = scheduler.kv_cache_manager.block_pool
    taken, evicted = watch_pool(pool)
    size = config["block_size"]
    by_name = {str(request["id"]): request for request in requests}
    pending = deque(requests)
    aborts = [request for request in requests if "abort" in request]
    flight: deque[tuple[Any, list[str], list[bool]]] = deque()
    steps: list[list[Any]] = []
    finished: list[list[Any]] = []
    turn = 0
    while (pending or scheduler.has_unfinished_requests()) and turn < 100_000:
        while pending and pending[0]["step"] <= turn:
            request = pending.popleft()
            scheduler.add_request(make_request(str(request["id"]), request["prompt"], request["out"], config))
        for request in aborts:
            if request["abort"] == turn and str(request["id"]) in scheduler.requests:
                num_outputs = scheduler.requests[str(request["id"])].num_output_tokens
                scheduler.finish_requests(str(request["id"]), RequestStatus.FINISHED_ABORTED)
                finished.append([turn, request["id"], "abort", num_outputs])
        plan = None
        names: list[str] = []
        if scheduler.has_unfinished_requests():
            waits = {r.request_id: getattr(r, "num_output_placeholders", 0) for r in scheduler.requests.values()}
            taken.clear()
            evicted.clear()
            plan = scheduler.schedule()
            names = list(plan.num_scheduled_tokens)
            preempted = sorted(int(name) for name in plan.preempted_req_ids or ())
            if names or preempted:
                steps.append(
                    [
                        turn,
                        [[int(name), plan.num_scheduled_tokens[name]] for name in names],
                        preempted,
                        pool.get_num_free_blocks(),
                        len(scheduler.waiting),
                        len(scheduler.running),
                        hits_of(scheduler, plan, size),
                        list(taken),
                        list(evicted),
                    ]
                )
            samples = []
            for name in names:
                r = scheduler.requests[name]
                if steps_in_flight == 2:
                    samples.append(r.num_output_placeholders > waits[name])
                else:
                    samples.append(r.num_computed_tokens >= r.num_tokens)
            flight.append((plan, names, samples))
        while flight and (len(flight) >= steps_in_flight or not names):
            oldest, rows, sampled = flight.popleft()
            tokens = [
                [output_token(by_name[name], scheduler.requests[name].num_output_tokens)]
                if samples_now and name in scheduler.requests
                else []
                for name, samples_now in zip(rows, sampled, strict=True)
            ]
            ends = []
            alive = {name: scheduler.requests[name] for name in rows if name in scheduler.requests}
            for output in answer_of(scheduler, oldest, tokens):
                if output.finish_reason is not None:
                    num_outputs = alive[output.request_id].num_output_tokens
                    ends.append([turn, int(output.request_id), str(output.finish_reason), num_outputs])
            finished += sorted(ends)
            if names:
                break
        turn += 1
    return {"steps": steps, "finished": finished, "total": turn}


def hits_of(scheduler: Any, plan: Any, size: int) -> list[list[Any]]:
    """[request, cached tokens it starts with, the blocks that hold them] of every admitted request, in order."""
    tables = {new.req_id: (new.num_computed_tokens, new.block_ids[0]) for new in plan.scheduled_new_reqs}
    rows = plan.scheduled_cached_reqs
    for i, name in enumerate(rows.req_ids):
        if name in rows.resumed_req_ids:
            tables[name] = (rows.num_computed_tokens[i], rows.new_block_ids[i][0])
    return [
        [int(name), tables[name][0], [block - 1 for block in tables[name][1][: tables[name][0] // size]]]
        for name in plan.num_scheduled_tokens
        if name in tables
    ]


def bench(num_seqs: int, num_blocks: int, full: bool, repeats: int) -> dict[str, float]:
    """Median CPU time of `schedule` and `update_from_output`, in microseconds, while `num_seqs` requests decode.

    The same work as in benchmarks/core.py. `full`: every free block holds cached content beforehand, so that each
    block taken evicts.
    """
    config = {
        "block_size": 16,
        "num_gpu_blocks": num_blocks + 1,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": 1 << 20,
        "max_model_len": 65_536,
        "enable_prefix_caching": True,
    }
    scheduler = make_scheduler(config, 1)
    times: list[tuple[float, float]] = []

    def run(turns: int) -> None:
        for _ in range(turns):
            start = time.thread_time()
            plan = scheduler.schedule()
            decided = time.thread_time()
            names = list(plan.num_scheduled_tokens)
            outcome = model_output(names, [[7] for _ in names])
            done = time.thread_time()
            scheduler.update_from_output(plan, outcome)
            times.append((decided - start, time.thread_time() - done))

    left = num_blocks if full else 0
    while left:
        blocks = min(left, 4_000)
        scheduler.add_request(make_request(f"fill {left}", [left + 10, *[3] * (blocks * 16 - 1)], 1, config))
        run(1)
        left -= blocks
    if full:
        assert sum(block.block_hash is not None for block in scheduler.kv_cache_manager.block_pool.blocks) == num_blocks
    for i in range(num_seqs):
        scheduler.add_request(make_request(str(i), [200_000 + i, *[5] * (127 + i % 16)], repeats + 20, config))
    run(5)
    times.clear()
    gc.collect()
    gc.freeze()
    run(repeats)
    return {
        "schedule_us": median(a for a, _ in times) * 1e6,
        "complete_us": median(b for _, b in times) * 1e6,
        "step_us": median(a + b for a, b in times) * 1e6,
    }


def main() -> None:
    def answer(value: object) -> None:
        print(json.dumps(value, separators=(",", ":")), file=ANSWERS, flush=True)

    answer({"vllm": vllm.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        if "bench" in asked:
            answer(bench(**asked["bench"]))
        else:
            answer(play(asked["config"], asked["requests"], asked["steps_in_flight"]))


if __name__ == "__main__":
    main()
