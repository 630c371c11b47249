"""One typed configuration for every command; the flags, their help and all checks are derived from it.

A value comes, in rising order, from the default, the preset, the config file, `--set key=value` and the flag. Option
names are vLLM's where vLLM has the option.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from experiments.errors import UsageError

__all__ = ["SECTIONS", "Config", "Option", "nearest", "options", "parse_value", "read_config_file", "resolve"]

SECTIONS = {
    "model": "model and machine",
    "memory": "KV cache",
    "budget": "memory of the device",
    "scheduler": "scheduler",
    "workload": "workload",
    "time": "step time (simulation)",
    "cluster": "cluster (simulation)",
    "slo": "service level objectives",
    "sampling": "sampling",
    "profile": "profile and calibration",
    "output": "output",
}
"""Groups of options, in the order in which the help shows them."""

DTYPES = ("auto", "float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Option:
    """What a field of `Config` allows, and how it is called outside."""

    name: str
    """The field's name, which is also the key in a config file and of `--set`."""
    kind: type
    """int, float, bool or str."""
    optional: bool
    """Whether None is allowed."""
    repeated: bool
    """Whether the value is a tuple of `kind`."""
    default: Any
    section: str
    help: str
    unit: str = ""
    low: float | None = None
    above: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def limits(self) -> str:
        """The allowed range in words; empty if there is none."""
        parts = []
        if self.low is not None:
            parts.append(f"at least {_number(self.low)}")
        if self.above is not None:
            parts.append(f"above {_number(self.above)}")
        if self.high is not None:
            parts.append(f"at most {_number(self.high)}")
        return " and ".join(parts)


