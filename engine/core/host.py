"""The blocks of host memory: where swapped requests wait, and where cached content outlives the device's.

Each content has one block here, however many requests have it swapped out. Who owns what: a swapped request owns a
reference to each of its host blocks, from `swap_out` until `release`; a transfer owns one to each block that it reads
or writes, in both tiers, from its start until it ends. A block that nobody refers to is free; where the host is a tier
of the prefix cache its content is kept until the block is needed, and a hit brings it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from engine.core.errors import InvariantError
from engine.core.index import HashIndex, PrefixIndex
from engine.core.pool import BlockPool
from engine.core.types import BlockCopy, BlockHash, BlockId, Transfer

__all__ = ["HostBlocks", "OpenTransfer", "Transfers"]


class HostBlocks:
    """A pool of host blocks, and which content they hold."""

    def __init__(self, num_blocks: int, keeps: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = HashIndex()
        self.keeps = keeps
        """Whether content outlives its last reference (the host is a tier of the prefix cache)."""
        self._copied: dict[BlockId, BlockId] = {}
        """Device block -> host block, of the copies out of the step being planned."""
        self._out: list[BlockCopy] = []
        """Copies out that no plan has been given yet."""
        self._read: set[BlockId] = set()
        """Host blocks that the plan being made copies to the device."""

    def begin_step(self) -> None:
        """Another step is being planned: from now on device blocks may hold something else."""
        if self._copied:
            self._copied = {}

    def swap_out(self, blocks: Sequence[BlockId], keys: Sequence[BlockHash | None]) -> list[BlockId] | None:
        """Host blocks for device `blocks`, one reference each; copies fill those whose content is not here yet.

        `keys` names the content of each block; None: nobody else can be known to have it, except by sharing the block.
        The copies belong to the next plan that runs, before anything is written to a device block again. None, and
        nothing changed: there is no room.
        """
        found: list[BlockId | None] = []
        for block, key in zip(blocks, keys, strict=True):
            host = self._copied.get(block)
            if host is None and key is not None:
                host = self.index.find(key)
            found.append(host)
        here = [host for host in found if host is not None]
        revived = {host for host in here if self.pool.refs(host) == 0}
        missing = found.count(None)
        if missing + len(revived) > self.pool.num_free:
            return None
        self.pool.share(here)
        new = self._take(missing)
        table: list[BlockId] = []
        taken = 0
        for block, key, host in zip(blocks, keys, found, strict=True):
            if host is None:
                host = new[taken]
                taken += 1
                self._out.append(BlockCopy(block, host))
                self._copied[block] = host
                if key is not None:
                    self.hold(key, host)
            table.append(host)
        return table

    def plan_out(self) -> tuple[BlockCopy, ...]:
        """The copies out that the plan being made has to begin with."""
        copies = tuple(self._out)
        self._out = []
        self._read.clear()
        return copies

    def swap_in(self, table: Sequence[BlockId], start: int) -> Sequence[BlockId]:
        """A swapped request has device blocks again: it gives up its host blocks, `table`. Returns those from `start`
        on, which the plan being made copies to the device."""
        sources = table[start:]
        self._read.update(sources)
        self.release(table)
        return sources

    def match(self, key: Callable[[int], BlockHash], start: int, stop: int) -> list[BlockId]:
        """Host blocks for a request's block positions from `start` on, below `stop`, up to the first miss. Pure."""
        hits: list[BlockId] = []
        for i in range(start, stop):
            host = self.index.find(key(i))
            if host is None:
                break
            hits.append(host)
        return hits

    def take(self) -> BlockId | None:
        """One block, and the reference to it; None if all are in use."""
        return self._take(1)[0] if self.pool.num_free else None

    def hold(self, key: BlockHash, host: BlockId) -> None:
        """`host` holds (or will, once the step being planned has begun) the content named by `key`."""
        self.index.insert(key, None, host)
        if self.keeps:
            self.pool.keep([host])

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Give back one reference to each; the last block first, as in a table."""
        blocks = list(reversed(blocks))
        self.pool.drop(blocks)
        if not self.keeps:
            self.index.remove([block for block in dict.fromkeys(blocks) if self.pool.refs(block) == 0])

    def _take(self, num: int) -> list[BlockId]:
        blocks, evicted = self.pool.take(num)
        self.index.remove(evicted)
        if self._out and blocks:
            # Whoever these were to be copied for is gone, unless the same plan brings them back.
            lost = set(blocks) - self._read
            self._out = [copy for copy in self._out if copy.dst not in lost]
        return blocks

    def digest(self) -> str:
        """A fingerprint of every host block's whereabouts."""
        pool = self.pool
        refs = [pool.refs(BlockId(i)) for i in range(pool.num_blocks)]
        entries = sorted(self.index.entries(), key=lambda entry: entry[1])
        return blake2b(repr((refs, pool.free_order(), entries, self._out)).encode(), digest_size=16).hexdigest()

    def check(self, owners: Sequence[Sequence[BlockId]]) -> None:
        """References are those of `owners` (one list of blocks each), and contents are listed once.

        Raises:
            InvariantError: with the state that breaks it.
        """
        self.pool.check()
        count = [0] * self.pool.num_blocks
        for blocks in owners:
            for block in blocks:
                count[block] += 1
        for i, owned in enumerate(count):
            block = BlockId(i)
            if self.pool.refs(block) != owned:
                raise InvariantError(f"host block {i} has {self.pool.refs(block)} references and {owned} owners")
            listed = self.index.key_of(block) is not None
            if listed and not owned and not self.keeps:
                raise InvariantError(f"host block {i} is free and listed, but the host keeps nothing")
            if self.pool.is_kept(block) != (listed and self.keeps):
                raise InvariantError(f"host block {i} is kept and not listed, or the other way round")
        self.index.check()
        for key, blocks in self.index.entries():
            if len(blocks) > 1:
                raise InvariantError(f"host blocks {blocks} hold the same content", str(key))


