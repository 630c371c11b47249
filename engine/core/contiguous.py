"""The allocators that paging is measured against: each request gets one contiguous run of blocks when it is admitted.

The run has room for all the tokens that the request is expected to have, and never grows, so nobody is ever preempted.
How many that is, the allocator says, as in the paper on PagedAttention (Kwon et al., 2023, section 6.1):

    contiguous-max      max_model_len, as in FasterTransformer and "Orca (Max)"
    contiguous-pow2     the prompt, and the output's length rounded up to a power of two: "Orca (Pow2)"
    contiguous-oracle   the prompt, and the output's length: "Orca (Oracle)"

rounded up to blocks, and never beyond max_model_len. The output's length is `oracle_tokens` where it is known, and
`contiguous-pow2` takes max_tokens where it is not. A run is a limit too: an oracle that promised too little ends its
request at what it promised, with reason `length`. Nothing is shared: there are no prefix hits and no forks.

A request owns its run from `allocate` to `free`. Its table has the blocks that are in use so far, as in a paged pool;
those behind are reserved.

    run      [ in the table: full ][ in the table: partial ][ reserved ][ rounded up by a buddy ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from engine.core.errors import InvalidRequest, InvariantError, NoFreeBlocks
from engine.core.extents import ExtentPool, Run
from engine.core.manager import BlockManager
from engine.core.request import RUNNING, Request
from engine.core.types import NO_LIMIT, BlockId, RequestSpec

__all__ = ["ContiguousManager"]


class ContiguousManager(BlockManager):
    """One run of blocks for each running request."""

    def __init__(
        self, num_blocks: int, block_size: int, allocator: str, placement: str, max_model_len: int, lookahead: int
    ) -> None:
        super().__init__(num_blocks, block_size, False, "blank-first")
        self.allocator = allocator
        self.extents = ExtentPool(num_blocks, placement)
        self.pool = self.extents
        self._max_model_len = max_model_len
        self._lookahead = lookahead
        self._runs: dict[int, Run] = {}
        """By request."""
        self._cannot = 0
        """Slots behind tables that no token of their request can come to."""
        self._external: tuple[int, int] = (0, 0)
        """(size of a run, what it leaves over) that was asked for last; the size is 0 when runs have changed since."""

    # ---- how much

    def _num_outputs(self, spec: RequestSpec) -> int:
        """For how many output tokens a run has room."""
        most = self._max_model_len - spec.num_prompt_tokens
        if self.allocator == "contiguous-max":
            return most
        if self.allocator == "contiguous-oracle":
            return min(spec.oracle_tokens, most)
        length = spec.oracle_tokens or spec.max_tokens
        return min(1 << (length - 1).bit_length(), most)

    def _num_blocks(self, spec: RequestSpec) -> int:
        """Blocks of a run, before a buddy rounds them up."""
        tokens = spec.num_prompt_tokens + self._num_outputs(spec) + self._lookahead
        return -(-min(tokens, self._max_model_len) // self.block_size)

    def limit(self, spec: RequestSpec, cap: int) -> int:
        if spec.n > 1:
            raise InvalidRequest(
                f"n is {spec.n}, but {self.allocator} shares no blocks between sequences; send {spec.n} requests"
            )
        if self.allocator == "contiguous-oracle" and spec.oracle_tokens < 1:
            raise InvalidRequest("the true output length is not known (oracle_tokens), and contiguous-oracle needs it")
        blocks = self._num_blocks(spec)
        if blocks > self.extents.longest_run:
            raise InvalidRequest(
                f"{self.allocator} reserves {blocks} blocks of {self.block_size} in a row for {spec.num_prompt_tokens} "
                f"prompt and {self._num_outputs(spec)} output tokens, and an empty pool has "
                f"{self.extents.longest_run} in a row; it can never fit"
            )
        return min(cap, self._num_outputs(spec))

    def need(self, request: Request, hits: Sequence[BlockId], num_tokens: int) -> int:
        return 0 if request.id in self._runs else self.extents.rounded(self._num_blocks(request.spec))

    def fits(self, request: Request, hits: Sequence[BlockId], num_tokens: int, spare: int = 0) -> bool:
        """Whether a hole has room for the run, and `spare` blocks are left; a running request has its run."""
        if request.id in self._runs:
            return True
        blocks = self._num_blocks(request.spec)
        return self.extents.has_room(blocks) and self.extents.rounded(blocks) + spare <= self.pool.num_free

    def fits_each(self, num: int) -> bool:
        return True

    @property
    def num_growth_blocks(self) -> int:
        return NO_LIMIT

    # ---- to and from requests

    def allocate(self, request: Request, hits: Sequence[BlockId], num_tokens: int) -> None:
        """Give `request` its run, and a table of the first `num_tokens` slots of it. All or nothing.

        Raises:
            NoFreeBlocks: `fits` was not asked first.
        """
        if request.id in self._runs or hits:
            raise InvariantError(f"request {request.id} is given a run, but it has one, or hits", repr(request))
        run = self.extents.take_run(self._num_blocks(request.spec))
        self._runs[request.id] = run
        self._external = (0, 0)
        if self.taken is not None:
            self.taken.extend(BlockId(i) for i in range(run.first, run.first + run.num_blocks))
        self._cannot += self._unreachable(request, run)
        self._extend(request, run, -(-num_tokens // self.block_size))

    def append_slots(self, request: Request, num_tokens: int) -> None:
        self._extend(request, self._runs[request.id], -(-num_tokens // self.block_size))

    def append_block_each(self, requests: Sequence[Request], marks: Sequence[int] = ()) -> list[int]:
        """One more block of its run for each request, in this order; one that is named twice gets two.

        Notes in `run_unreachable` what `reserved_cannot` is after each of the first `marks` requests.
        """
        counts: dict[int, int] = {}
        for request in requests:
            counts[request.id] = counts.get(request.id, 0) + 1
        for request in requests:
            if len(request.table) + counts[request.id] > self._runs[request.id].num_blocks:
                raise NoFreeBlocks(f"request {request.id} grows beyond its run")
        self.run_unreachable = []
        at = 0
        for mark in marks or (len(requests),):
            for request in requests[at:mark]:
                self._extend(request, self._runs[request.id], len(request.table) + 1)
            self.run_unreachable.append(self._cannot)
            at = mark
        return [0] * len(marks)

    def free(self, request: Request, num_written: int, ended: bool) -> None:
        """Take back the run of `request`, whatever has been written to it."""
        run = self._runs.pop(request.id)
        self._external = (0, 0)
        self._cannot -= self._unreachable(request, run)
        self.num_table_blocks -= len(request.table)
        request.table = []
        self.extents.drop_run(run.first)

    def _extend(self, request: Request, run: Run, num: int) -> None:
        """The table has the first `num` blocks of the run, if it has not more already."""
        table = request.table
        have = len(table)
        if num > run.num_blocks:
            raise NoFreeBlocks(f"request {request.id} needs {num} blocks, and its run has {run.num_blocks}")
        if num <= have:
            return
        self._cannot -= self._unreachable(request, run)
        table.extend([BlockId(i) for i in range(run.first + have, run.first + num)])
        self._cannot += self._unreachable(request, run)
        self.num_table_blocks += num - have

    def _unreachable(self, request: Request, run: Run) -> int:
        """Slots of the run behind the table and behind prompt + max_tokens."""
        from_slot = max(request.num_prompt + request.cap, len(request.table) * self.block_size)
        return max(0, run.size * self.block_size - from_slot)

    # ---- what is where

    @property
    def num_reserved_blocks(self) -> int:
        return self.pool.num_blocks - self.pool.num_free - self.num_table_blocks

    @property
    def reserved_cannot(self) -> int:
        return self._cannot

    def external_blocks(self, head: Request) -> int:
        size = self._num_blocks(head.spec)
        if self._external[0] != size:
            self._external = (size, self.extents.too_small_for(size))
        return self._external[1]

    def owned(self, request: Request) -> Sequence[BlockId]:
        run = self._runs.get(request.id)
        return [] if run is None else [BlockId(i) for i in range(run.first, run.first + run.size)]

    def digest(self, requests: Sequence[Request]) -> str:
        """A fingerprint of every run and hole, and the tables of `requests`."""
        state = (self.extents.digest(), [(request.id, self._runs[request.id], request.table) for request in requests])
        return blake2b(repr(state).encode(), digest_size=16).hexdigest()

    def check(self, requests: Sequence[Request], transfers: Mapping[BlockId, int] | None = None) -> None:
        """Every promise about runs, by walking all of them. `requests`: all that are not finished.

        Raises:
            InvariantError: with the state that breaks it.
        """
        self.extents.check()
        running = [request for request in requests if request.state == RUNNING]
        if any(request.table for request in requests if request.state != RUNNING):
            raise InvariantError("a request that does not run holds blocks", repr(requests))
        if sorted(request.id for request in running) != sorted(self._runs):
            raise InvariantError("the running requests and the runs are not one to one", repr(requests))
        if sorted(self._runs.values()) != self.extents.runs():
            raise InvariantError("the pool has other runs than the requests", repr(self._runs))
        for request in running:
            run = self._runs[request.id]
            if request.table != list(range(run.first, run.first + len(request.table))):
                raise InvariantError("a table is not the beginning of its run", repr(request))
            if len(request.table) > run.num_blocks or run.num_blocks != self._num_blocks(request.spec):
                raise InvariantError("a run is not what was reserved, or the table is longer", repr(request))
            if run.num_blocks * self.block_size > self._max_model_len + self.block_size - 1:
                raise InvariantError("a run is longer than the longest request", repr(request))
        listed = sum(len(request.table) for request in running)
        if self.num_table_blocks != listed:
            raise InvariantError(f"{self.num_table_blocks} table entries counted, {listed} found")
        if any(transfers.values() if transfers else ()):
            raise InvariantError("a transfer holds blocks of a contiguous pool", repr(transfers))
