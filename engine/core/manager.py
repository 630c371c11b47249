"""Gives blocks to requests and takes them back.

Who owns what: a request owns one reference to each block of its table, from `allocate`, `append_slots` or `fork` until
`free`, which is the only way out. A block that nobody refers to belongs to the pool; while its content is kept, the
index still lists it and a hit brings it back.

    tokens   |-- hits --|-- computed by this request --|-- lookahead --|
    blocks   [  shared ][ own, full ][ own, partial    ][ reserved     ]
    index      listed     listed once their step is planned (same-step `share`) or done (`off`, `defer`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from engine.core.errors import InvariantError, NoFreeBlocks
from engine.core.index import HashIndex, PrefixIndex
from engine.core.policies import Eviction
from engine.core.pool import BlockPool
from engine.core.prefixstats import PrefixStats
from engine.core.radix import RadixIndex
from engine.core.ranked import RankedOrder
from engine.core.request import RUNNING, Request
from engine.core.types import BlockCopy, BlockHash, BlockId, RequestSpec

__all__ = ["BlockManager"]


class BlockManager:
    """Block tables over a pool and a prefix index."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        free_order: str,
        prefix_index: str = "hash",
        eviction: Eviction | None = None,
    ) -> None:
        """`eviction`: which cached block is given up; None: the one that was used longest ago."""
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.index: PrefixIndex = RadixIndex() if prefix_index == "radix" else HashIndex()
        self.ranked: RankedOrder | None = None
        if eviction is not None and prefix_caching:
            self.ranked = RankedOrder(num_blocks, block_size, self.index, eviction)
        self.pool = BlockPool(num_blocks, free_order, self.ranked)
        self.num_table_blocks = 0
        """Sum of the lengths of all block tables."""
        self.num_dead = 0
        """Kept blocks that no key leads to: private content of requests that have ended."""
        self.taken: list[BlockId] | None = None
        """Where set to a list, every block that is taken is noted in it."""
        self.evicted: list[BlockId] | None = None
        """Where set to a list, every block that is taken with content that could still be hit is noted in it."""
        self.cow: dict[int, Request] = {}
        """Requests that may share the block that they write to next, since they forked: it is copied first."""
        self.new_keys: list[tuple[BlockHash, BlockId]] | None = None
        """Where set to a list, whatever is published is noted in it."""
        self.stats: PrefixStats | None = None
        """Where set, it is told of whatever is published."""
        self.run_unreachable: list[int] = []
        """`reserved_cannot` after each step of the last `append_block_each`, where runs are reserved."""
        self._copies: list[BlockCopy] = []
        self._copy_sources: set[BlockId] = set()
        self._leases: list[BlockId] = []
        """Sources of this step's copies that nobody else refers to any more: kept from being a destination, too."""

    def lookup(self, request: Request) -> list[BlockId]:
        """The cached blocks that `request` could start with. Pure.

        The last known token is always computed, since its logits are needed: at most known - 1 tokens are hits.
        """
        if not self.prefix_caching:
            return []
        stop = (request.known - 1) // self.block_size
        if request.epoch == 0 and request.shared_blocks < stop:
            stop = request.shared_blocks  # what is private to it can be cached only once it has run
        if request.key_blocks < stop:
            stop = request.key_blocks
        return self.index.match(request.block_key, stop) if stop > 0 else []

    def limit(self, spec: RequestSpec, cap: int) -> int:
        """How many output tokens a request of up to `cap` can be given.

        Raises:
            InvalidRequest: it can never be served.
        """
        return cap

    def need(self, request: Request, hits: Sequence[BlockId], num_tokens: int) -> int:
        """How many free blocks it takes until `request`, starting with `hits`, has slots for `num_tokens`.

        The only place that counts blocks. A hit that nobody refers to is itself one of the free blocks, and a shared
        block that is to be written takes a copy.
        """
        blocks = -(-num_tokens // self.block_size) - len(request.table) - len(hits)
        if blocks < 0:
            blocks = 0
        if request.id in self.cow and self._shared_last(request) >= 0:
            blocks += 1
        if hits and self.pool.num_kept_free:
            refs = self.pool.refs
            for block in hits:
                if refs(block) == 0:
                    blocks += 1
        return blocks

    def fits(self, request: Request, hits: Sequence[BlockId], num_tokens: int, spare: int = 0) -> bool:
        """Whether `request`, starting with `hits`, can have slots for `num_tokens`, and leave `spare` blocks free."""
        return self.need(request, hits, num_tokens) + spare <= self.pool.num_free

    def fits_each(self, num: int) -> bool:
        """Whether `num` running requests can have one more block each."""
        return num <= self.pool.num_free

    @property
    def num_growth_blocks(self) -> int:
        """How many blocks running requests can have beyond those in their tables, if nobody gives any back."""
        return self.pool.num_free

    def allocate(self, request: Request, hits: Sequence[BlockId], num_tokens: int) -> None:
        """Give `request` its hits, and new blocks up to `num_tokens` slots. All or nothing.

        Raises:
            NoFreeBlocks: `need` was not asked first.
        """
        if request.table:
            raise InvariantError(f"request {request.id} is given a table, but it has one", repr(request))
        need = self.need(request, hits, num_tokens)
        if need > self.pool.num_free:
            raise NoFreeBlocks(f"request {request.id} needs {need} free blocks, and {self.pool.num_free} are free")
        self.pool.share(hits)  # first, so that no hit is evicted for the blocks beyond it
        num = -(-num_tokens // self.block_size) - len(hits)
        request.table = [*hits, *self._take(num)] if num > 0 else list(hits)
        request.published = len(hits)
        self.num_table_blocks += len(request.table)

    def append_slots(self, request: Request, num_tokens: int) -> None:
        """Extend the table of `request` so that it has slots for `num_tokens` in all. All or nothing.

        The block that it writes to next is copied first if another request has it too; the last one to ask keeps it.
        """
        num = max(0, -(-num_tokens // self.block_size) - len(request.table))
        shared = -1
        if request.id in self.cow:
            shared = self._shared_last(request)
        if num > 0 or shared >= 0:
            blocks = self._take(num + (shared >= 0))
            if shared >= 0:
                source = request.table[shared]
                request.table[shared] = blocks.pop(0)
                self._copies.append(BlockCopy(source, request.table[shared]))
                self._copy_sources.add(source)
                self.pool.drop([source])
            request.table.extend(blocks)
            self.num_table_blocks += num
        self.cow.pop(request.id, None)

    def _shared_last(self, request: Request) -> int:
        """The place in the table of the block that `request` writes to next, if others have it too; or -1."""
        place = request.sched // self.block_size
        if place < len(request.table) and self.pool.refs(request.table[place]) > 1:
            return place
        return -1

    def fork(self, parent: Request, child: Request) -> None:
        """`child` gets a reference to every block that holds a token of `parent`."""
        child.table = parent.table[: -(-parent.sched // self.block_size)]
        child.published = parent.published
        self.pool.share(child.table)
        self.num_table_blocks += len(child.table)
        self.cow[parent.id] = parent
        self.cow[child.id] = child

    def reorder(self, members: Sequence[Request], sources: Sequence[Request]) -> None:
        """Each of `members` goes on from the blocks of the one at its place in `sources`; all have as many tokens."""
        tables = [source.table[: -(-source.sched // self.block_size)] for source in sources]
        published = [source.published for source in sources]
        for table in tables:
            self.pool.share(table)
        for i, member in enumerate(members):
            member.table.reverse()
            self.pool.drop(member.table)
            self.num_table_blocks += len(tables[i]) - len(member.table)
            member.table = tables[i]
            member.published = published[i]
            self.cow[member.id] = member

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Give back the blocks of `request` behind its first `num_tokens` tokens."""
        keep = -(-num_tokens // self.block_size)
        rest = request.table[keep:]
        del request.table[keep:]
        rest.reverse()
        self.pool.drop(rest)
        self.num_table_blocks -= len(rest)

    def end_step(self) -> list[BlockCopy]:
        """The copies that the step being planned has to make; none of their sources was given to somebody since."""
        copies, self._copies = self._copies, []
        self._copy_sources.clear()
        if self._leases:
            self.pool.drop(self._leases)
            self._leases = []
        return copies

    def append_block_each(self, requests: Sequence[Request], marks: Sequence[int] = ()) -> list[int]:
        """One more block for each request, in this order; one that is named twice gets two.

        Returns how many kept blocks are free after each of the first `marks` requests.
        """
        pool = self.pool
        before = pool.num_kept_free
        blocks, evicted = pool.take(len(requests))
        self._evict(blocks, evicted)
        for request, block in zip(requests, blocks, strict=True):
            request.table.append(block)
        self.num_table_blocks += len(requests)
        if not evicted:
            return [before] * len(marks)
        blank = len(blocks) - len(evicted)
        if not blank or blocks[blank:] == evicted:
            return [before if mark <= blank else before - (mark - blank) for mark in marks]
        lost = set(evicted)
        after: list[int] = []
        at = 0
        for mark in marks:
            before -= len(lost.intersection(blocks[at:mark]))
            after.append(before)
            at = mark
        return after

    def publish(self, request: Request, num_tokens: int) -> None:
        """The blocks of the first `num_tokens` tokens may be hit from now on.

        Private blocks need no entry while their request runs, since nobody else can ask for them; `free` sees to
        them.
        """
        if not self.prefix_caching:
            return
        stop = num_tokens // self.block_size
        if stop > request.shared_blocks:
            stop = request.shared_blocks
        if stop > request.published:
            self._insert(request, stop)

    def free(self, request: Request, num_written: int, ended: bool) -> None:
        """Take back all blocks of `request`, last first.

        `num_written`: leading tokens whose KV is written, or will be by a plan that will run, and whose values were
        known when that plan was made. Their full blocks stay in the cache. `ended`: it will not come back.
        """
        table = request.table
        dead: list[BlockId] = []
        if self.prefix_caching:
            stop = min(num_written // self.block_size, request.key_blocks)
            if ended:
                if request.published < request.shared_blocks:
                    self._insert(request, min(stop, request.shared_blocks))
                dead = table[request.published : stop]
                self.num_dead += len(dead)
            else:
                self._insert(request, stop)
        if self.ranked is not None:
            self.ranked.used(table, request.spec.priority)
        table.reverse()
        if self._copy_sources:
            last = [block for block in table if block in self._copy_sources and self.pool.refs(block) == 1]
            self.pool.share(last)
            self._leases += last
        self.cow.pop(request.id, None)
        self.pool.drop(table, keep=dead)
        self.num_table_blocks -= len(table)
        request.table = []
        request.published = 0

    def _insert(self, request: Request, stop: int) -> None:
        start = request.published
        if stop <= start:
            return
        table = request.table
        parent = table[start - 1] if start else None
        insert = self.index.insert
        for i in range(start, stop):
            key = request.block_key(i)
            insert(key, parent, table[i])
            if self.ranked is not None:
                self.ranked.computed(table[i])
                self.ranked.published(key)
            if self.new_keys is not None:
                self.new_keys.append((key, table[i]))
            parent = table[i]
        if self.stats is not None:
            self.stats.published(request, start, stop)
        self.pool.keep(table[start:stop])
        request.published = stop

    def _take(self, num: int) -> list[BlockId]:
        blocks, evicted = self.pool.take(num)
        self._evict(blocks, evicted)
        return blocks

    def _evict(self, blocks: Sequence[BlockId], evicted: Sequence[BlockId]) -> None:
        """`blocks` were taken; what `evicted` among them held is lost."""
        if evicted and self.ranked is None:  # a ranked order has taken them out of the index itself
            self.num_dead -= len(evicted) - self.index.remove(evicted)
        if self.taken is not None:
            self.taken.extend(blocks)
        if self.evicted is not None:
            self.evicted.extend(evicted)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks of requests that are in no table yet. None in a paged pool."""
        return 0

    @property
    def reserved_cannot(self) -> int:
        """Slots of them that no token can come to, since they lie beyond prompt + max_tokens."""
        return 0

    def external_blocks(self, head: Request) -> int:
        """Free blocks in holes that have no room for `head`. None in a paged pool."""
        return 0

    def owned(self, request: Request) -> Sequence[BlockId]:
        """All blocks of a request: its table, and what is reserved behind it."""
        return request.table

    def digest(self, requests: Sequence[Request]) -> str:
        """A fingerprint of every block's whereabouts: references, free order, index, and the tables of `requests`."""
        pool = self.pool
        state = (
            [pool.refs(BlockId(i)) for i in range(pool.num_blocks)],
            [bool(pool.is_kept(BlockId(i))) for i in range(pool.num_blocks)],
            pool.free_order(),
            sorted(self.index.entries(), key=lambda entry: entry[1]),  # only the order within a key matters
            [(request.id, request.table, request.published) for request in requests],
        )
        return blake2b(repr(state).encode(), digest_size=16).hexdigest()

    def check(self, requests: Sequence[Request], transfers: Mapping[BlockId, int] | None = None) -> None:
        """Every promise about blocks, by walking all of them. `requests`: all that are not finished; `transfers`: the
        references that transfers hold.

        Raises:
            InvariantError: with the state that breaks it.
        """
        pool = self.pool
        pool.check()
        self.index.check()
        owners = [0] * pool.num_blocks
        for request in requests:
            if request.table and request.state != RUNNING:
                raise InvariantError("a request that does not run holds blocks", repr(request))
            for block in request.table:
                owners[block] += 1
            if len(set(request.table)) != len(request.table):
                raise InvariantError("a block is listed twice in one table", repr(request))
        for block, held in (transfers or {}).items():
            owners[block] += held
        for i in range(pool.num_blocks):
            block = BlockId(i)
            if pool.refs(block) != owners[i]:
                raise InvariantError(f"block {i} has {pool.refs(block)} references and {owners[i]} owners")
            listed = self.index.key_of(block) is not None
            if listed and not pool.is_kept(block):
                raise InvariantError(f"block {i} is listed in the index, but the pool does not keep it")
            if owners[i] and pool.is_kept(block) and not listed:
                raise InvariantError(f"block {i} is in use and kept, but the index does not list it")
        kept = sum(1 for i in range(pool.num_blocks) if pool.is_kept(BlockId(i)))
        if kept != len(self.index) + self.num_dead:
            raise InvariantError(f"{kept} blocks are kept, but {len(self.index)} listed and {self.num_dead} dead")
        entries = sum(len(request.table) for request in requests)
        if self.num_table_blocks != entries:
            raise InvariantError(f"{self.num_table_blocks} table entries counted, {entries} found")
        for request in requests:
            for i in range(min(request.published, len(request.table))):
                if self.index.key_of(request.table[i]) != request.block_key(i):
                    raise InvariantError(f"block {i} of the table is listed under another key", repr(request))