def _option(default: Any, section: str, text: str, **limits: Any) -> Any:
    return dataclasses.field(default=default, metadata={"section": section, "help": text, **limits})


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set. Each command reads the part that concerns it."""

    # -- model and machine
    model: str = _option("smollm2", "model", "a preset, a checkpoint folder, a GGUF file or a config.json")
    load_format: str = _option(
        "auto",
        "model",
        "where the weights come from; dummy: random ones",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    device: str = _option("cpu", "model", "what the engine runs on", choices=("cpu", "cuda"))
    dtype: str = _option("auto", "model", "type of weights and activations", choices=DTYPES)
    tensor_parallel_size: int = _option(1, "model", "devices that share each layer", low=1, high=1024)
    pipeline_parallel_size: int = _option(1, "model", "stages of consecutive layers", low=1, high=1024)
    threads: int | None = _option(None, "model", "CPU threads of the engine; default: torch's choice", low=1, high=1024)

    # -- KV cache
    block_size: int = _option(16, "memory", "tokens a block holds", unit="tokens", low=1, high=1024)
    num_gpu_blocks_override: int | None = _option(
        None, "memory", "KV blocks to use, instead of as many as memory allows", unit="blocks", low=1, high=1 << 31
    )
    gpu_memory_utilization: float = _option(
        0.9, "memory", "share of the device's memory for weights, activations and KV cache", above=0, high=1
    )
    kv_cache_dtype: str = _option(
        "auto", "memory", "type of keys and values; auto: that of the model", choices=(*DTYPES, "fp8")
    )
    enable_prefix_caching: bool = _option(True, "memory", "reuse the KV blocks of equal prefixes")
    allocator: str = _option(
        "paged",
        "memory",
        "paged, or one contiguous run of blocks a request, reserved for the longest request (max), the output's length "
        "rounded up to a power of two (pow2), or exactly that (oracle); these cache no prefixes",
        choices=("paged", "contiguous-max", "contiguous-pow2", "contiguous-oracle"),
    )
    placement: str = _option(
        "first-fit",
        "memory",
        "where a contiguous run is put",
        choices=("first-fit", "best-fit", "buddy"),
    )
    swap_space: float = _option(
        0.0, "memory", "host memory for swapped sequences, where --preemption-mode swaps", unit="GiB", low=0, high=1e6
    )
    kv_offloading_size: float = _option(
        0.0,
        "memory",
        "host memory behind the prefix cache: what the device evicts is kept",
        unit="GiB",
        low=0,
        high=1e6,
    )

    # -- memory of the device
    vllm_version: str = _option(
        "0.19.1", "budget", "release of vLLM whose defaults and memory rules hold", metavar="VERSION"
    )
    quantization: str | None = _option(
        None, "budget", "weights of attention and MLPs: fp8, int8, int4, awq or gptq; default: as published"
    )

    oom: str = _option(
        "off",
        "budget",
        "check that each step fits the device: crash ends the engine at the first that does not, report counts them",
        choices=("off", "crash", "report"),
    )
    attention_backend: str = _option(
        "flash", "budget", "attention: fused, or one that builds its score matrix", choices=("flash", "eager")
    )
    prompt_logprobs: float = _option(
        0.0, "budget", "share of requests that ask for the log-probabilities of their prompts", low=0, high=1
    )
    profile_transients: bool = _option(
        False, "budget", "size the KV pool as if score matrix and log-probabilities had been profiled"
    )
    memory_growth: float = _option(
        0.0, "budget", "memory lost in an hour of simulated time, outside of the pool", unit="GiB", low=0, high=1e6
    )

    # -- scheduler
    preset: str | None = _option(
        None, "scheduler", "scheduler of a known engine, such as vllm-0.33, sglang or orca; later sources override it"
    )
    max_num_seqs: int = _option(256, "scheduler", "most requests that run at once", unit="requests", low=1, high=65536)
    max_num_batched_tokens: int = _option(
        2048, "scheduler", "most tokens one step computes", unit="tokens", low=1, high=1 << 24
    )
    max_model_len: int | None = _option(
        None,
        "scheduler",
        "longest prompt and output together; default: the model's own",
        unit="tokens",
        low=2,
        high=1 << 24,
    )
    long_prefill_token_threshold: int = _option(
        0, "scheduler", "most prompt tokens of one request in one step; 0: no limit", unit="tokens", low=0, high=1 << 24
    )
    long_prefill_threshold_alone: bool = _option(
        True, "scheduler", "hold a request to that limit also while there is no other"
    )
    watermark: float = _option(
        0.0, "scheduler", "share of the blocks that admission leaves free while something runs", low=0, high=0.999
    )
    null_block: bool = _option(
        False, "scheduler", "one block that no request gets counts in the share of the watermark, as vLLM's null block"
    )
    scheduler_reserve_full_isl: bool = _option(True, "scheduler", "admit a request only when its whole prompt fits")
    same_step: str = _option(
        "share",
        "scheduler",
        "requests with the same new prefix in one step",
        choices=("share", "off", "defer"),
    )
    free_order: str = _option(
        "blank-first", "scheduler", "which free block is taken next", choices=("blank-first", "single-queue")
    )
    prefix_index: str = _option(
        "hash", "scheduler", "how cached prefixes are found (the same ones are)", choices=("hash", "radix")
    )
    prefix_stats: bool = _option(
        False, "scheduler", "keep account of why prompts were not hit: prefix.parquet and a line a tenant"
    )
    eviction_policy: str = _option(
        "lru",
        "scheduler",
        "which cached block is given up first",
        choices=("lru", "fifo", "lfu", "2q", "cost-aware", "priority"),
    )
    preemption_mode: str = _option(
        "recompute",
        "scheduler",
        "what becomes of a request that loses its blocks; auto: the cheaper way by --calibration",
        choices=("recompute", "swap", "swap-groups", "auto", "reject"),
    )
    parallel_sampling: str = _option(
        "fork",
        "scheduler",
        "several sequences of a prompt: forked with copy-on-write, or requests that share by the prefix cache",
        choices=("fork", "requests"),
    )
    async_scheduling: bool = _option(False, "scheduler", "decide the next step while one runs (two steps in flight)")
    scheduling_policy: str = _option(
        "fcfs",
        "scheduler",
        "who is served first",
        choices=("fcfs", "priority", "sjf", "sjf-predicted", "sjf-oracle", "edf", "fair", "lpm", "aging"),
    )
    victim_policy: str = _option(
        "last-in",
        "scheduler",
        "who loses its blocks when memory runs out",
        choices=("last-in", "lowest-priority", "most-memory", "least-work-lost"),
    )
    batching: str = _option(
        "mixed",
        "scheduler",
        "prefills and decodes in a step",
        choices=("mixed", "decode-first", "prefill-first", "static"),
    )
    admission_reserve: str = _option(
        "prompt",
        "scheduler",
        "what must fit for a request to start: its prompt, or prompt + max_tokens of all that run, so that nobody is "
        "preempted",
        choices=("prompt", "max_tokens"),
    )
    policy: tuple[str, ...] = _option(
        (), "scheduler", "a policy class of your own; may be given several times", metavar="FILE.py:CLASS"
    )

    # -- workload
    trace: str | None = _option(None, "workload", "a trace file (also .gz, .xz) or a generator's YAML", metavar="FILE")
    format: str | None = _option(
        None, "workload", "the trace's format, where it is not to be told from the content (kvtwin trace --help)"
    )
    trace_option: tuple[str, ...] = _option(
        (), "workload", "an option of the trace's format; may be given several times", metavar="KEY=VALUE"
    )
    num_requests: int | None = _option(None, "workload", "only the first so many of the trace", low=1, high=1 << 40)
    max_concurrency: int | None = _option(
        None,
        "workload",
        "serve the trace from so many clients that each send the next request when theirs is answered (closed loop), "
        "in the trace's order and not at its times",
        unit="requests",
        low=1,
        high=1 << 24,
    )
    time_scale: float = _option(
        1.0, "workload", "stretches (above 1) or shrinks the trace's arrival times and pauses", above=0, high=1e6
    )
    dequantize: bool = _option(False, "workload", "spread coarse timestamps evenly within their bin, seeded")
    seed: int = _option(0, "workload", "of everything random", low=0, high=(1 << 63) - 1)

    # -- step time
    calibration: str | None = _option(
        None, "time", "a calibration.json, or a folder of kernel tables (tp<N>/*.csv): predicts the machine they are of"
    )
    hardware: str | None = _option(None, "time", "a device of the catalogue: a roofline estimate, not a measurement")
    fast_forward: bool = _option(True, "time", "advance runs of identical decode steps at once (same results)")
    bands: bool = _option(True, "time", "also simulate with the calibration's error up and down")

    # -- cluster
    replicas: str = _option(
        "1",
        "cluster",
        "how many equal replicas; 2p3d: two that compute prompts and three that decode; or a YAML file that lists them",
        metavar="N|NpMd|FILE",
    )
    router: str = _option(
        "round-robin",
        "cluster",
        "who gets a request: round-robin, least-loaded, power-of-two, prefix, session, or a class of your own",
        metavar="NAME|FILE.py:CLASS",
    )
    decode_router: str = _option(
        "least-loaded",
        "cluster",
        "who decodes a prompt that another replica has computed; as --router",
        metavar="NAME|FILE.py:CLASS",
    )
    kv_link_gb_s: float = _option(
        25.0, "cluster", "GB/s at which a replica that decodes receives prompts (200 Gbit/s)", above=0, high=1e6
    )
    kv_link_latency_us: float = _option(20.0, "cluster", "latency of that link", unit="us", low=0, high=1e9)
    rate_limit: float = _option(
        0.0, "cluster", "requests let in a second, on average; 0: no limit; others get 429", low=0, high=1e9
    )
    rate_burst: int = _option(
        1, "cluster", "requests let in at once after a rest", unit="requests", low=1, high=1 << 30
    )
    max_outstanding: int | None = _option(
        None, "cluster", "requests a replica is sent at most before it answers; default: no limit", low=1, high=1 << 30
    )
    max_queue: int | None = _option(
        None,
        "cluster",
        "requests that may wait in the gateway; others get 503; default: no limit",
        unit="requests",
        low=0,
        high=1 << 30,
    )
    timeout_s: float | None = _option(
        None, "cluster", "how long a client waits for a whole answer; default: for ever", unit="s", above=0, high=1e9
    )
    retries: int = _option(0, "cluster", "further attempts after one that was shed, lost or too slow", low=0, high=1000)
    backoff_s: float = _option(
        0.5, "cluster", "pause before the first retry; doubles up to 8 s, less up to 25 %", unit="s", low=0, high=1e6
    )
    crash: tuple[str, ...] = _option(
        (), "cluster", "a replica, from 0, dies at a time in s; may be given several times", metavar="REPLICA@S"
    )
    mtbf_s: float | None = _option(
        None, "cluster", "mean time from a replica's start to its crash, at random; default: none", above=0, high=1e12
    )
    restart_s: str | None = _option(
        None,
        "cluster",
        "from a crash until the replica serves again, such as 180 or 120..300; never: not at all; default: its weights "
        "by --load-gb-s, and --start-s",
        metavar="S|S..S",
    )
    load_gb_s: float = _option(1.0, "cluster", "GB/s at which weights are loaded", above=0, high=1e6)
    start_s: float = _option(60.0, "cluster", "what a start takes beside loading weights", unit="s", low=0, high=1e6)
    health_interval_s: float = _option(
        0.0, "cluster", "time between health checks; 0: a crash is noticed at once", unit="s", low=0, high=1e6
    )

    # -- service level objectives
    slo_ttft_s: float | None = _option(None, "slo", "time to first token of a good request", unit="s", above=0)
    slo_tpot_s: float | None = _option(None, "slo", "time per output token of a good request", unit="s", above=0)
    slo_e2e_s: float | None = _option(None, "slo", "whole latency of a good request", unit="s", above=0)

    # -- sampling
    n: int = _option(1, "sampling", "sequences to generate from each prompt", low=1, high=1024)
    best_of: int | None = _option(
        None, "sampling", "generate so many, and give the n with the best mean log-probability", low=1, high=1024
    )
    beam_width: int | None = _option(
        None, "sampling", "beam search with so many sequences, instead of sampling", low=1, high=1024
    )
    length_penalty: float = _option(
        1.0, "sampling", "beam search: divides a score by the length to this power", low=-100, high=100
    )
    early_stopping: str = _option("false", "sampling", "beam search: when to stop", choices=("false", "true", "never"))
    max_tokens: int = _option(64, "sampling", "most tokens to generate", unit="tokens", low=1, high=1 << 24)
    min_tokens: int = _option(0, "sampling", "no stop before so many tokens", unit="tokens", low=0, high=1 << 24)
    temperature: float = _option(0.0, "sampling", "0: greedy", low=0, high=100)
    top_k: int = _option(0, "sampling", "sample among the k most likely tokens; 0: all", low=0, high=1 << 24)
    top_p: float = _option(
        1.0, "sampling", "sample among the most likely tokens of this total probability", above=0, high=1
    )
    stop: tuple[str, ...] = _option((), "sampling", "end at this text; may be given several times", metavar="TEXT")
    ignore_eos: bool = _option(False, "sampling", "go on after the end-of-text token")
    logprobs: int | None = _option(None, "sampling", "also give the so many most likely tokens", low=0, high=64)
    chat: bool = _option(True, "sampling", "wrap prompts in the model's chat template where it has one")

    # -- profile and calibration
    time_budget_s: float = _option(150.0, "profile", "about how long the sweep may take", unit="s", above=0, high=86400)
    max_rows: int | None = _option(
        None, "profile", "most rows of a profiled batch; default: by budget", low=1, high=65536
    )

    # -- output
    record_blocks: bool = _option(
        False, "output", "also write where every block is after each step, for `kvtwin plot memory`; takes more time"
    )
    record_blocks_limit: int = _option(
        4_000_000,
        "output",
        "changes of blocks to record; later steps are left out",
        unit="changes",
        low=1,
        high=1 << 28,
    )
    out: str | None = _option(None, "output", "where the results go", metavar="PATH")


@cache
def options() -> dict[str, Option]:
    """Every option by name, in the order of `Config`."""
    hints = typing.get_type_hints(Config)
    found = {}
    for field in dataclasses.fields(Config):
        hint, meta = hints[field.name], dict(field.metadata)
        optional = repeated = False
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            optional = True
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        if typing.get_origin(hint) is tuple:
            repeated = True
            hint = typing.get_args(hint)[0]
        found[field.name] = Option(field.name, hint, optional, repeated, field.default, **meta)
    return found


def nearest(name: str, valid: Iterable[str]) -> str:
    """A half sentence that names what was probably meant; empty when nothing is close."""
    close = difflib.get_close_matches(name, list(valid), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def parse_value(option: Option, value: Any, name: str) -> Any:
    """`value` as text or as YAML gives it, checked; `name` is what the user calls it.

    Raises:
        UsageError: it is of another type, out of range or not among the choices.
    """
    if option.repeated:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_scalar(option, item, name) for item in items)
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null") and option.optional):
        if option.optional:
            return None
        raise UsageError(f"{name} needs a value.")
    return _scalar(option, value, name)


def _scalar(option: Option, value: Any, name: str) -> Any:
    parsed = _of_type(option, value, name)
    if option.choices and parsed not in option.choices:
        close = nearest(str(parsed), option.choices)
        raise UsageError(f"{name} must be one of {', '.join(option.choices)}, but is {parsed!r}{close}")
    low, above, high = option.low, option.above, option.high
    bad = (
        (low is not None and parsed < low)
        or (above is not None and parsed <= above)
        or (high is not None and parsed > high)
    )
    if bad:
        if low == high == 0:
            raise UsageError(f"{name} is reserved and not supported yet, so it must be 0, but is {value}.")
        raise UsageError(f"{name} must be {option.limits}, but is {value}.")
    return parsed


def _of_type(option: Option, value: Any, name: str) -> Any:
    wrong = UsageError(f"{name} must be {_KINDS[option.kind]}, but is {value!r}.")
    if option.kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        raise wrong
    if option.kind is str:
        if isinstance(value, bool | list | dict):
            raise wrong
        return str(value)
    if isinstance(value, bool | list | dict):
        raise wrong
    try:
        if option.kind is int:
            if isinstance(value, float):
                if not value.is_integer():
                    raise wrong
                return int(value)
            return int(value)
        number = float(value)
    except (TypeError, ValueError):
        raise wrong from None
    if not math.isfinite(number):
        raise wrong
    return number


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def read_config_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys of a YAML file, with `-` in names read as `_`.

    Raises:
        UsageError: it is no YAML mapping.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as stream:
            content = yaml.safe_load(stream)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not valid YAML.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold `option: value` lines, not a {type(content).__name__}.")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def resolve(
    flags: Mapping[str, Any],
    sets: Sequence[str] = (),
    config_file: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    command: str = "",
    taken: Collection[str] | None = None,
) -> Config:
    """The configuration from all sources.

    Args:
        flags: option name to value, as text (or bool) from the command line.
        sets: `key=value` texts.
        config_file: path of a YAML file.
        defaults: what this command takes where nothing says otherwise; ranks below the preset.
        command: what the user calls the command.
        taken: the options that it uses; None: all. A config file may serve several commands, and have others too.

    Raises:
        UsageError: an unknown key, one of `sets` that the command does not use, or a value that cannot be; names the
            nearest valid ones.
    """
    known = options()
    given: dict[str, tuple[str, Any]] = {}
    if config_file is not None:
        for key, value in read_config_file(config_file).items():
            given[key] = (f"{key} in {config_file}", value)
            if key not in known:
                raise UsageError(f"{config_file} has the unknown key {key}{nearest(key, known) or '.'}")
    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not equals:
            raise UsageError(f"--set takes key=value, but got {text!r}.")
        if key not in known:
            raise UsageError(f"--set names the unknown key {key}{nearest(key, known) or '.'}")
        if taken is not None and key not in taken:
            raise UsageError(f"`{command}` does not take {key} (--set); see {command} --help.")
        given[key] = (f"{key} (--set)", value)
    for key, value in flags.items():
        given[key] = (known[key].flag, value)

    values = dict(defaults or {})
    if "preset" in given:
        name, value = given["preset"]
        values.update(_of_preset(parse_value(known["preset"], value, name)))
    for key, (name, value) in given.items():
        values[key] = parse_value(known[key], value, name)
    return Config(**values)


def _of_preset(name: str | None) -> dict[str, Any]:
    """The options that the core's preset `name` sets."""
    if name is None:
        return {}
    from engine.core.presets import preset

    fields = dict(preset(name))
    values = {}
    if "steps_in_flight" in fields:
        values["async_scheduling"] = fields.pop("steps_in_flight") == 2
    known = options()
    return values | {key: value for key, value in fields.items() if key in known}


def _number(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:g}"
