"""The block manager call by call against sets: who holds which block, and what is written in each of its slots."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_faults import no_blocks, nth_call
from test_manager import make_request

from engine.core import BlockCopy, NoFreeBlocks
from engine.core.manager import BlockManager
from engine.core.pool import FREE_ORDERS, BlockPool
from engine.core.request import RUNNING, WAITING, Request
from engine.core.types import BlockId

Name = tuple[object, ...]
"""A prefix: who may have the same content, and all tokens up to a slot."""

LETTERS = st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=7)
RUNS = st.sampled_from([True, True, False])
"""Whether the plan ends with this call."""


@dataclass(eq=False)
class Held:
    """A request, and what must be true of it."""

    request: Request
    tokens: list[int]
    secret: object
    """Who may have the same content: those of a salt, or its own sequences alone."""
    kind: str
    """One sequence (`single`), or one of several that were or will be forked: `samples` or `beam`."""
    table: list[BlockId]
    writes: tuple[int, int] | None = None
    """Which of its tokens the plan being made writes."""
    loading: bool = False
    """Its blocks behind the first `request.published` wait for a load."""

    @property
    def id(self) -> int:
        return self.request.id

    def name(self, length: int) -> Name:
        return (self.secret, *self.tokens[:length])

    def label(self, place: int, size: int) -> Name:
        """Equal for two blocks exactly where one may be hit for the other."""
        if isinstance(self.secret, bytes):
            return self.name((place + 1) * size)
        request = self.request
        return (self.secret, request.root_id if place < request.root_blocks else request.id, place)


class ManagerMachine(RuleBasedStateMachine):
    """Plans are made of starts, appends and frees; between them sequences fork, change tables, and loads end."""

    @initialize(
        num_blocks=st.integers(2, 12),
        size=st.sampled_from([1, 2, 2, 3]),
        order=st.sampled_from(sorted(FREE_ORDERS)),
        index=st.sampled_from(["hash", "radix"]),
        share=st.booleans(),
    )
    def begin(self, num_blocks: int, size: int, order: str, index: str, share: bool) -> None:
        self.manager = BlockManager(num_blocks, size, True, order, index)
        self.size = size
        self.share = share
        """Blocks are published when they are planned, and not when they are written."""
        self.next_id = 0
        self.held: dict[int, Held] = {}
        self.holders: dict[BlockId, set[int]] = {BlockId(i): set() for i in range(num_blocks)}
        self.content: dict[BlockId, list[Name | None]] = {BlockId(i): [None] * size for i in range(num_blocks)}
        self.cache: dict[Name, list[BlockId]] = {}
        """Blocks that can be hit, by label; of equal ones the first published is first."""
        self.meaning: dict[Name, tuple[object, Name]] = {}
        """The key of a label, and the prefix that it stands for."""
        self.copies: list[BlockCopy] = []
        self.leased: set[BlockId] = set()
        """Parts of the plan being made."""

    # ---- what a call may be made with

    def running(self, *kinds: str) -> list[Held]:
        """Those with blocks that can be used, and nothing to write in this plan."""
        live = [held for held in self.held.values() if held.request.state == RUNNING]
        return [h for h in live if h.writes is None and not h.loading and (not kinds or h.kind in kinds)]

    @property
    def planning(self) -> bool:
        return bool(self.copies or self.leased) or any(held.writes for held in self.held.values())

    @property
    def num_free(self) -> int:
        return self.manager.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def digest(self) -> tuple[str, list[int]]:
        requests = [held.request for held in self.held.values()]
        return self.manager.digest(requests), sorted(self.manager.cow)

    def fails(self, call: Callable[[], object]) -> None:
        """P6: a call that finds no block changes nothing."""
        before = self.digest()
        with pytest.raises(NoFreeBlocks):
            call()
        assert self.digest() == before

    def fails_injected(self, call: Callable[[], object]) -> None:
        """The same where the pool has none although there should be one."""
        with nth_call(BlockPool, "take", 1, no_blocks):
            self.fails(call)

    # ---- the model

    def took(self, held: Held, blocks: Sequence[BlockId]) -> None:
        """`held` was given blocks that nobody had: what was cached in them is lost."""
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            assert not self.holders[block], f"block {block} is given to two"
            assert block not in self.leased, f"the source of a copy, block {block}, is given away"
            self.holders[block].add(held.id)
            for cached in self.cache.values():
                if block in cached:
                    cached.remove(block)

    def noted(self, held: Held, start: int, stop: int) -> None:
        """Blocks of these places of its table can be hit from now on."""
        for i in range(start, stop):
            label = held.label(i, self.size)
            self.cache.setdefault(label, []).append(held.table[i])
            meaning = (held.request.block_key(i), held.name((i + 1) * self.size))
            assert self.meaning.setdefault(label, meaning)[0] == meaning[0], "one content has two keys"

    def publish(self, held: Held) -> None:
        before = held.request.published
        self.manager.publish(held.request, held.request.sched)
        stop = min(held.request.sched // self.size, held.request.shared_blocks)
        assert held.request.published == max(before, stop)
        self.noted(held, before, stop)

    def expected_hits(self, held: Held) -> list[BlockId]:
        hits: list[BlockId] = []
        for i in range(min((len(held.tokens) - 1) // self.size, held.request.key_blocks)):
            cached = self.cache.get(held.label(i, self.size))
            if not cached:
                break
            hits.append(cached[0])
        return hits

    def writes(self, held: Held, start: int, stop: int) -> None:
        held.request.sched = stop
        held.writes = (start, stop)
        if self.share:
            self.publish(held)

    # ---- plans

    @rule(
        letters=LETTERS,
        secret=st.sampled_from([b"", b"", b"", b"t", None]),
        kind=st.sampled_from(["single", "samples", "beam"]),
        part=st.sampled_from([0, 0, 0, 1, 2]),
        loads=st.sampled_from([False, False, False, True]),
        runs=RUNS,
    )
    def start_new(
        self, letters: list[int], secret: bytes | None, kind: str, part: int, loads: bool, runs: bool
    ) -> None:
        request = make_request(self.next_id, letters, self.size, secret is None, secret or b"")
        self.next_id += 1
        prompt_blocks = len(letters) // self.size
        if kind != "single":  # as groups.begin() does
            request.root_blocks = prompt_blocks
            request.shared_blocks = max(request.shared_blocks, prompt_blocks)
        if kind == "beam":
            request.identity_blocks = min(request.identity_blocks, prompt_blocks)
            request.shared_blocks = request.key_blocks = prompt_blocks
        held = Held(request, list(letters), request.id if secret is None else secret, kind, [])
        self.held[request.id] = held
        self.start(held, len(letters) - part, loads)
        if runs:
            self.end_step()

    @precondition(lambda self: any(held.request.state == WAITING for held in self.held.values()))
    @rule(data=st.data(), part=st.integers(0, 2), runs=RUNS)
    def start_again(self, data: st.DataObject, part: int, runs: bool) -> None:
        waiting = [id for id, held in self.held.items() if held.request.state == WAITING]
        held = self.held[data.draw(st.sampled_from(waiting))]
        self.start(held, len(held.tokens) - part, False)
        if runs:
            self.end_step()

    def start(self, held: Held, num_tokens: int, loads: bool) -> None:
        """P6: `lookup` and `need` change nothing; what `need` counts is what `allocate` takes, or it fails cleanly."""
        manager, request = self.manager, held.request
        before = self.digest()
        hits = manager.lookup(request)
        assert hits == self.expected_hits(held), "the hits are not the longest prefix that is cached"
        num_tokens = max(num_tokens, len(hits) * self.size + 1)
        new = max(0, self.blocks_for(num_tokens) - len(hits))
        need = manager.need(request, hits, num_tokens)
        assert need == new + sum(not self.holders[block] for block in hits)
        assert self.digest() == before
        if need > self.num_free:
            self.fails(lambda: manager.allocate(request, hits, num_tokens))
            return
        if new and not hits:
            self.fails_injected(lambda: manager.allocate(request, hits, num_tokens))
        free = self.num_free
        manager.allocate(request, hits, num_tokens)
        request.state = RUNNING
        assert free - self.num_free == need
        assert request.table[: len(hits)] == hits
        assert len(request.table) == len(hits) + new
        for block in hits:
            self.holders[block].add(held.id)
        self.took(held, request.table[len(hits) :])
        held.table = list(request.table)
        if loads:
            request.sched = num_tokens // self.size * self.size
            held.loading = True
        else:
            self.writes(held, len(hits) * self.size, num_tokens)

    @precondition(lambda self: bool(self.running()))
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4), runs=RUNS)
    def append(self, data: st.DataObject, more: list[int], runs: bool) -> None:
        """A sequence computes what is left of its tokens and some more; those of a beam do so together."""
        chosen = self.held[data.draw(st.sampled_from([held.id for held in self.running()]))]
        together = [chosen]
        if chosen.kind == "beam":
            together = [h for h in self.running("beam") if h.request.root_id == chosen.request.root_id]
            if sum(self.need(h, len(h.tokens) + len(more)) for h in together) > self.num_free:
                return
        for k, held in enumerate(together):
            self.append_to(held, [(token + k) % 2 for token in more])
        if runs:
            self.end_step()

    def need(self, held: Held, num_tokens: int) -> int:
        """Blocks that are missing, and one for the copy of what others have, too."""
        place = held.request.sched // self.size
        shared = place < len(held.table) and len(self.holders[held.table[place]]) > 1
        return max(0, self.blocks_for(num_tokens) - len(held.table)) + shared

    def append_to(self, held: Held, more: list[int]) -> None:
        """P5: tokens one by one are like all at once. P6: what `need` counts is taken, or nothing is."""
        manager, request = self.manager, held.request
        start, stop = request.sched, len(held.tokens) + len(more)
        if stop == start:
            return
        need = self.need(held, stop)
        assert manager.need(request, (), stop) == need
        if need > self.num_free:
            self.fails(lambda: manager.append_slots(request, stop))
            return
        if need:
            self.fails_injected(lambda: manager.append_slots(request, stop))
        others, again = copy.deepcopy((manager, request))
        free = self.num_free
        manager.append_slots(request, stop)
        assert free - self.num_free == need
        for tokens in range(start + 1, stop + 1):
            others.append_slots(again, tokens)
        assert others.digest([again]) == manager.digest([request])
        old, held.table = held.table, list(request.table)
        place = start // self.size
        if place < len(old) and len(self.holders[old[place]]) > 1:
            self.copies.append(BlockCopy(old[place], held.table[place]))
            self.holders[old[place]].remove(held.id)
            self.took(held, [held.table[place]])
            old[place] = held.table[place]
        assert held.table[: len(old)] == old
        self.took(held, held.table[len(old) :])
        self.known(held, more)
        self.writes(held, start, stop)

    def known(self, held: Held, more: Sequence[int]) -> None:
        held.request.known += len(more)
        held.tokens += more
        if held.request.identity is not None and held.kind != "beam":
            for token in more:
                held.request.identity.append(token)

    def at_a_boundary(self) -> list[Held]:
        return [h for h in self.running("single") if len(h.table) * self.size == h.request.sched == len(h.tokens)]

    @precondition(lambda self: bool(self.at_a_boundary()))
    @rule()
    def block_each(self) -> None:
        """P6: a block for each of several requests, in their order, or none for any."""
        helds = self.at_a_boundary()
        requests = [held.request for held in helds]
        if len(requests) > self.num_free:
            self.fails(lambda: self.manager.append_block_each(requests))
            return
        self.fails_injected(lambda: self.manager.append_block_each(requests))
        self.manager.append_block_each(requests)
        for held in helds:
            assert held.request.table[:-1] == held.table
            held.table = list(held.request.table)
            self.took(held, held.table[-1:])
            self.known(held, [0])
            self.writes(held, held.request.sched, held.request.sched + 1)

    @precondition(lambda self: self.planning)
    @rule()
    def end_step(self) -> None:
        """The plan runs: copies all at once, then all writes. No block is both read and written, or written twice."""
        copies = self.manager.end_step()
        assert copies == self.copies
        targets = [copy.dst for copy in copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {copy.src for copy in copies}
        read = [list(self.content[copy.src]) for copy in copies]
        for target, content in zip(targets, read, strict=True):
            self.content[target] = content
        self.copies, self.leased = [], set()
        for held in self.held.values():
            for position in range(*(held.writes or (0, 0))):
                block = held.table[position // self.size]
                told = self.share and (position // self.size) < held.request.published  # others hit it in this plan
                assert self.holders[block] == {held.id} or told, "a shared block is written"
                self.content[block][position % self.size] = held.name(position + 1)
        for held in self.held.values():
            if held.writes is not None and not self.share:
                self.publish(held)
            held.writes = None

    # ---- leaving

    @precondition(lambda self: any(h.request.state == RUNNING and h.writes is None for h in self.held.values()))
    @rule(data=st.data(), ended=st.booleans(), unwritten=st.sampled_from([0, 0, 1, 2]))
    def leave(self, data: st.DataObject, ended: bool, unwritten: int) -> None:
        """In any order, by preemption or for good; a beam that is preempted is so as a whole, and comes no more."""
        live = [held.id for held in self.held.values() if held.request.state == RUNNING and held.writes is None]
        chosen = self.held[data.draw(st.sampled_from(live))]
        if chosen.kind != "beam":
            self.free(chosen, ended, unwritten)
            return
        for id in reversed(live):
            if id == chosen.id or (not ended and self.held[id].request.root_id == chosen.request.root_id):
                self.free(self.held[id], True, unwritten)

    def free(self, held: Held, ended: bool, unwritten: int) -> None:
        request, pool = held.request, self.manager.pool
        published = request.published
        written = published * self.size if held.loading else max(request.sched - unwritten, published * self.size)
        stop = min(written // self.size, request.key_blocks, request.shared_blocks if ended else 1 << 62)
        own = [block for block in held.table if self.holders[block] == {held.id}]
        leased = {block for block in own if block in {copy.src for copy in self.copies}}
        self.noted(held, published, max(stop, published))
        self.manager.free(request, written, ended)
        assert request.table == []
        for block in held.table:
            self.holders[block].remove(held.id)
        self.leased |= leased
        order = pool.free_order()
        kept = [order.index(block) for block in own if block not in leased and pool.is_kept(block)]
        assert kept == sorted(kept, reverse=True), "a block is evicted before the blocks behind it"
        held.table, held.loading = [], False
        request.state, request.sched = WAITING, 0
        request.epoch += not ended
        if ended:
            del self.held[held.id]

    # ---- between plans

    @precondition(lambda self: not self.planning and bool(self.forkable()))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Once its prompt is computed: the child holds all of its parent's blocks, and nothing is taken."""
        parent = self.held[data.draw(st.sampled_from([held.id for held in self.forkable()]))]
        of, id = parent.request, self.next_id
        self.next_id += 1
        child = Request(id, of.spec, of.cap, of.shared_blocks, (0, id))  # as groups.fork() does
        child.identity_blocks, child.key_blocks = of.identity_blocks, of.key_blocks
        child.root_id, child.root_blocks = of.root_id, of.root_blocks
        if of.identity is not None and parent.kind != "beam":
            child.identity = of.identity.fork()
        child.state, child.sched, child.known = RUNNING, of.sched, of.known
        free = self.num_free
        self.manager.fork(of, child)
        assert self.num_free == free
        assert child.table == parent.table[: self.blocks_for(of.sched)]
        self.held[id] = Held(child, list(parent.tokens), parent.secret, parent.kind, list(child.table))
        for block in child.table:
            self.holders[block].add(id)

    def forkable(self) -> list[Held]:
        roots = [held for held in self.running("samples", "beam") if held.request.root_id == held.id]
        return [h for h in roots if h.request.sched == h.request.num_prompt == len(h.tokens) and not h.request.epoch]

    @precondition(lambda self: not self.planning and bool(self.running("beam")))
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        """Each sequence of a beam goes on from any other: as sets, tables only change hands."""
        root = data.draw(st.sampled_from(sorted({held.request.root_id for held in self.running("beam")})))
        members = [held for held in self.running("beam") if held.request.root_id == root]
        if len({(held.request.sched, len(held.tokens)) for held in members}) > 1:
            return
        sources = [members[data.draw(st.integers(0, len(members) - 1))] for _ in members]
        self.manager.reorder([held.request for held in members], [held.request for held in sources])
        goes_on = [(list(held.tokens), held.table[: self.blocks_for(held.request.sched)]) for held in sources]
        for held, (tokens, table) in zip(members, goes_on, strict=True):
            for block in held.table:
                self.holders[block].remove(held.id)
            held.tokens, held.table = tokens, table
            assert held.request.table == table
        for held in members:
            for block in held.table:
                self.holders[block].add(held.id)

    @precondition(lambda self: not self.planning and any(held.loading for held in self.held.values()))
    @rule(data=st.data(), ok=st.booleans())
    def a_load_ends(self, data: st.DataObject, ok: bool) -> None:
        """What was loaded can be hit; after a failure the blocks behind the hits are given back, and no other."""
        held = self.held[data.draw(st.sampled_from([id for id, held in self.held.items() if held.loading]))]
        request = held.request
        hits = request.published * self.size
        held.loading = False
        if ok:
            for position in range(hits, request.sched):
                self.content[held.table[position // self.size]][position % self.size] = held.name(position + 1)
            self.publish(held)
            return
        self.manager.truncate(request, hits)
        request.sched = hits
        for block in held.table[request.published :]:
            self.holders[block].remove(held.id)
        held.table = held.table[: request.published]
        assert request.table == held.table

    # ---- what is true after every call

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        manager.check([held.request for held in self.held.values()], dict.fromkeys(self.leased, 1))
        for block, holders in self.holders.items():
            assert manager.pool.refs(block) == len(holders) + (block in self.leased)
        listed = {self.meaning[label][0]: blocks for label, blocks in self.cache.items() if blocks}
        assert dict(manager.index.entries()) == listed
        if self.planning:
            return
        for label, blocks in self.cache.items():
            prefix = self.meaning[label][1]
            for block in blocks:
                assert self.content[block] == [prefix[: len(prefix) - self.size + 1 + i] for i in range(self.size)]
        for held in self.held.values():
            for position in range(0 if held.loading else held.request.sched):
                slot = self.content[held.table[position // self.size]][position % self.size]
                assert slot == held.name(position + 1), f"request {held.id} reads another prefix at {position}"


def run_manager_machine(**options: Any) -> None:
    run_state_machine_as_test(ManagerMachine, settings=settings(settings(), **options))


def test_the_manager_does_what_sets_would_do() -> None:
    """P1, P5, P6: any order of calls, each also where it must fail, agrees with sets of holders and written slots."""
    run_manager_machine(max_examples=40, stateful_step_count=40)


@pytest.mark.slow
def test_the_manager_does_what_sets_would_do_many_times() -> None:
    """The same with many more orders of calls."""
    run_manager_machine(
        max_examples=4000,
        stateful_step_count=60,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
