"""`kvtwin plan`: where a device's memory goes under a release of vLLM, and whether that starts."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import Any

from experiments.config import Config, options, parse_value
from experiments.errors import UsageError
from experiments.serveline import read_serve_line
from experiments.terminal import Terminal
from sim.hardware import load_device
from sim.memory import MemoryRequest, Plan, longest, plan
from sim.models import load_model

__all__ = ["advice", "describe", "execute"]

_GIB = 1 << 30


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """`kvtwin plan`: the budget as a table; returns the same as numbers."""
    eager, chunked = bool(args.enforce_eager), args.enable_chunked_prefill
    replicas, whole = args.data_parallel_size, bool(args.enable_expert_parallel)
    if args.line:
        found, ignored = read_serve_line(args.line)
        eager = eager or bool(found.pop("enforce_eager", False))
        chunked = found.pop("enable_chunked_prefill", None) if chunked is None else chunked
        whole = bool(found.pop("enable_expert_parallel", False)) or whole
        named = str(found.pop("data_parallel_size", "1"))
        if replicas is None:
            replicas = int(named) if named.isdigit() else 0
        config = _overlaid(config, found)
        if ignored:
            terminal.note(f"Says nothing about memory: {', '.join(ignored)}.")
    if not config.model:
        raise UsageError('`kvtwin plan` needs --model, or a line to read: "vllm serve MODEL ...".')
    if config.hardware is None:
        raise UsageError("`kvtwin plan` needs --hardware: a device of the catalogue, or a file that describes one.")
    replicas = 1 if replicas is None else replicas
    if replicas < 1:
        raise UsageError("--data-parallel-size must be a whole number from 1 on.")
    spec = load_model(config.model)
    request = MemoryRequest(
        spec=spec,
        device=load_device(config.hardware),
        version=config.vllm_version,
        tp=config.tensor_parallel_size,
        pp=config.pipeline_parallel_size,
        utilization=config.gpu_memory_utilization,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunked=chunked,
        block_size=config.block_size,
        dtype=None if config.dtype == "auto" else config.dtype,
        kv_dtype=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        quantization=config.quantization,
        swap_gib=config.swap_space,
        enforce_eager=eager,
        num_blocks=config.num_gpu_blocks_override,
        expert_ranks=config.tensor_parallel_size * replicas if whole and spec.experts else 1,
    )
    if args.activations == "traced":
        terminal.note("The layers' peak is that of this project's engine, whose sampler and start are not vLLM's.")
        request = _traced(request)
    made = plan(request)
    if request.max_model_len is not None and request.max_model_len > request.spec.max_position:
        raise UsageError(
            f"--max-model-len is {request.max_model_len}, but {request.spec.name} ends at "
            f"{request.spec.max_position} tokens."
        )
    summary = describe(made, _lengths(args.lengths, made))
    _show(made, summary, terminal)
    return summary


def _traced(request: MemoryRequest) -> MemoryRequest:
    """The request with the peak of the engine's own layers, at the tokens that the release would profile."""
    from sim.traced import traced_layers_bytes

    tokens = plan(request).max_num_batched_tokens
    dtype = str(request.dtype or request.spec.dtype)
    return replace(request, layers_peak=traced_layers_bytes(request.spec, tokens, dtype, request.tp))


def _overlaid(config: Config, found: dict[str, str | bool]) -> Config:
    """The configuration, with the line's values where the command itself gave none."""
    known = options()
    values = {}
    for name, value in found.items():
        default = known[name].default
        if getattr(config, name) in (None, "", default):
            values[name] = parse_value(known[name], value, f"{known[name].flag} of the command line")
    return replace(config, **values)


def _lengths(text: str | None, made: Plan) -> list[int]:
    if text is None:
        return [made.max_model_len]
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UsageError(f"--lengths takes numbers of tokens, such as 1000,4000, but is {text!r}.")
    return lengths


def describe(made: Plan, lengths: list[int]) -> dict[str, Any]:
    """The plan as --json prints it."""
    request = made.request
    ranges = longest(request)
    later = made.refusal is None and made.headroom < 0
    return {
        "model": request.spec.name,
        "hardware": request.device.name,
        "vllm_version": request.version,
        "rules_of": made.rules.name,
        "engine": made.rules.engine,
        "options": {
            "gpu_memory_utilization": made.utilization,
            "max_model_len": made.max_model_len,
            "max_num_seqs": made.max_num_seqs,
            "max_num_batched_tokens": made.max_num_batched_tokens,
            "enable_chunked_prefill": made.chunked,
            "tensor_parallel_size": request.tp,
            "block_size": request.block_size,
        },
        "kv_blocks": made.usable_blocks,
        "vllm_num_gpu_blocks": made.num_blocks,
        "num_cpu_blocks": made.num_cpu_blocks,
        "block_bytes": made.block_bytes,
        "kv_bytes_per_token": made.block_bytes // request.block_size,
        "kv_tokens": made.kv_tokens,
        "budget_bytes": made.budget_bytes(),
        "weight_bytes": {field.name: getattr(made.weights, field.name) for field in fields(made.weights)},
        "peak_bytes": {"layers": made.layers_peak, "sampler": made.sampler_peak},
        "available_bytes": made.available,
        "max_concurrency": made.concurrency(made.max_model_len),
        "concurrency": [
            {"tokens": n, "requests": made.running(n)[0], "limited_by": made.running(n)[1]} for n in lengths
        ],
        "max_model_len_ranges": [list(pair) for pair in ranges],
        "largest_max_model_len": ranges[-1][1] if ranges else 0,
        "binding_limit": _binding(made),
        "verdict": "refused" if made.refusal else "out of memory later" if later else "starts",
        "error": made.refusal,
        "advice": advice(made, ranges),
    }


