"""What a step needs for a moment, beside weights and KV: the rules of vLLM, declared and with their sources.

The engine's own peak is not declared but traced (`sim.traced`). Here are vLLM's:

- layers: the gate and up projections, their product, and three hidden states of each scheduled token are alive at the
  widest point of a layer, 2 (3 I + 3 H) bytes in 16 bits: 108.0 KiB for Llama-3.1-8B, where logs imply 108.2 to 108.6
  (vllm#10517: 17.06 and 17.98 GiB at 20,000 and 29,000 tokens, the workspace of cuBLAS included). With several devices
  the two all-reduces of a layer are not in place, and five hidden states are alive (vllm#15815: 1.26 GiB for 10,000
  tokens of Qwen2.5-32B on two).
- sampler: see `sampler_bytes`.
"""

from __future__ import annotations

from sim.hardware import Device
from sim.models import ModelSpec
from sim.releases import Release

__all__ = [
    "cublas_bytes",
    "eager_attention_bytes",
    "eager_decode_bytes",
    "expert_bytes",
    "layer_bytes",
    "peak_bytes",
    "prompt_logprobs_bytes",
    "sampler_bytes",
    "sampler_persistent_bytes",
]

_TRITON_ROWS = 8
"""Fewest sequences for which the sampler of 0.19 uses its Triton kernel."""
_SEGMENTED_ROWS = 128
"""Fewest sequences that torch.sort sorts as segments; fewer, but more than one, are sorted twice as a whole."""


