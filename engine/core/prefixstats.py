"""Why prompts were not hit: for each request the tokens asked for, hit, and missed, by reason.

    |-- device hits --|-- host hits --|-- never seen | evicted | other salt --|-- short --|
    0                                                                         limit        prompt

A block of a prompt that was not hit is `evicted` if its content was in the cache before under the same salt and
adapter (and it, or the content before it, has been lost since), `other salt` if it never was but right now is there
under others, and `never seen` otherwise. `short` is what no cache of full blocks can give: the tokens behind the last
full block, and the last block where it ends the prompt, since the last token is always computed. Hits and misses sum to
the prompt.
"""

from __future__ import annotations

from engine.core.host import HostBlocks
from engine.core.index import PrefixIndex
from engine.core.request import Request
from engine.core.types import BlockHash, BlockId, PrefixRow

__all__ = ["PrefixStats"]


class PrefixStats:
    """Keeps a row a request, and remembers every content that was ever published: memory is bounded by the number of
    distinct keys, an entry and a short list for each, and none is forgotten.

    A request counts when it is admitted for the first time, by what it finds then. What it finds when it comes back
    from a preemption is its own, and is left out; so are sequences that fork from it.
    """

    def __init__(self, block_size: int, index: PrefixIndex, host: HostBlocks | None) -> None:
        """`host`: the cache's second tier, if it has one."""
        self._block_size = block_size
        self._index = index
        self._host = host
        self._blocks: dict[BlockHash, list[BlockId]] = {}
        """Every key that was ever published, with the device blocks that hold it, and maybe some that no longer do."""
        self._keys: dict[BlockHash, list[BlockHash]] = {}
        """Content under no salt and no adapter -> the keys under which it was published."""
        self._rows: list[PrefixRow] = []

    def published(self, request: Request, start: int, stop: int) -> None:
        """The blocks `start` to `stop` of a request have been put into the index."""
        key_of = self._index.key_of
        for i in range(start, min(stop, request.identity_blocks)):
            key, block = request.block_key(i), request.table[i]
            self._note(request, i, key)
            self._blocks[key] = [old for old in self._blocks[key] if old != block and key_of(old) == key] + [block]

    def stored(self, request: Request, num_blocks: int) -> None:
        """A swap has put the first blocks of a request into the host tier, also such as the device did not list yet."""
        for i in range(min(num_blocks, request.identity_blocks)):
            self._note(request, i, request.block_key(i))

    def _note(self, request: Request, i: int, key: BlockHash) -> None:
        if key not in self._blocks and request.identity is not None:
            self._blocks[key] = []
            self._keys.setdefault(request.identity.bare_key(i), []).append(key)

    def _is_cached(self, keys: list[BlockHash]) -> bool:
        """Whether any of these is in either tier now."""
        key_of = self._index.key_of
        for key in keys:
            for block in self._blocks[key]:
                if key_of(block) == key:
                    return True
            if self._host is not None and self._host.index.find(key) is not None:
                return True
        return False

    def admitted(self, request: Request, device_blocks: int, host_blocks: int) -> None:
        """A request is about to get so many blocks from the device's cache and, behind them, from the host's."""
        if request.epoch or request.id != request.root_id:
            return
        size = self._block_size
        asked = request.num_prompt
        limit = max(0, (asked - 1) // size)
        evicted = salted = 0
        identity = request.identity
        if identity is not None:
            for i in range(device_blocks + host_blocks, min(limit, request.identity_blocks)):
                if identity.key(i) in self._blocks:
                    evicted += 1
                    continue
                keys = self._keys.get(identity.bare_key(i))
                if keys is None:
                    break  # what follows unseen content has not been seen either
                salted += self._is_cached(keys)
        new = limit - device_blocks - host_blocks - evicted - salted
        self._rows.append(
            PrefixRow(
                request.id,
                request.spec.tenant,
                asked,
                device_blocks * size,
                host_blocks * size,
                new * size,
                evicted * size,
                salted * size,
                asked - limit * size,
            )
        )

    def rows(self) -> list[PrefixRow]:
        """One for each request that was admitted, in the order of their admissions."""
        return list(self._rows)
