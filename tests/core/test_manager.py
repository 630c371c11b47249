"""Block tables: what is counted is what is taken, what fails leaves no trace, what is hit is right (P5, P6, P13)."""

from __future__ import annotations

import pytest

from engine.core import InvariantError, NoFreeBlocks, RequestSpec, TokenIdentity
from engine.core.manager import BlockManager
from engine.core.pool import FREE_ORDERS
from engine.core.request import RUNNING, WAITING, Request
from engine.core.types import BlockId

ORDERS = sorted(FREE_ORDERS)


def make_request(id: int, tokens: list[int], size: int, private: bool = False, salt: bytes = b"") -> Request:
    identity = None if private else TokenIdentity(tokens, size, salt)
    shared = 0 if identity is None else identity.shared_tokens // size
    return Request(id, RequestSpec(0, len(tokens), 100, identity), 100, shared, (0, id))


class Managed:
    """A manager and its requests, with the two calls that the scheduler makes to start one."""

    def __init__(self, num_blocks: int, size: int, free_order: str = "blank-first", caching: bool = True) -> None:
        self.manager = BlockManager(num_blocks, size, caching, free_order)
        self.size = size
        self.requests: list[Request] = []

    def new(self, tokens: list[int], private: bool = False, salt: bytes = b"") -> Request:
        request = make_request(len(self.requests), tokens, self.size, private, salt)
        self.requests.append(request)
        return request

    def start(self, request: Request, publish: bool = True) -> list[BlockId]:
        """Give it slots for all of its tokens; returns its hits."""
        hits = self.manager.lookup(request)
        self.manager.allocate(request, hits, request.known)
        request.state = RUNNING
        if publish:
            self.manager.publish(request, request.known)
        return hits

    def run(self, tokens: list[int], private: bool = False, salt: bytes = b"") -> Request:
        request = self.new(tokens, private, salt)
        self.start(request)
        return request

    def end(self, request: Request, ended: bool = True) -> None:
        self.manager.free(request, request.known, ended)
        request.state = WAITING

    def digest(self) -> str:
        return self.manager.digest(self.requests)


@pytest.mark.parametrize(
    ("tokens", "size", "blocks", "tail"),
    [(17, 16, 2, 15), (16, 16, 1, 0), (15, 16, 1, 1), (1, 16, 1, 15), (32, 16, 2, 0), (33, 16, 3, 15), (5, 1, 5, 0)],
)
def test_blocks_at_boundaries(tokens: int, size: int, blocks: int, tail: int) -> None:
    """17 tokens take 2 blocks of 16, with 15 slots unused; a multiple of the block size leaves none."""
    managed = Managed(8, size)
    request = managed.new(list(range(tokens)))
    assert managed.manager.need(request, (), tokens) == blocks
    managed.start(request)
    assert len(request.table) == blocks
    assert len(request.table) * size - tokens == tail


@pytest.mark.parametrize("prompt", range(1, 18))
@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_the_last_token_is_never_a_hit(prompt: int, size: int) -> None:
    """Rule 1: a prompt that is cached to its end hits all its full blocks but one that would reach the last token."""
    managed = Managed(40, size)
    managed.end(managed.run(list(range(prompt))))
    again = managed.new(list(range(prompt)))
    assert len(managed.start(again)) == (prompt - 1) // size


def test_a_hit_that_nobody_holds_costs_a_free_block() -> None:
    """Rule 2: `need` counts hits with no reference, and not those that somebody holds."""
    managed = Managed(6, 2)
    first = managed.run([1, 2, 3, 4, 5])
    second = managed.new([1, 2, 3, 4, 5, 6, 7])
    hits = managed.manager.lookup(second)
    assert hits == first.table[:2]
    assert managed.manager.need(second, hits, 7) == 2
    managed.end(first)
    assert managed.manager.need(second, hits, 7) == 4
    free = managed.manager.pool.num_free
    managed.start(second)
    assert free - managed.manager.pool.num_free == 4


def test_hits_are_held_before_new_blocks_are_taken() -> None:
    """A request whose hits are next in line to be evicted, and which needs every free block, keeps its hits."""
    managed = Managed(3, 1)
    managed.end(managed.run([1, 2, 3]))
    again = managed.new([1, 2, 9])
    hits = managed.manager.lookup(again)
    assert managed.manager.need(again, hits, 3) == 3
    managed.start(again)
    assert again.table[:2] == hits
    assert len(set(again.table)) == 3
    managed.manager.check([again])


def test_a_revived_block_keeps_its_content() -> None:
    """Rule 4: a block that comes back by a hit is listed still, and a third request hits it too."""
    managed = Managed(8, 2)
    managed.end(managed.run([1, 2, 3, 4, 5]))
    second = managed.run([1, 2, 3, 4, 6])
    third = managed.new([1, 2, 3, 4, 7])
    assert managed.manager.lookup(third) == second.table[:2]
    managed.end(second)
    assert managed.manager.lookup(third) == managed.manager.lookup(second)


def test_duplicates_are_not_merged_and_the_first_published_is_hit() -> None:
    """Rule 4: two requests that compute one content hold two blocks; a hit takes the first until it is gone."""
    managed = Managed(6, 2)
    one, two = managed.new([1, 2, 3]), managed.new([1, 2, 4])
    managed.start(one, publish=False)
    managed.start(two, publish=False)
    managed.manager.publish(two, 2)
    managed.manager.publish(one, 2)
    third = managed.new([1, 2, 5])
    assert managed.manager.lookup(third) == two.table[:1]
    first = two.table[0]
    managed.end(two)
    assert managed.manager.lookup(third) == [first]
    managed.run([9] * 8, private=True)  # takes every free block, the first published among them
    assert managed.manager.lookup(third) == one.table[:1]
    managed.manager.check([one, *managed.requests[3:]])


