"""Text to token ids and back: from a GGUF file's metadata, from a tokenizer.json, or plain bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from engine.models.errors import ModelError

__all__ = ["ByteTokenizer", "ChatMessage", "LibraryTokenizer", "Tokenizer", "from_gguf", "from_json"]

ChatMessage = Mapping[str, str]
"""`role` (system, user or assistant) and `content`."""

_CONTROL_TOKEN = 3
"""GGUF's token type for tokens that no text contains."""


class Tokenizer(Protocol):
    """What the engine needs to know of a tokenizer."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        ...

    def chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The prompt that asks for the assistant's answer to `messages`; ModelError where there is no template."""
        ...


class ByteTokenizer:
    """One token a byte of UTF-8: ids 0 to 255; 256 begins and 257 ends a text. Other ids decode to nothing."""

    bos_token_id: int | None = 256
    eos_token_ids: tuple[int, ...] = (257,)

    def __init__(self, vocab_size: int = 320) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: ")


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library, and ChatML where the vocabulary has its two marks."""

    def __init__(
        self,
        inner: Any,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        system_prompt: str | None = None,
        add_bos: bool = False,
    ) -> None:
        self._inner = inner
        self.vocab_size = inner.get_vocab_size()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self._system_prompt = system_prompt
        self._add_bos = add_bos

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(text).ids
        if self._add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        if self._inner.token_to_id("<|im_start|>") is None or self._inner.token_to_id("<|im_end|>") is None:
            raise ModelError(
                "the model's tokenizer has no ChatML marks, and other chat templates are not read; use prompts"
            )
        turns = list(messages)
        if self._system_prompt is not None and (not turns or turns[0]["role"] != "system"):
            turns.insert(0, {"role": "system", "content": self._system_prompt})
        text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
        ids: list[int] = self._inner.encode(text + "<|im_start|>assistant\n").ids
        return ids


def from_gguf(metadata: Mapping[str, Any], path: str | Path) -> LibraryTokenizer:
    """The byte-pair tokenizer in a GGUF file's metadata (model `gpt2`, pre-tokenizer `smollm`)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise ModelError(
            f"the GGUF file {path} has a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}; "
            "only 'gpt2' with 'smollm' is read from GGUF: put a tokenizer.json beside the file"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL_TOKEN]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    return LibraryTokenizer(
        inner,
        metadata.get("tokenizer.ggml.bos_token_id"),
        () if eos is None else (eos,),
        system_prompt=_default_system_prompt(metadata.get("tokenizer.chat_template", "")),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    )


def _default_system_prompt(template: str) -> str | None:
    """The system prompt that a ChatML template puts first when a conversation has none, or None."""
    start = "<|im_start|>system\\n" if "<|im_start|>system\\n" in template else "<|im_start|>system\n"
    if "loop.first" not in template or start not in template:
        return None
    text = template.split(start, 1)[1].split("<|im_end|>", 1)[0]
    return text.replace("\\n", "\n").strip()


def from_json(path: Path, eos_token_ids: tuple[int, ...], bos_token_id: int | None) -> LibraryTokenizer:
    """A Hugging Face `tokenizer.json`."""
    from tokenizers import Tokenizer

    try:
        # The library raises bare Exception for any fault in the file.
        inner = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"cannot read the tokenizer {path}: {error}") from None
    except Exception as error:  # noqa: BLE001
        raise ModelError(f"cannot read the tokenizer {path}: {error}") from None
    return LibraryTokenizer(inner, bos_token_id, eos_token_ids)
