"""A pasted `vllm serve ...` command line, as the options it stands for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from experiments.errors import UsageError

__all__ = ["read_serve_line"]

_SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "ep": "enable_expert_parallel",
    "q": "quantization",
    "model-name-or-path": "model",
}
_TAKEN = {
    *("model", "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "dtype", "kv_cache_dtype", "quantization", "swap_space", "block_size"),
    *("num_gpu_blocks_override", "data_parallel_size"),
}
_SWITCHES = ("enforce_eager", "enable_chunked_prefill", "enable_expert_parallel")
_DTYPES = {"half": "float16", "float": "float32", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "fp16": "float16"}
_UNITS = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""Of a number of tokens, as vLLM reads it: 32k is 32,000 and 32K is 32,768."""


def read_serve_line(words: Sequence[str]) -> tuple[dict[str, str | bool], list[str]]:
    """(options by name, flags that say nothing about memory) of a command line, one word or many.

    `VAR=value` in front, `vllm serve`, `vllm` and `python -m vllm.entrypoints...` are passed over.

    Raises:
        UsageError: it is not one, or it names no model.
    """
    try:
        parts = [part for word in words for part in (shlex.split(word) if " " in word.strip() else [word])]
    except ValueError as error:
        raise UsageError(f"The command line cannot be read: {error}.") from error
    parts = [part for part in parts if part.strip()]
    while parts and re.fullmatch(r"\w+=.*", parts[0]):
        parts.pop(0)
    if parts[:1] == ["vllm"]:
        parts = parts[2:] if parts[1:2] == ["serve"] else parts[1:]
    elif len(parts) > 2 and re.fullmatch(r"python[\d.]*", parts[0]) and parts[1] == "-m":
        parts = parts[3:]
    else:
        raise UsageError(
            'A command line to read begins with `vllm serve`, such as "vllm serve meta-llama/Llama-3.1-8B".'
        )
    found: dict[str, str | bool] = {}
    ignored: list[str] = []
    while parts:
        word = parts.pop(0)
        if not word.startswith("-"):
            if "model" in found:
                raise UsageError(f"The command line names {word} beside the model {found['model']}; quote its values.")
            found["model"] = word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = _SHORT.get(name, name).replace("-", "_")
        negative = name.startswith("no_")
        name = name.removeprefix("no_")
        given: str | bool
        if equals:
            given = value
        elif parts and not parts[0].startswith("-") and name not in _SWITCHES:
            given = parts.pop(0)
        else:
            given = not negative
        if name not in _TAKEN and name not in _SWITCHES:
            ignored.append("--" + name.replace("_", "-"))
            continue
        if isinstance(given, bool) and name not in _SWITCHES:
            raise UsageError(f"--{name.replace('_', '-')} of the command line needs a value.")
        found[name] = _value(name, given)
    if "model" not in found:
        raise UsageError("The command line names no model.")
    return found, ignored


def _value(name: str, given: str | bool) -> str | bool:
    if isinstance(given, bool):
        return given
    if name in _SWITCHES:
        return given.lower() in ("true", "1", "yes")
    if name in ("dtype", "kv_cache_dtype"):
        return _DTYPES.get(given, given)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", given)
    if match and name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
        return str(int(float(match[1]) * _UNITS[match[2]]))
    return given
