"""Host blocks and transfers against memory that is really copied, in any order of calls that a scheduler could make."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.host import HostBlocks, Transfers
from engine.core.index import HashIndex
from engine.core.pool import BlockPool
from engine.core.types import BlockCopy, BlockHash, BlockId, Transfer

Content = str | int
"""A prefix of letters, which others may have too, or a number that nobody else has."""


class Sequence:
    """What each of its blocks must hold, and where they are: on the device, or swapped out."""

    def __init__(self, contents: list[Content]) -> None:
        self.contents = contents
        self.device: list[BlockId] = []
        self.host: list[BlockId] = []
        self.writes = 0
        """Leading blocks that hold their content already."""

    def keys(self) -> list[BlockHash | None]:
        return [BlockHash(content) if isinstance(content, str) else None for content in self.contents]


class HostMachine(RuleBasedStateMachine):
    """Plans are made of swaps, stores and loads; each that runs does its copies in the order of the phases."""

    @initialize(
        device=st.integers(3, 9),
        host=st.integers(2, 8),
        keeps=st.sampled_from([True, True, False]),
        lease=st.integers(1, 6),
    )
    def begin(self, device: int, host: int, keeps: bool, lease: int) -> None:
        self.pool = BlockPool(device)
        self.index = HashIndex()
        self.host = HostBlocks(host, keeps)
        self.transfers = Transfers(self.host, self.pool, lease)
        self.lease = lease
        self.now = 0
        self.live: list[Sequence] = []
        self.memory: list[Content | None] = [None] * device
        self.host_memory: list[Content | None] = [None] * host
        self.swap_in: list[BlockCopy] = []
        self.begun: list[Transfer] = []
        self.loads: dict[int, Sequence] = {}
        self.running: dict[int, tuple[int, list[Content | None]]] = {}
        """Open transfers: when they began, and what their sources held."""
        self.transfer_of: dict[int, Transfer] = {}
        self.admitted = False
        """Whether the plan being made has admitted somebody: then it preempts nobody."""
        self.number = 0

    # ---- the device, as a manager would use it

    def take(self, num: int) -> list[BlockId]:
        blocks, evicted = self.pool.take(num)
        self.index.remove(evicted)
        return blocks

    def publish(self, sequence: Sequence) -> None:
        for i, content in enumerate(sequence.contents):
            block = sequence.device[i]
            if not isinstance(content, str):
                break
            if self.index.key_of(block) is None:
                self.index.insert(BlockHash(content), sequence.device[i - 1] if i else None, block)
                self.pool.keep([block])

    def leave(self, sequence: Sequence) -> None:
        self.pool.drop(list(reversed(sequence.device)))
        sequence.device = []

    def settled(self) -> list[Sequence]:
        """Those on the device that nothing in the plan being made writes for."""
        loading = [id(sequence) for sequence in self.loads.values()]
        return [s for s in self.live if s.device and s.writes == len(s.contents) and id(s) not in loading]

    @rule(letters=st.lists(st.sampled_from("ab"), min_size=1, max_size=3), tail=st.booleans(), runs=st.booleans())
    def start(self, letters: list[str], tail: bool, runs: bool) -> None:
        contents: list[Content] = ["".join(letters[: i + 1]) for i in range(len(letters))]
        if tail:
            self.number += 1
            contents.append(self.number)
        if len(contents) <= self.pool.num_free:
            sequence = Sequence(contents)
            sequence.device = self.take(len(contents))
            self.live.append(sequence)
            self.admitted = True
            if runs:
                self.plan(True)

    @precondition(lambda self: bool(self.settled()))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.settled()))
        child = Sequence(list(parent.contents))
        child.device, child.writes = list(parent.device), parent.writes
        self.pool.share(child.device)
        self.live.append(child)

    @precondition(lambda self: not self.admitted and bool(self.settled()))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        """P11: room is counted as a list would count it; without room nothing changes."""
        sequence = data.draw(st.sampled_from(self.settled()))
        before = self.host.digest()
        room = self.host.pool.num_free
        table = self.host.swap_out(sequence.device, sequence.keys())
        if table is None:
            assert self.host.digest() == before
            assert room < len(sequence.device)
        else:
            assert len(table) == len(sequence.device)
            sequence.host = table
            self.leave(sequence)

    @precondition(lambda self: any(s.host for s in self.live))
    @rule(data=st.data())
    def swap_in_again(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.live if s.host]))
        if len(sequence.contents) > self.pool.num_free:
            return
        sequence.device = self.take(len(sequence.contents))
        sources = self.host.swap_in(sequence.host, 0)
        self.swap_in += [BlockCopy(a, b) for a, b in zip(sources, sequence.device, strict=True)]
        sequence.host = []
        sequence.writes = 0
        self.admitted = True
        if data.draw(st.booleans()):
            self.plan(True)

    @precondition(lambda self: bool(self.live))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Between two plans; whoever has something in the plan being made is not asked."""
        if self.admitted or self.swap_in or data.draw(st.integers(0, 2)):
            return
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.host.release(sequence.host)
        self.leave(sequence)
        for number, loading in list(self.loads.items()):
            if loading is sequence:
                del self.loads[number]

    # ---- transfers

    @rule(letters=st.lists(st.sampled_from("ab"), min_size=1, max_size=3))
    def load(self, letters: list[str]) -> None:
        contents: list[Content] = ["".join(letters[: i + 1]) for i in range(len(letters))]
        sources = self.host.match(lambda i: BlockHash(contents[i]), 0, len(contents))
        if not self.host.keeps or not sources or len(sources) > self.pool.num_free:
            return
        sequence = Sequence(contents[: len(sources)])
        sequence.device = self.take(len(sources))
        transfer = self.transfers.load(0, 0, sources, sequence.device, self.now)
        self.begun.append(transfer)
        self.loads[transfer.id] = sequence
        self.live.append(sequence)
        self.admitted = True
        self.plan(False)

    def end_transfer(self, number: int, ok: bool) -> None:
        """P8: what a transfer reads and writes is as it was when it began."""
        since, contents = self.running.pop(number)
        assert since <= self.now
        transfer = self.transfer_of.pop(number)
        source, target = (self.host_memory, self.memory) if transfer.load else (self.memory, self.host_memory)
        for copy, content in zip(transfer.copies, contents, strict=True):
            assert source[copy.src] == content, "the source of a transfer was written before its end"
            assert target[copy.dst] == -1, "the target of a transfer was written"
            target[copy.dst] = content if ok else None
        entry = self.transfers.end(number, ok)
        assert entry is not None
        assert entry.transfer is transfer
        assert self.transfers.end(number, ok) is None
        sequence = self.loads.pop(number, None)
        if sequence is not None:
            if ok:
                sequence.writes = len(sequence.contents)
                self.publish(sequence)
            else:
                self.live.remove(sequence)
                self.leave(sequence)

    @precondition(lambda self: bool(self.running) and not self.admitted)
    @rule(data=st.data(), ok=st.booleans())
    def a_transfer_ends(self, data: st.DataObject, ok: bool) -> None:
        self.end_transfer(data.draw(st.sampled_from(sorted(self.running))), ok)

    @precondition(lambda self: not self.admitted)
    @rule(passed=st.integers(0, 4))
    def time_passes(self, passed: int) -> None:
        """P10: exactly those are over that began a lease ago."""
        self.now += passed
        over = self.transfers.expired(self.now)
        assert over == sorted(n for n, (since, _) in self.running.items() if since + self.lease <= self.now)
        for number in over:
            self.end_transfer(number, False)

    # ---- plans

    @rule(stores=st.booleans())
    def plan(self, stores: bool) -> None:
        """A plan runs: copies out, copies in, transfers begin, writes."""
        if stores and self.host.keeps:
            contents = [(s.contents[i], s.device[i]) for s in self.settled() for i in range(len(s.contents))]
            listed = [(BlockHash(key), block) for key, block in contents if self.index.key_of(block) == key]
            transfer = self.transfers.store(listed, self.index, self.now)
            if transfer is not None:
                self.begun.append(transfer)
        out = self.host.plan_out()
        assert len({copy.dst for copy in out}) == len(out), "a host block is written twice in one phase"
        self.host_memory = self.copied(out, self.memory, self.host_memory)
        self.memory = self.copied(self.swap_in, self.host_memory, self.memory)
        for transfer in self.begun:
            source, target = (self.host_memory, self.memory) if transfer.load else (self.memory, self.host_memory)
            assert all(target[copy.dst] != -1 for copy in transfer.copies), "a target is in transfer already"
            self.running[transfer.id] = (self.now, [source[copy.src] for copy in transfer.copies])
            self.transfer_of[transfer.id] = transfer
            for copy in transfer.copies:
                target[copy.dst] = -1
        arrived = {copy.dst for copy in self.swap_in}
        self.swap_in, self.begun = [], []
        for sequence in self.live:
            if sequence.device and sequence.writes < len(sequence.contents):
                if any(sequence is loading for loading in self.loads.values()):
                    continue
                for block, content in zip(sequence.device, sequence.contents, strict=True):
                    if block not in arrived:
                        assert self.memory[block] != -1, "a block in transfer is written"
                        self.memory[block] = content
                sequence.writes = len(sequence.contents)
                self.publish(sequence)
        self.next_plan()
        self.contents_are_right()

    @staticmethod
    def copied(
        copies: list[BlockCopy] | tuple[BlockCopy, ...], source: list[Content | None], target: list[Content | None]
    ) -> list[Content | None]:
        after = list(target)
        for copy in copies:
            assert target[copy.dst] != -1, "a block in transfer is written"
            after[copy.dst] = source[copy.src]
        return after

    @precondition(lambda self: not self.admitted)
    @rule()
    def a_plan_that_does_not_run(self) -> None:
        self.next_plan()

    def next_plan(self) -> None:
        self.host.begin_step()
        self.admitted = False

    def contents_are_right(self) -> None:
        """Whoever is on the device or swapped out has its content there; whatever the host lists, it holds."""
        for sequence in self.live:
            if any(sequence is loading for loading in self.loads.values()):
                continue
            for block, content in zip(sequence.device, sequence.contents, strict=bool(sequence.device)):
                assert self.memory[block] == content
            for block, content in zip(sequence.host, sequence.contents, strict=bool(sequence.host)):
                assert self.host_memory[block] == content
        for key, blocks in self.host.index.entries():
            assert [self.host_memory[block] for block in blocks] == [key]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        owners = [s.host for s in self.live]
        refs = [0] * self.pool.num_blocks
        for s in self.live:
            for block in s.device:
                refs[block] += 1
        tables = list(refs)
        held: dict[BlockId, int] = {}
        for entry in self.transfers.open.values():
            copies = entry.transfer.copies
            owners.append([copy.src if entry.transfer.load else copy.dst for copy in copies])
            for block in entry.device:
                held[block] = held.get(block, 0) + 1
                refs[block] += 1
        self.host.check(owners)
        self.pool.check()
        self.index.check()
        assert refs == self.pool.all_refs()
        assert held == self.transfers.device_refs
        assert self.transfers.blocks_held_alone() == sum(not tables[block] for block in held)
        assert len(self.transfers._storing) == sum(len(entry.keys) for entry in self.transfers.open.values())


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=50, stateful_step_count=60)
