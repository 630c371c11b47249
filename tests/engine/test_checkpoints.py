"""Checkpoint folders: shards read one tensor at a time, quantised matrices, and what is wrong with a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from engine.exec.checkpoint import Checkpoint  # noqa: E402
from engine.exec.llm import LLM  # noqa: E402
from engine.exec.sampler import SamplingParams  # noqa: E402
from engine.exec.weights import dummy_weights, load_model  # noqa: E402
from engine.models.config import DecoderConfig  # noqa: E402
from engine.models.errors import ModelError  # noqa: E402
from engine.models.llama import Decoder  # noqa: E402
from engine.models.quantised import Quantisation  # noqa: E402

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIG = DecoderConfig.from_hf(SHAPE)
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 32


def save(folder: Path, weights: dict[str, Any], quantisation: dict[str, Any] | None = None, shards: int = 3) -> Path:
    """A checkpoint folder of so many shards, with an index."""
    folder.mkdir(exist_ok=True)
    extra = {} if quantisation is None else {"quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps({**SHAPE, **extra}))
    names = list(weights)
    where = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name].contiguous() for name in names[number::shards]}
        safetensors.save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def is_matrix(name: str) -> bool:
    return name.split(".")[-2] in MATRICES


def packed(numbers: Any, bits: int, order: list[int]) -> Any:
    """int32 [rows, columns x bits / 32]: neighbouring columns in one number, the k-th of them from bit
    `bits` x order[k] on. Plain loops over the published layout, as a reference for the reader."""
    rows, columns = numbers.shape
    per = 32 // bits
    out = np.zeros((rows, columns // per), dtype=np.uint32)
    for column in range(columns):
        out[:, column // per] |= numbers[:, column].astype(np.uint32) << np.uint32(bits * order[column % per])
    return torch.from_numpy(out.view(np.int32))


def quantised(weight: Any, bits: int) -> tuple[Any, Any, Any, Any]:
    """Numbers [outputs, inputs], zero points and scales [groups, outputs], and the matrix that they stand for."""
    outputs, inputs = weight.shape
    grouped = weight.view(outputs, inputs // GROUP, GROUP)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    numbers = (grouped / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 2**bits - 1)
    meant = ((numbers - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).view(outputs, inputs)
    return numbers.view(outputs, inputs).int().numpy(), zeros.int().t().numpy(), scales.t().half(), meant


def awq(weights: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Stored tensors, the plain weights that they stand for, and the configuration's section."""
    stored, plain = {}, {}
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # the first of eight outputs in the lowest bits, the second in the fifth place
    for name, weight in weights.items():
        if not is_matrix(name):
            stored[name] = plain[name] = weight
            continue
        numbers, zeros, scales, plain[name] = quantised(weight, 4)
        base = name.removesuffix(".weight")
        stored[base + ".qweight"] = packed(numbers.T, 4, order)
        stored[base + ".qzeros"] = packed(zeros, 4, order)
        stored[base + ".scales"] = scales
    return stored, plain, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


