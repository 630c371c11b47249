"""A seeded random Llama of a few hundred kilobytes, for everything that needs no real text."""

from __future__ import annotations

from engine.models.config import DecoderConfig

__all__ = ["TINY", "tiny_config"]


def tiny_config(vocab_size: int = 320, max_position: int = 4096) -> DecoderConfig:
    """Two layers, hidden size 64, four heads over two KV heads; ids 0 to 255 are bytes, 256 begins and 257 ends."""
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=vocab_size,
        max_position=max_position,
        bos_token_id=256,
        eos_token_ids=(257,),
    )


TINY = tiny_config()