class OpenTransfer:
    """A transfer that has begun and not ended."""

    __slots__ = ("device", "epoch", "keys", "request", "since", "transfer")

    def __init__(
        self,
        transfer: Transfer,
        since: int,
        keys: list[BlockHash],
        device: Sequence[BlockId],
        request: int,
        epoch: int,
    ) -> None:
        self.transfer = transfer
        self.since = since
        """When it was planned, in ns."""
        self.keys = keys
        """Of a store: the content of each copy."""
        self.device = device
        """The device blocks that it holds, none before those that a hit on it goes through."""
        self.request = request
        """Of a load: who waits for it, and that one's epoch."""
        self.epoch = epoch


class Transfers:
    """Transfers between the tiers. Each holds its blocks until it is done, has failed, or its lease is over."""

    def __init__(self, host: HostBlocks, device: BlockPool, lease_ns: int) -> None:
        self.host = host
        self._device = device
        self._lease_ns = lease_ns
        self._next_id = 0
        self.open: dict[int, OpenTransfer] = {}
        """By id, and so by age."""
        self.device_refs: dict[BlockId, int] = {}
        """References to device blocks that transfers hold."""
        self._storing: set[BlockHash] = set()

    def store(self, contents: Sequence[tuple[BlockHash, BlockId]], index: PrefixIndex, now: int) -> Transfer | None:
        """Begin to copy these device blocks to the host: those whose content is neither there nor on its way.

        As many as the host has room for. The blocks before them in `index` are held, too: none may be evicted before
        those that are behind it. None: nothing is to be copied.
        """
        held: dict[BlockId, None] = {}
        copies: list[BlockCopy] = []
        keys: list[BlockHash] = []
        for key, block in contents:
            if key in self._storing or self.host.index.find(key) is not None:
                continue
            host = self.host.take()
            if host is None:
                break
            copies.append(BlockCopy(block, host))
            keys.append(key)
            held.update(dict.fromkeys(index.ancestors(block)))
            held[block] = None
            self._storing.add(key)
        if not copies:
            return None
        return self._begin(False, copies, keys, -1, 0, now, list(held))

    def load(
        self, request: int, epoch: int, sources: Sequence[BlockId], targets: Sequence[BlockId], now: int
    ) -> Transfer:
        """Begin to copy host blocks to the device blocks of a request that waits for them."""
        self.host.pool.share(sources)
        copies = [BlockCopy(source, target) for source, target in zip(sources, targets, strict=True)]
        return self._begin(True, copies, [], request, epoch, now, targets)

    def _begin(
        self,
        load: bool,
        copies: list[BlockCopy],
        keys: list[BlockHash],
        request: int,
        epoch: int,
        now: int,
        device: Sequence[BlockId],
    ) -> Transfer:
        self._device.share(device)
        for block in device:
            self.device_refs[block] = self.device_refs.get(block, 0) + 1
        transfer = Transfer(self._next_id, load, tuple(copies))
        self._next_id += 1
        self.open[transfer.id] = OpenTransfer(transfer, now, keys, device, request, epoch)
        return transfer

    def end(self, id: int, ok: bool) -> OpenTransfer | None:
        """A transfer has ended: it lets go of its blocks, and what it stored can be hit. None: it had ended before."""
        entry = self.open.pop(id, None)
        if entry is None:
            return None
        copies = entry.transfer.copies
        load = entry.transfer.load
        host = [copy.src if load else copy.dst for copy in copies]
        for key, block in zip(entry.keys, host, strict=False):
            self._storing.discard(key)
            # A swap may have brought the same content meanwhile; then this copy is not needed.
            if ok and self.host.index.find(key) is None:
                self.host.hold(key, block)
        self.host.release(host)
        for block in entry.device:
            left = self.device_refs[block] - 1
            if left:
                self.device_refs[block] = left
            else:
                del self.device_refs[block]
        self._device.drop(list(reversed(entry.device)))
        return entry

    def expired(self, now: int) -> list[int]:
        """Transfers whose lease is over."""
        over: list[int] = []
        for id, entry in self.open.items():
            if entry.since + self._lease_ns > now:
                break
            over.append(id)
        return over

    def blocks_held_alone(self) -> int:
        """Device blocks that only transfers refer to."""
        refs = self._device.refs
        return sum(1 for block, held in self.device_refs.items() if refs(block) == held)
