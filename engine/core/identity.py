"""What a block's content is: two full blocks with equal keys hold the same KV.

A key stands for everything that decides the KV of its block: all tokens from the start of the request to the end
of the block, the tenant's salt and the adapter. Keys are computed when asked for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b

from engine.core.types import NO_LIMIT, BlockHash

__all__ = ["SpanIdentity", "TokenIdentity"]

_POSITION_BITS = 32


class TokenIdentity:
    """The identity of real tokens: a chain of 128-bit BLAKE2b digests, each over its parent and one block of tokens.

    `salt` keeps tenants apart and `adapter` keeps adapters apart; both enter the chain's root as tagged,
    length-prefixed bytes, so no choice of one can imitate the other.
    """

    def __init__(self, tokens: Sequence[int], block_size: int, salt: bytes = b"", adapter: bytes = b"") -> None:
        self.tokens: list[int] = list(tokens)
        """Prompt and generated tokens so far."""
        self._block_size = block_size
        root = b"kvtwin/1"
        for tag, value in ((b"salt", salt), (b"adapter", adapter)):
            root += tag + len(value).to_bytes(8, "little") + value
        self._root = blake2b(root, digest_size=16).digest()
        self._keys: list[bytes] = []
        self._bare: TokenIdentity | None = None
        """The same tokens without salt and adapter, where somebody asked."""

    @property
    def shared_tokens(self) -> int:
        return NO_LIMIT

    @property
    def shares_output(self) -> bool:
        return True

    def key(self, index: int) -> BlockHash:
        keys = self._keys
        while len(keys) <= index:
            i = len(keys)
            block = self.tokens[i * self._block_size : (i + 1) * self._block_size]
            if len(block) < self._block_size:
                raise IndexError(f"block {i} is not full: {len(self.tokens)} tokens are known")
            parent = keys[-1] if keys else self._root
            keys.append(blake2b(parent + array("q", block).tobytes(), digest_size=16).digest())
        return BlockHash(keys[index])

    def bare_key(self, index: int) -> BlockHash:
        if self._root == _BARE_ROOT:
            return self.key(index)
        if self._bare is None:
            self._bare = TokenIdentity((), self._block_size)
            self._bare.tokens = self.tokens  # the same list: it grows with this one
        return self._bare.key(index)

    def append(self, token: int) -> None:
        self.tokens.append(token)

    def fork(self) -> TokenIdentity:
        child = TokenIdentity(self.tokens, self._block_size)
        child._root = self._root
        child._keys = list(self._keys)
        return child


_BARE_ROOT = TokenIdentity((), 1)._root


class SpanIdentity:
    """The identity of a trace's request, which has no tokens: a list of (span id, number of tokens).

    A span id names the whole prefix up to the span's end, so the last token of a block, given as (span id, position in
    the prompt), already names all of the block's content. Any block size works on any trace.

    `output_id` names the generated tokens, so that a later request whose spans contain it can hit them; without it,
    they are private. `shared_tokens` may be given smaller than the prompt where it is known that nobody else has
    the rest: such blocks need no entry in the index while their request runs.
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        block_size: int,
        output_id: int | None = None,
        salt: int = 0,
        shared_tokens: int | None = None,
    ) -> None:
        self._ids = [span for span, _ in spans]
        self._starts: list[int] = []
        at = 0
        for _, tokens in spans:
            self._starts.append(at)
            at += tokens
        self._prompt_tokens = at
        self._block_size = block_size
        self._output_id = output_id
        self._salt = salt
        self._shared = at if shared_tokens is None else shared_tokens
        if output_id is not None:
            self._ids.append(output_id)
            self._starts.append(at)
            self._shared = NO_LIMIT

    @property
    def shared_tokens(self) -> int:
        return self._shared

    @property
    def shares_output(self) -> bool:
        return self._output_id is not None

    def key(self, index: int) -> BlockHash:
        last = (index + 1) * self._block_size - 1
        if last >= self._prompt_tokens and self._output_id is None:
            raise IndexError(f"block {index} reaches beyond the {self._prompt_tokens} tokens that have an identity")
        span = bisect_right(self._starts, last) - 1
        name = (self._ids[span] << _POSITION_BITS) | last
        return BlockHash((self._salt, name) if self._salt else name)

    def bare_key(self, index: int) -> BlockHash:
        key = self.key(index)
        return BlockHash(key[1]) if isinstance(key, tuple) else key

    def append(self, token: int) -> None:
        """Tokens carry no content here."""

    def fork(self) -> SpanIdentity:
        """The same prompt. Its own output has no name: nobody else has it."""
        ends = [*self._starts[1:], self._prompt_tokens]
        spans = [(id, end - start) for id, start, end in zip(self._ids, self._starts, ends, strict=False)]
        if self._output_id is not None:
            spans.pop()
        return SpanIdentity(spans, self._block_size, None, self._salt, min(self._shared, self._prompt_tokens))