def gptq(
    weights: dict[str, Any], bits: int, layout: str, shuffled: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The same in GPTQ's layout; `shuffled`: inputs belong to groups in no order (desc_act)."""
    stored, plain = {}, {}
    generator = torch.Generator().manual_seed(5)
    order = list(range(32 // bits))
    for name, weight in weights.items():
        if not is_matrix(name):
            stored[name] = plain[name] = weight
            continue
        inputs = weight.shape[1]
        place = torch.randperm(inputs, generator=generator) if shuffled else torch.arange(inputs)
        numbers, zeros, scales, meant = quantised(weight[:, place], bits)
        back = place.argsort()
        plain[name] = meant[:, back]
        base = name.removesuffix(".weight")
        along = packed(numbers[:, back.numpy()], bits, order)  # [outputs, inputs x bits / 32]
        stored[base + ".qweight"] = along.t().contiguous()
        less = 1 if layout == "gptq" else 0
        stored[base + ".qzeros"] = packed((zeros - less) % 2**bits, bits, order)
        stored[base + ".scales"] = scales
        stored[base + ".g_idx"] = (torch.arange(inputs) // GROUP).int()[back]
    return stored, plain, {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": layout}


def fp8(weights: dict[str, Any], scaled: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The same in FP8, with a scale for a matrix, a row, or a tile of 48 x 32."""
    stored, plain = {}, {}
    rows, columns = 48, 32
    for name, weight in weights.items():
        if not is_matrix(name):
            stored[name] = plain[name] = weight
            continue
        outputs, inputs = weight.shape
        full = torch.empty_like(weight)
        if scaled == "tile":
            scale = torch.empty(-(-outputs // rows), -(-inputs // columns))
            for i in range(scale.shape[0]):
                for j in range(scale.shape[1]):
                    tile = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                    scale[i, j] = weight[tile].abs().max() / 448
                    full[tile] = scale[i, j]
            stored[name + "_scale_inv"] = scale
        else:
            most = weight.abs().amax(1, keepdim=True) if scaled == "row" else weight.abs().max()
            full[:] = most / 448
            stored[name + "_scale"] = most / 448
        small = (weight / full).to(torch.float8_e4m3fn)
        stored[name] = small
        plain[name] = small.float() * full
    section = {
        "tile": {"quant_method": "fp8", "weight_block_size": [rows, columns]},
        "row": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
        },
        "matrix": {"quant_method": "fp8"},
    }
    return stored, plain, section[scaled]


QUANTISED = {
    "awq": awq,
    "gptq": lambda weights: gptq(weights, 4, "gptq", False),
    "gptq-desc-act": lambda weights: gptq(weights, 4, "gptq", True),
    "gptq-v2-8bit": lambda weights: gptq(weights, 8, "gptq_v2", False),
    "fp8-tiles": lambda weights: fp8(weights, "tile"),
    "fp8-rows": lambda weights: fp8(weights, "row"),
    "fp8-matrix": lambda weights: fp8(weights, "matrix"),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_checkpoint_stands_for_its_matrices(tmp_path: Path, kind: str) -> None:
    """Each matrix is exactly what its numbers, zero points and scales stand for, and the model computes with it."""
    stored, plain, section = QUANTISED[kind](dummy_weights(CONFIG))
    loaded = load_model(save(tmp_path / "quantised", stored, section))
    assert set(loaded.weights) == set(plain)
    for name, weight in plain.items():
        assert torch.equal(loaded.weights[name].float(), weight), name
    prompt = list(range(1, 40))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    tokens = []
    for folder in (tmp_path / "quantised", save(tmp_path / "plain", plain)):
        llm = LLM(folder, dtype="float32", num_gpu_blocks_override=20, max_model_len=128)
        tokens.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
        llm.close()
    assert tokens[0] == tokens[1]


def test_tensors_do_not_outlive_their_file(tmp_path: Path) -> None:
    """What a decoder keeps is its own: the files may be overwritten when it is made."""
    weights = dummy_weights(CONFIG)
    folder = save(tmp_path, weights)
    decoder = Decoder(CONFIG, Checkpoint(folder), torch.float64)
    before = decoder.logits(torch.ones(1, 64, dtype=torch.float64))
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"\x00" * (path.stat().st_size // 2))
    assert torch.equal(decoder.embedding, weights["model.embed_tokens.weight"].double())
    assert torch.equal(decoder.logits(torch.ones(1, 64, dtype=torch.float64)), before)


PEAK = """
import sys
from pathlib import Path
import torch
from engine.exec.weights import load_model
from engine.models.llama import Decoder

def bytes_of(what):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024

def load(folder, say):
    loaded = load_model(folder)
    return Decoder(loaded.config, loaded.weights, torch.float32, say)

load(Path(sys.argv[1]), None)  # what the libraries take is taken now
before = bytes_of("VmRSS")
said = []
decoder = load(Path(sys.argv[2]), lambda layer, layers: said.append((layer, layers)))
print(bytes_of("VmHWM") - before, len(said))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("layers", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_loading_takes_the_memory_of_the_weights_once(tmp_path: Path, layers: int) -> None:
    """The peak above the process before is at most 1.15 times the checkpoint (0.16 GB; slow: 1.6 GB)."""
    shape = {**SHAPE, "num_hidden_layers": layers, "hidden_size": 256, "intermediate_size": 1024}
    config = DecoderConfig.from_hf(shape)
    save(tmp_path / "small", dummy_weights(CONFIG))
    save(tmp_path / "large", dummy_weights(config), shards=1 + layers // 20)
    (tmp_path / "large" / "config.json").write_text(json.dumps(shape))
    size = sum(path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors"))
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    peak, said = map(int, done.stdout.split())
    assert size > layers * 3_900_000
    assert peak <= 1.15 * size, peak / size
    assert said == layers + 1


def broken(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: weight for name, weight in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}


@pytest.mark.parametrize(
    ("change", "section", "message"),
    [
        (broken, None, "has no weight model.layers.1.mlp.up_proj.weight"),
        (lambda w: {**w, "model.norm.weight": torch.ones(65)}, None, r"model.norm.weight has shape \(65,\)"),
        (dict, {"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        (dict, {"quant_method": "awq", "bits": 3}, "AWQ with 3 bits"),
        (dict, {"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        (dict, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        (
            dict,
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
            "4-bit int",
        ),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(
    tmp_path: Path, change: Any, section: dict[str, Any] | None, message: str
) -> None:
    """A missing weight, a wrong shape, a quantisation that is not read: one sentence that names it."""
    folder = save(tmp_path, change(dummy_weights(CONFIG)), section)
    with pytest.raises(ModelError, match=message) as error:
        LLM(folder, num_gpu_blocks_override=20, max_model_len=128)
    assert "\n" not in str(error.value)


def test_a_quantised_matrix_with_a_part_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    """Scales that are not there or do not fit, and FP8 without a scale, are errors that say so."""
    stored, _, section = awq(dummy_weights(CONFIG))
    name = "model.layers.0.self_attn.q_proj"
    without = {key: value for key, value in stored.items() if key != f"{name}.scales"}
    with pytest.raises(ModelError, match=f"{name}.qweight without {name}.scales"):
        LLM(save(tmp_path / "without", without, section), num_gpu_blocks_override=20, max_model_len=128)
    narrow = {**stored, f"{name}.scales": stored[f"{name}.scales"][:, :8]}
    with pytest.raises(ModelError, match="do not fit together"):
        LLM(save(tmp_path / "narrow", narrow, section), num_gpu_blocks_override=20, max_model_len=128)
    stored, _, section = fp8(dummy_weights(CONFIG), "row")
    bare = {key: value for key, value in stored.items() if key != f"{name}.weight_scale"}
    with pytest.raises(ModelError, match=f"{name}.weight is FP8 and has no scale"):
        LLM(save(tmp_path / "bare", bare, section), num_gpu_blocks_override=20, max_model_len=128)


def test_a_plain_configuration_is_not_quantised() -> None:
    """Without a section there is nothing to unpack."""
    assert Quantisation.from_hf(SHAPE) is None