def layer_bytes(spec: ModelSpec, tokens: int, element: int = 2, tp: int = 1, experts: bool = True) -> int:
    """Bytes alive at the widest point of a layer, of `tokens` scheduled ones, on one of `tp` devices.

    `experts`: whether the buffers of a mixture's experts count (`expert_bytes`), or are kept elsewhere.
    """
    states = 3 if tp == 1 else 5
    if spec.experts:
        wide = expert_bytes(spec, tokens, element, tp) if experts else 0
        return wide + tokens * states * spec.hidden * element
    return tokens * (3 * spec.intermediate // tp + states * spec.hidden) * element


def expert_bytes(
    spec: ModelSpec, tokens: int, element: int = 2, tp: int = 1, expert_ranks: int = 1, replicas: int = 1
) -> int:
    """Bytes of the experts' two buffers, for every (token, chosen expert): TritonExperts.workspace_shapes of 0.19.

    One holds gate and up, or what a token gets back; the other their product, or the token. With experts that are
    split whole over ranks, their width is not, and with `replicas` of the attention each sees the tokens of all.
    """
    if not spec.experts:
        return 0
    inner = spec.intermediate if expert_ranks > 1 else spec.intermediate // tp
    rows = tokens * (replicas if expert_ranks > 1 else 1) * spec.experts_per_token
    return rows * (max(2 * inner, spec.hidden) + max(inner, spec.hidden)) * element


def eager_attention_bytes(spec: ModelSpec, tokens: int, context: int, tp: int = 1) -> int:
    """Bytes of a layer's score matrix in float32, all heads, of `tokens` new ones of a request with `context` in all.

    An attention that builds its matrix has the scores and the probabilities at once; a fused kernel has neither.
    """
    return 2 * 4 * max(1, spec.heads // tp) * tokens * context


def sampler_bytes(kind: str, rows: int, spec: ModelSpec, element: int, device: Device, tokens: int) -> int:
    """Peak bytes while `rows` sequences are sampled, behind a forward pass of `tokens`.

    In units of the float32 logits, rows x vocab x 4: the logits as the head gives them (a half in 16 bits) and in
    float32 (1), and with

    - `sort` (up to 0.16; vllm/v1/sample/ops/topk_topp_sampler.py apply_top_k_top_p_pytorch): while torch.sort runs, its
      values (1) and 64-bit indices (2), and within it the indices to permute (2) and the second half of both double
      buffers of cub's segmented radix sort (3): 9.5 in 16 bits. Between 2 and 127 rows it sorts (index, segment) pairs
      twice (aten/src/ATen/native/cuda/SortStable.cu): two buffers of those (4), keys (1), cub's buffers (3): 12.5.
      Logs: 1.26 GiB for Llama-3-8B on an H100 (vllm#10511), 1.39 for Qwen2.5-1.5B (#12529), 1.42 for Qwen2.5-32B on an
      A6000 (#10360); this gives 1.26, 1.39 and 1.43.
    - `triton` (0.17 on; apply_top_k_top_p_triton, random_sample): probabilities (1), exponential noise (1), and a row
      for each of up to so many multiprocessors, kept: 3.5 and that.
    - `flashinfer` (0.33; top_k_top_p_sampling_from_logits): masked logits (1) and probabilities (1): 3.5.

    The hidden states of all tokens and, twice, of the sampled rows stay alive beside these.
    """
    unit = rows * spec.vocab * 4
    logits = rows * spec.vocab * element if element < 4 else 0
    hidden = (tokens + 2 * rows) * spec.hidden * element
    if kind == "triton" and rows < _TRITON_ROWS:
        kind = "sort"
    if kind == "sort":
        return logits + unit * (9 if rows == 1 or rows >= _SEGMENTED_ROWS else 12) + hidden
    if kind == "flashinfer":
        return logits + unit * 3 + hidden
    programs = min(device.multiprocessors, rows)
    buffer = min(1 << (programs - 1).bit_length(), device.multiprocessors) * spec.vocab * 4
    return logits + unit * 3 + buffer + hidden


def sampler_persistent_bytes(kind: str, rows: int, spec: ModelSpec) -> int:
    """Bytes that the sampler holds all the time: in 0.33 the counts of output tokens, and the mask of the prompt's.

    (vllm/v1/worker/gpu/sample/penalties.py: int32 [rows, vocab] and [rows, vocab / 32].)
    """
    return rows * (spec.vocab * 4 + -(-spec.vocab // 32) * 4) if kind == "flashinfer" else 0


def eager_decode_bytes(spec: ModelSpec, context: int, tp: int = 1) -> int:
    """The same of a batch of one-token rows over `context` cached tokens in all."""
    return 2 * 4 * max(1, spec.heads // tp) * context


def prompt_logprobs_bytes(spec: ModelSpec, tokens: int, element: int = 2, engine: str = "V1") -> int:
    """Bytes of the logits of `tokens` prompt tokens and of what becomes of them.

    V1 keeps their float32 log-probabilities beside them, request by request
    (gpu_model_runner._get_prompt_logprobs_dict); V0 has float32 logits, probabilities and log-probabilities of all rows
    of a step at once (model_executor/layers/sampler.py).
    """
    return tokens * spec.vocab * (element + (4 if engine == "V1" else 12))


def cublas_bytes(device: Device) -> int:
    """The workspace that torch gives cuBLAS at its first product: aten/src/ATen/cuda/CublasHandlePool.cpp."""
    return 4096 * 8 * 1024 if device.hopper else 4096 * 1024 * 2 + 16 * 1024 * 8


def peak_bytes(
    spec: ModelSpec,
    release: Release,
    device: Device,
    tokens: int,
    rows: int,
    element: int,
    tp: int = 1,
    expert_ranks: int = 1,
    replicas: int = 1,
) -> tuple[int, int]:
    """(peak of the layers, peak of the sampler) of a profiling run with so many tokens and sequences.

    Tensor parallel: the logits of all devices are gathered on each. Buffers of experts count in the layers, and in
    both where the release keeps them.
    """
    workspace = cublas_bytes(device)
    experts = expert_bytes(spec, tokens, element, tp, expert_ranks, replicas)
    layers = layer_bytes(spec, tokens, element, tp, experts=False) + experts + workspace
    sampler = sampler_bytes(release.sampler, rows, spec, element, device, tokens) + workspace
    return layers, sampler + (experts if release.expert_workspace else 0)
