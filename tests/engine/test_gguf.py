"""GGUF files: dequantisation against arithmetic written out by hand, whole models, and damaged files."""

from __future__ import annotations

import struct

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from engine.exec import gguf  # noqa: E402
from engine.exec.runner import ModelRunner, Row  # noqa: E402
from engine.exec.tiny import TINY, tiny_config  # noqa: E402
from engine.exec.weights import dummy_weights, load_model  # noqa: E402
from engine.models.errors import ModelError  # noqa: E402
from engine.models.llama import Decoder  # noqa: E402
from kernels.cache import PagedKVCache  # noqa: E402

F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8

halves = st.floats(-100, 100, width=16)


def half(value: float) -> bytes:
    return struct.pack("<e", value)


@given(scale=halves, minimum=halves, nibbles=st.lists(st.integers(0, 15), min_size=32, max_size=32))
def test_q4_1_is_nibble_times_scale_plus_minimum(scale, minimum, nibbles):
    """Value i of a Q4_1 block is scale * nibble i + minimum; byte j holds value j low and value j + 16 high."""
    block = half(scale) + half(minimum) + bytes(nibbles[j] | nibbles[j + 16] << 4 for j in range(16))
    got = gguf.dequantise(torch.frombuffer(bytearray(block), dtype=torch.uint8), "Q4_1")
    want = [float(np.float32(np.float32(scale) * np.float32(n)) + np.float32(minimum)) for n in nibbles]
    assert got.tolist() == want


@given(scale=halves, values=st.lists(st.integers(-128, 127), min_size=32, max_size=32))
def test_q8_0_is_integer_times_scale(scale, values):
    """Value i of a Q8_0 block is scale * int8 i."""
    block = half(scale) + struct.pack("<32b", *values)
    got = gguf.dequantise(torch.frombuffer(bytearray(block), dtype=torch.uint8), "Q8_0")
    assert got.tolist() == [float(np.float32(scale) * np.float32(v)) for v in values]


def test_f16_and_f32_are_taken_as_they_are():
    """F16 widens exactly, and F32 is copied."""
    numbers = [0.0, -1.5, 65504.0, 6.1e-5]
    raw16 = bytearray(b"".join(half(n) for n in numbers))
    raw32 = bytearray(struct.pack("<4f", *numbers))
    assert gguf.dequantise(torch.frombuffer(raw16, dtype=torch.uint8), "F16").tolist() == [
        float(np.float16(n)) for n in numbers
    ]
    assert gguf.dequantise(torch.frombuffer(raw32, dtype=torch.uint8), "F32").tolist() == [
        float(np.float32(n)) for n in numbers
    ]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def value_of(value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if all(isinstance(entry, int) for entry in value):
        return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(entry) for entry in value)


def write_gguf(path, metadata, tensors):
    """`tensors`: name -> (shape, type number, bytes). Data are aligned to 32 bytes, as llama.cpp writes them."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value_of(value) for key, value in metadata.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def tiny_gguf(path, **changes):
    """The tiny model as llama.cpp would store it: its names, and q and k rows permuted."""
    weights = dummy_weights(TINY)
    inverse = {hf: ours for ours, hf in gguf._LAYER_NAMES.items()}
    tensors = {}
    for name, tensor in weights.items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            stem, suffix = rest.rsplit(".", 1)
            stored = f"blk.{layer}.{inverse[stem]}.{suffix}"
            if inverse[stem] in ("attn_q", "attn_k"):
                tensor = tensor.view(-1, 2, TINY.head_dim // 2, TINY.hidden_size).transpose(1, 2).reshape(tensor.shape)
        else:
            stem, suffix = name.rsplit(".", 1)
            stored = {hf: ours for ours, hf in gguf._NAMES.items()}[stem] + "." + suffix
        tensors[stored] = (tuple(tensor.shape), F32, tensor.numpy().tobytes())
    letters = ["<|bos|>", "<|eos|>", *map(chr, range(97, 123))]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": TINY.num_layers,
        "llama.context_length": TINY.max_position,
        "llama.embedding_length": TINY.hidden_size,
        "llama.feed_forward_length": TINY.intermediate_size,
        "llama.attention.head_count": TINY.num_heads,
        "llama.attention.head_count_kv": TINY.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": TINY.norm_eps,
        "llama.rope.freq_base": TINY.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*letters, "ab"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [3, 3] + [1] * 27,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **changes.pop("metadata", {}),
    }
    tensors.update(changes.pop("tensors", {}))
    for name in changes.pop("without", ()):
        tensors.pop(name, None)
        metadata.pop(name, None)
    write_gguf(path, metadata, tensors)
    return path


def test_a_gguf_model_computes_what_the_same_weights_compute(tmp_path):
    """Names, shapes and the order of q and k rows are undone: logits equal those of the original weights to the bit."""
    loaded = load_model(tiny_gguf(tmp_path / "tiny.gguf"))
    original = dummy_weights(TINY)
    assert loaded.weights.keys() == original.keys()
    assert all(torch.equal(loaded.weights[name], original[name]) for name in original)
    assert loaded.config.eos_token_ids == (1,)
    logits = []
    for config, weights in ((loaded.config, loaded.weights), (tiny_config(), original)):
        cache = PagedKVCache(2, 4, 16, 2, 16, torch.float32)
        row = Row(0, 0, 20, True, np.arange(2))
        logits.append(ModelRunner(Decoder(config, weights, torch.float32), cache).run([row], np.arange(20)))
    assert torch.allclose(logits[0], logits[1], atol=1e-5)


def test_the_tokenizer_comes_out_of_the_metadata(tmp_path):
    """Merges apply, special tokens are whole in the prompt and absent from the text."""
    tokenizer = load_model(tiny_gguf(tmp_path / "tiny.gguf")).tokenizer
    ids = tokenizer.encode("<|bos|>abc")
    assert ids == [0, 28, 4]
    assert tokenizer.decode(ids) == "abc"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": {"output_norm.weight": ((64,), Q4_0, b"\0" * 36)}}, "GGUF type 2"),
        ({"without": ["blk.1.ffn_up.weight"]}, "no weight model.layers.1.mlp.up_proj.weight"),
        ({"tensors": {"output_norm.weight": ((32,), F32, b"\0" * 128)}}, "has shape"),
        ({"tensors": {"blk.0.odd.weight": ((1,), F32, b"\0" * 4)}}, "no place for"),
        ({"metadata": {"general.architecture": "gemma"}}, "architecture 'gemma'"),
        ({"without": ["llama.block_count"]}, "no llama.block_count"),
        ({"metadata": {"tokenizer.ggml.pre": "qwen2"}}, "pre-tokenizer 'qwen2'"),
    ],
)
def test_a_gguf_file_that_we_cannot_run_is_named_with_the_reason(tmp_path, changes, message):
    """One sentence says what in the file is not supported or not there."""
    path = tiny_gguf(tmp_path / "odd.gguf", **changes)
    with pytest.raises(ModelError, match=message):
        Decoder((loaded := load_model(path)).config, loaded.weights, torch.float32)


@pytest.mark.parametrize("keep", [0, 3, 10, 30, 200, 2000, 50_000])
def test_a_file_cut_short_is_reported_wherever_the_cut_is(tmp_path, keep):
    """A damaged file gives one error of ours, whether header, metadata or data are incomplete."""
    path = tiny_gguf(tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError):
        load_model(path)