@pytest.mark.parametrize("free_order", ORDERS)
def test_tails_are_freed_first(free_order: str) -> None:
    """Rule 4: of a request's cached blocks the last is given away first, so what is left can still be hit."""
    managed = Managed(4, 1, free_order)
    request = managed.run([1, 2, 3, 4])
    table = list(request.table)
    managed.end(request)
    assert managed.manager.pool.free_order() == table[::-1]
    for left in (3, 2, 1, 0):
        assert managed.manager._take(1) == [table[left]]
        assert len(managed.manager.lookup(managed.new([1, 2, 3, 4, 5]))) == left


def test_without_prefix_caching_nothing_is_kept() -> None:
    """With caching off there are no hits, nothing is listed, and all free blocks are blank."""
    managed = Managed(4, 1, caching=False)
    managed.end(managed.run([1, 2, 3]))
    assert managed.manager.lookup(managed.new([1, 2, 3])) == []
    assert len(managed.manager.index) == 0
    assert managed.manager.pool.num_kept_free == 0


def test_the_cache_of_a_tenant_serves_nobody_else() -> None:
    """P13: equal prompts hit exactly their full blocks within one salt, and nothing across salts or private ones."""
    managed = Managed(20, 2)
    managed.end(managed.run([1, 2, 3, 4, 5], salt=b"a"))
    managed.end(managed.run([1, 2, 3, 4, 5], private=True))
    assert len(managed.manager.lookup(managed.new([1, 2, 3, 4, 5], salt=b"a"))) == 2
    assert managed.manager.lookup(managed.new([1, 2, 3, 4, 5], salt=b"b")) == []
    assert managed.manager.lookup(managed.new([1, 2, 3, 4, 5])) == []
    assert managed.manager.lookup(managed.new([1, 2, 3, 4, 5], private=True)) == []


def test_private_content_comes_back_to_its_own_request_alone() -> None:
    """Two preempted requests without identity find their own blocks again, and not the other's."""
    managed = Managed(20, 2)
    one, two = managed.run([1, 2, 3, 4, 5], private=True), managed.run([1, 2, 3, 4, 5], private=True)
    tables = {request.id: list(request.table) for request in (one, two)}
    for request in (one, two):
        managed.end(request, ended=False)
        request.epoch += 1
    for request in (two, one):
        assert managed.manager.lookup(request) == tables[request.id][:2]


@pytest.mark.parametrize("free_order", ORDERS)
def test_a_lookup_changes_nothing(free_order: str) -> None:
    """P6: looking a request up, however often, leaves the order of eviction as it was."""
    managed = Managed(8, 2, free_order)
    managed.end(managed.run([1, 2, 3, 4, 5]))
    managed.end(managed.run([6, 7, 8]))
    before = managed.digest()
    assert len(managed.manager.lookup(managed.new([1, 2, 3, 4, 9]))) == 2
    managed.requests.pop()
    assert managed.digest() == before


def test_what_was_not_written_is_not_cached() -> None:
    """A request that gives its blocks back leaves only the full blocks within what was written."""
    managed = Managed(8, 2)
    request = managed.new([1, 2, 3, 4, 5, 6, 7])
    managed.start(request, publish=False)
    managed.manager.free(request, 5, ended=True)
    assert len(managed.manager.lookup(managed.new([1, 2, 3, 4, 5, 6, 7]))) == 2


def test_a_second_table_is_refused() -> None:
    """A request that has blocks is given no second table: its first would be lost."""
    managed = Managed(8, 2)
    request = managed.run([1, 2, 3])
    before = managed.digest()
    with pytest.raises(InvariantError, match="it has one"):
        managed.manager.allocate(request, [], 3)
    assert managed.digest() == before


def test_an_allocation_that_fails_behind_free_hits_changes_nothing() -> None:
    """P6: hits that nobody held are, after a failed allocation, where they were in the free order."""
    managed = Managed(4, 1)
    managed.end(managed.run([1, 2]))
    managed.end(managed.run([3, 4]))
    request = managed.new([1, 2, 5, 6, 7])
    hits = managed.manager.lookup(request)
    assert len(hits) == 2
    before = managed.digest()
    with pytest.raises(NoFreeBlocks):
        managed.manager.allocate(request, hits, 5)
    assert managed.digest() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m, r: r.table.pop(), "references and"),
        (lambda m, r: setattr(r, "state", WAITING), "does not run holds blocks"),
        (lambda m, r: r.table.__setitem__(1, r.table[0]), "listed twice in one table"),
        (lambda m, r: m.pool._kept.__setitem__(r.table[0], 0), "the pool does not keep it"),
        (lambda m, r: m.pool._kept.__setitem__(r.table[2], 1), "the index does not list it"),
        (lambda m, r: setattr(m, "num_dead", 1), "listed and 1 dead"),
        (lambda m, r: setattr(m, "num_table_blocks", 2), "2 table entries counted"),
        (lambda m, r: r.identity.tokens.__setitem__(0, 9) or r.identity._keys.clear(), "under another key"),
    ],
)
def test_the_check_sees_damage(damage: object, message: str) -> None:
    """Each kind of disagreement between tables, references, index and counters is found by `check`."""
    managed = Managed(6, 2)
    request = managed.run([1, 2, 3, 4, 5])
    managed.manager.check([request])
    damage(managed.manager, request)  # type: ignore[operator]
    with pytest.raises(InvariantError, match=message):
        managed.manager.check([request])