def _binding(made: Plan) -> str:
    """What bounds the service: `weights`, `activations`, ... where it does not start, else `kv` or `max_num_seqs`."""
    if made.available < made.block_bytes and made.request.num_blocks is None:
        return "weights" if made.terms[0].bytes > made.usable else made.largest_term().name
    return made.running(made.max_model_len)[1]


def advice(made: Plan, ranges: list[tuple[int, int]]) -> list[str]:
    """What would make a refused engine start, or one that starts more generous; the shortest way first."""
    found = []
    request = made.request
    if made.refusal is not None:
        for low, high in reversed(ranges):
            where = f"up to {high:,}" if low == 1 else f"from {low:,} to {high:,}, where prompts are cut"
            found.append(f"--max-model-len {where}")
        if request.num_blocks is None:
            found += _more_room(made)
    if made.sampler_peak > made.layers_peak and request.num_blocks is None:
        smaller = plan(replace(request, max_num_seqs=max(1, made.max_num_seqs // 8)))
        gain = (made.terms[2].bytes - smaller.terms[2].bytes) / _GIB
        if gain > 0.05:
            found.append(
                f"--max-num-seqs {smaller.max_num_seqs} instead of {made.max_num_seqs}: {gain:.2f} GiB less to sample"
            )
    return found


def _more_room(made: Plan) -> list[str]:
    request = made.request
    steps = [round(value / 100, 2) for value in range(int(made.utilization * 100) + 1, 100)]
    for value in steps:
        if plan(replace(request, utilization=value)).refusal is None:
            return [f"--gpu-memory-utilization {value:.2f} at least"]
    for name in ("fp8", "int4"):
        if request.quantization is None and plan(replace(request, quantization=name)).refusal is None:
            return [f"weights in {name}"]
    for tp in (2, 4, 8):
        if tp <= request.tp or request.spec.heads % tp or request.spec.intermediate % tp:
            continue
        if plan(replace(request, tp=tp)).refusal is None:
            return [f"--tensor-parallel-size {tp}"]
    return ["a smaller model or a larger device"]


def _show(made: Plan, summary: dict[str, Any], terminal: Terminal) -> None:
    request = made.request
    rows = [
        ("usable", f"{made.usable / _GIB:,.2f}", f"utilization {made.utilization:g} of "
         f"{request.device.memory_bytes / _GIB:,.2f} GiB"),
        *((f"- {t.name}", f"{t.bytes / _GIB:,.2f}", t.what) for t in made.terms if t.inside),
        ("= for KV", f"{made.available / _GIB:,.2f}", f"blocks of {made.block_bytes / (1 << 20):g} MiB"),
    ]  # fmt: skip
    rows += [
        (f"  {t.name}", f"{t.bytes / _GIB:,.2f}", f"outside of the budget: {t.what}")
        for t in made.terms
        if not t.inside
    ]
    rows.append(("  headroom", f"{made.headroom / _GIB:,.2f}", "what is left of the device then"))
    title = f"{request.spec.name} on {request.tp} x {request.device.name}, vLLM {request.version} ({made.rules.engine})"
    terminal.print(_table(title, rows))
    blocks = f"{made.num_blocks:,} KV blocks"
    if made.rules.null_block:
        blocks += f" as vLLM counts them ({made.usable_blocks:,} without its null block)"
    if made.num_cpu_blocks:
        blocks += f", {made.num_cpu_blocks:,} CPU blocks"
    terminal.print(f"{blocks}: {made.kv_tokens:,} tokens of {made.block_bytes // request.block_size:,} bytes.")
    terminal.print(
        f"max_model_len {made.max_model_len:,}, max_num_seqs {made.max_num_seqs:,}, max_num_batched_tokens "
        f"{made.max_num_batched_tokens:,}, prompts {'cut' if made.chunked else 'whole'}. Maximum concurrency for "
        f"{made.max_model_len:,} tokens per request: {summary['max_concurrency']:.2f}x."
    )
    for entry in summary["concurrency"]:
        terminal.print(
            f"Requests of {entry['tokens']:,} tokens at once: {entry['requests']:,}, by {entry['limited_by']}."
        )
    spans = ", ".join(f"{low:,} to {high:,}" for low, high in summary["max_model_len_ranges"])
    terminal.print(f"Starts with max_model_len {spans}." if spans else "Starts with no max_model_len.")
    if made.refusal:
        terminal.text(f"Refused: {made.refusal}", style="red")
    elif made.headroom < 0:
        terminal.warn(
            "it starts, and runs out of memory afterwards: more is needed outside of the budget than is left."
        )
    for line in summary["advice"]:
        terminal.text(f"  {line}")


def _table(title: str, rows: list[tuple[str, str, str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("GiB", justify="right")
    table.add_column("what")
    for row in rows:
        table.add_row(*row)
    return table
