"""Why prompts were not hit: for each request the tokens asked for, hit, and missed, by reason.

    |-- device hits --|-- host hits --|-- never seen | evicted | other salt --|-- short --|
    0                                                                         limit        prompt

A block of a prompt that was not hit is `evicted` if its content was in the cache before under the same salt and
adapter (and it, or the content before it, has been lost since), `other salt` if only under others, and `never seen`
otherwise. `short` is what no cache of full blocks can give: the tokens behind the last full block, and the last block
where it ends the prompt, since the last token is always computed. Hits and misses sum to the prompt.
"""

from __future__ import annotations

from engine.core.request import Request
from engine.core.types import BlockHash, PrefixRow

__all__ = ["PrefixStats"]


class PrefixStats:
    """Keeps a row a request, and remembers every content that was ever published: two set entries a distinct block.

    A request counts when it is admitted for the first time, by what it finds then. What it finds when it comes back
    from a preemption is its own, and is left out; so are sequences that fork from it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seen: set[BlockHash] = set()
        self._bare: set[BlockHash] = set()
        """The same contents under no salt and no adapter."""
        self._rows: list[PrefixRow] = []

    def published(self, request: Request, start: int, stop: int) -> None:
        """The blocks `start` to `stop` of a request have been put into the index."""
        for i in range(start, min(stop, request.identity_blocks)):
            key = request.block_key(i)
            if key not in self._seen:
                self._seen.add(key)
                if request.identity is not None:
                    self._bare.add(request.identity.bare_key(i))

    def admitted(self, request: Request, device_blocks: int, host_blocks: int) -> None:
        """A request starts with so many blocks from the device's cache and, behind them, from the host's."""
        if request.epoch:
            return
        size = self._block_size
        asked = request.num_prompt
        limit = max(0, (asked - 1) // size)
        evicted = salted = 0
        identity = request.identity
        if identity is not None:
            for i in range(device_blocks + host_blocks, min(limit, request.identity_blocks)):
                if identity.key(i) in self._seen:
                    evicted += 1
                elif identity.bare_key(i) in self._bare:
                    salted += 1
                else:
                    break  # what follows unseen content has not been seen either
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
