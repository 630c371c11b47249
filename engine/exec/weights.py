"""From the name of a model to its configuration, weights and tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.exec import gguf, smollm2
from engine.exec.checkpoint import Checkpoint, read_json
from engine.exec.tiny import TINY
from engine.exec.tokenizer import ByteTokenizer, Tokenizer, from_gguf, from_json
from engine.models.config import DecoderConfig
from engine.models.errors import ModelError, OptionError
from engine.models.llama import expected_weights
from engine.models.quantised import Quantisation, QuantisedWeights

__all__ = ["LOAD_FORMATS", "LoadedModel", "dummy_weights", "load_model"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


class LoadedModel(NamedTuple):
    """What a model's name stands for."""

    name: str
    config: DecoderConfig
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer | None
    """None where the checkpoint has none: prompts must then be token ids."""


def load_model(model: str | Path | DecoderConfig, load_format: str = "auto", seed: int = 0) -> LoadedModel:
    """Load `model`: `smollm2`, `tiny`, a checkpoint folder, a GGUF file, a config.json, or a configuration.

    `load_format` `dummy` gives random weights instead of the checkpoint's; a bare configuration has no others.
    """
    if load_format not in LOAD_FORMATS:
        raise OptionError(f"load_format is {load_format!r}; it must be one of {', '.join(LOAD_FORMATS)}")
    if isinstance(model, DecoderConfig):
        if load_format not in ("auto", "dummy"):
            raise OptionError(
                f"a model's configuration alone has only random weights, and load_format is {load_format!r}"
            )
        return LoadedModel("configured", model, dummy_weights(model, seed), _byte_tokenizer(model))
    if model == "tiny":
        return LoadedModel("tiny", TINY, dummy_weights(TINY, seed), ByteTokenizer(TINY.vocab_size))
    if model == "smollm2":
        return _from_gguf("smollm2", smollm2.fetch(), load_format, seed)
    path = Path(model).expanduser()
    if not path.exists():
        raise ModelError(
            f"there is no model {str(model)!r}: it is neither 'smollm2' nor 'tiny', nor a checkpoint folder, "
            "GGUF file or config.json that exists"
        )
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path.stem, path, load_format, seed)
    if path.is_dir():
        return _from_folder(path, load_format, seed)
    if path.suffix == ".json":
        if load_format != "dummy":
            raise OptionError(f"{path} is a configuration without weights; add --load-format dummy for random ones")
        config = DecoderConfig.from_hf(read_json(path))
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return LoadedModel(name, config, dummy_weights(config, seed), _byte_tokenizer(config))
    raise ModelError(f"{path} is neither a checkpoint folder nor a .gguf or config.json file")


def _byte_tokenizer(config: DecoderConfig) -> Tokenizer | None:
    return ByteTokenizer(config.vocab_size) if config.vocab_size >= 258 else None


def _from_gguf(name: str, path: Path, load_format: str, seed: int) -> LoadedModel:
    if load_format == "safetensors":
        raise OptionError(f"load_format is 'safetensors', and {path} is a GGUF file")
    file = gguf.GGUFFile(path)
    config = gguf.decoder_config(file)
    weights = dummy_weights(config, seed) if load_format == "dummy" else gguf.decoder_weights(file, config)
    beside = path.with_name("tokenizer.json")
    if beside.is_file():
        return LoadedModel(name, config, weights, from_json(beside, config.eos_token_ids, config.bos_token_id))
    return LoadedModel(name, config, weights, from_gguf(file.metadata, path))


def _from_folder(folder: Path, load_format: str, seed: int) -> LoadedModel:
    contents = read_json(folder / "config.json")
    config = DecoderConfig.from_hf(contents)
    generation = folder / "generation_config.json"
    if generation.is_file() and isinstance(ends := read_json(generation).get("eos_token_id"), list):
        # Chat models end a turn with a token of its own, and only this file names it.
        config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))))
    if load_format == "gguf":
        raise OptionError(f"load_format is 'gguf', and {folder} is a checkpoint folder; name the .gguf file itself")
    weights: Mapping[str, Tensor]
    if load_format == "dummy":
        weights = dummy_weights(config, seed)
    else:
        how = Quantisation.from_hf(contents)
        weights = Checkpoint(folder)
        if how is not None:
            weights = QuantisedWeights(weights, how)
    vocabulary = folder / "tokenizer.json"
    tokenizer: Tokenizer | None = None
    if vocabulary.is_file():
        tokenizer = from_json(vocabulary, config.eos_token_ids, config.bos_token_id)
    elif load_format == "dummy":
        tokenizer = _byte_tokenizer(config)
    return LoadedModel(folder.name, config, weights, tokenizer)


def dummy_weights(config: DecoderConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights: each depends on (seed, its name, its shape) alone, and keeps activations at unit size."""
    weights = {}
    for name, shape in expected_weights(config):
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
            continue
        digest = hashlib.sha256(f"{seed}/{name}/{shape}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        scale = 1.0 if name == "model.embed_tokens.weight" else shape[-1] ** -0.5
        if name.endswith(".bias"):
            scale = 0.1
        weights[name] = torch.randn(shape, generator=generator) * scale
    return weights
