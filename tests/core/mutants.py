"""Seeded bugs: each is one fault of the kind that block managers and schedulers have had, written into the core's own
source for as long as a context lasts. test_mutants.py shows that the suite sees every one of them.

A mutant is an edit of the source of one or more functions: a text that occurs exactly once, and what it becomes. Where
the core changes so that a text is no longer found, the mutant has to be written anew.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import core_kit

from engine.core import admitting as admitting_module
from engine.core import completing as completing_module
from engine.core import drive as drive_module
from engine.core import fastforward as fastforward_module
from engine.core import groups as groups_module
from engine.core import intake as intake_module
from engine.core import leaving as leaving_module
from engine.core import placing as placing_module
from engine.core import tiers as tiers_module
from engine.core.asking import Policies
from engine.core.cohort import DecodeCohort
from engine.core.contiguous import ContiguousManager
from engine.core.extents import BestFit, Buddy, ExtentPool, FirstFit, Holes
from engine.core.host import HostBlocks, Transfers
from engine.core.identity import SpanIdentity, TokenIdentity
from engine.core.index import HashIndex
from engine.core.manager import BlockManager
from engine.core.orders import FairShare
from engine.core.pool import BlockPool, LazyQueue
from engine.core.prefixstats import PrefixStats
from engine.core.radix import RadixIndex
from engine.core.ranked import RankedOrder
from engine.core.records import Recorder
from engine.core.request import Request
from engine.core.scheduler import Scheduler

__all__ = ["EQUIVALENT", "MUTANTS", "Edit", "Mutant", "applied"]


@dataclass(frozen=True)
class Edit:
    """In the source of `owner.function`, each of some texts becomes another."""

    owner: type | ModuleType
    function: str
    changes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Mutant:
    """One fault, and which check of test_mutants.py has to see it."""

    name: str
    check: str
    edits: tuple[Edit, ...]
    """Each of another function."""


def _mutant(name: str, check: str, owner: type | ModuleType, function: str, old: str, new: str) -> Mutant:
    return Mutant(name, check, (Edit(owner, function, ((old, new),)),))


def _edited(edit: Edit) -> Any:
    """The function with the edit made."""
    function = inspect.getattr_static(edit.owner, edit.function)
    assert isinstance(function, FunctionType), f"{edit.function} is not a plain function"
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edit.changes:
        found = source.count(old)
        assert found == 1, f"{old!r} is found {found} times in {edit.function}: write the mutant anew"
        source = source.replace(old, new)
    space: dict[str, Any] = {}
    code = compile(source, f"<mutant of {edit.function}>", "exec")
    exec(code, function.__globals__, space)
    return space[edit.function]


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The core has this fault while the context lasts."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for edit in mutant.edits:
            original = inspect.getattr_static(edit.owner, edit.function)
            new = _edited(edit)
            places = [edit.owner]
            if getattr(core_kit, edit.function, None) is original:
                places.append(core_kit)  # it has the function under its own name
            for place in places:
                undo.append((place, edit.function, original))
                setattr(place, edit.function, new)
        yield
    finally:
        for place, name, original in reversed(undo):
            setattr(place, name, original)


MUTANTS: list[Mutant] = [
    # Blocks: references, order, index, identity.
    _mutant(
        "references clamped at 0",
        "pool",
        BlockPool,
        "drop",
        'raise InvariantError(f"a reference to block {block} is dropped, but nobody holds one")',
        "continue",
    ),
    _mutant(
        "a block put into the free queue twice",
        "programs",
        BlockPool,
        "drop",
        "self._order.put(kept_free)",
        "self._order.put([*kept_free, *kept_free[:1]])",
    ),
    _mutant(
        "a block named twice in one drop counted once",
        "pool",
        BlockPool,
        "drop",
        "for block in blocks:",
        "for block in dict.fromkeys(blocks):",
    ),
    _mutant(
        "evicted blocks stay counted as cached",
        "programs",
        BlockPool,
        "take",
        "self.num_kept_free -= len(evicted)",
        "pass",
    ),
    _mutant(
        "a take that fails after it took",
        "pool",
        BlockPool,
        "take",
        "if num > self.num_free:\n",
        "if num > self.num_free and self._order.pop(self.num_free):\n",
    ),
    _mutant(
        "a queue entry skipped for ever once the queue was tidied",
        "lazy queue",
        LazyQueue,
        "remove",
        "self._skip[entry] -= 1",
        "pass",
    ),
    _mutant(
        "the last published of equal blocks is hit",
        "index",
        HashIndex,
        "insert",
        "self._more.setdefault(key, []).append(block)",
        "self._more.setdefault(key, []).append(self._first[key]); self._first[key] = block",
    ),
    _mutant(
        "losing one duplicate forgets the others",
        "index",
        HashIndex,
        "remove",
        "self._first[key] = more.pop(0)",
        "more.clear(); del self._first[key]",
    ),
    # The radix tree.
    _mutant(
        "a tree in which the last published of equal blocks is hit",
        "radix",
        RadixIndex,
        "_add",
        "self._more.setdefault(run.firsts[depth - run.start], []).append(block)",
        "self._more[block] = [*self._more.pop(run.firsts[depth - run.start], ()), run.firsts[depth - run.start]]; "
        "run.firsts[depth - run.start] = block",
    ),
    _mutant(
        "an edge taken for a match after its first content",
        "radix",
        RadixIndex,
        "match",
        "while same < num and key(i + same) == keys[same]:",
        "while same < num:",
    ),
    _mutant(
        "a match beyond what was asked for",
        "radix",
        RadixIndex,
        "match",
        "min(len(keys), stop - i)",
        "len(keys)",
    ),
    _mutant(
        "a split edge whose blocks stay with the other half",
        "radix",
        RadixIndex,
        "_split",
        "self._relabel(lower)",
        "pass",
    ),
    _mutant("a split edge that starts where the whole did", "radix", RadixIndex, "_split", "run.start += at", "pass"),
    _mutant(
        "a duplicate left with the old half of an edge",
        "radix",
        RadixIndex,
        "_relabel",
        "self._run_of[block] = where",
        "pass",
    ),
    _mutant(
        "what is left alone behind an edge is not joined with it",
        "radix",
        RadixIndex,
        "_cut",
        "len(parent.children) == 1",
        "len(parent.children) == 0",
    ),
    _mutant("the root joined with its only prompt", "radix", RadixIndex, "_cut", " and parent is not self._root", ""),
    _mutant(
        "a block in the middle of an edge is lost",
        "tree trimmed",
        RadixIndex,
        "remove",
        "at + 1 < len(run.keys) or run.children",
        "run.children",
    ),
    _mutant(
        "a block before a branch is lost",
        "tree trimmed",
        RadixIndex,
        "remove",
        "at + 1 < len(run.keys) or run.children",
        "at + 1 < len(run.keys)",
    ),
    _mutant(
        "a stale index: an evicted block stays listed",
        "programs",
        BlockManager,
        "_evict",
        "self.index.remove(evicted)",
        "len(evicted)",
    ),
    _mutant("a hash without its parent", "programs", TokenIdentity, "key", "blake2b(parent + ", "blake2b("),
    _mutant("the salt left out", "programs", TokenIdentity, "__init__", '(b"salt", salt)', '(b"salt", b"")'),
    _mutant(
        "the adapter left out", "identity", TokenIdentity, "__init__", '(b"adapter", adapter)', '(b"adapter", b"")'
    ),
    _mutant(
        "salt and adapter run into each other",
        "identity",
        TokenIdentity,
        "__init__",
        'root += tag + len(value).to_bytes(8, "little") + value',
        "root += value",
    ),
    _mutant(
        "a trace's salt left out", "identity", SpanIdentity, "key", "(self._salt, name) if self._salt else name", "name"
    ),
    _mutant(
        "private blocks of two requests have one key",
        "private",
        Request,
        "private_key",
        "(owner << 32) | index",
        "index",
    ),
    # The block manager.
    _mutant(
        "a hit on the whole prompt",
        "programs",
        BlockManager,
        "lookup",
        "(request.known - 1) // self.block_size",
        "request.known // self.block_size",
    ),
    _mutant(
        "a lookup that touches recency",
        "lookup",
        BlockManager,
        "lookup",
        "return self.index.match(request.block_key, stop) if stop > 0 else []",
        "hits = self.index.match(request.block_key, stop) if stop > 0 else []\n"
        "    for block in reversed([block for block in hits if not self.pool.refs(block)]):\n"
        "        self.pool._order.remove(block)\n"
        "        self.pool._order.put([block])\n"
        "    return hits",
    ),
    _mutant(
        "a cache that never hits",
        "hits",
        BlockManager,
        "lookup",
        "return self.index.match(request.block_key, stop) if stop > 0 else []",
        "return []",
    ),
    _mutant(
        "hits that nobody holds are not counted",
        "programs",
        BlockManager,
        "need",
        "if refs(block) == 0:",
        "if refs(block) < 0:",
    ),
    Mutant(
        "blocks taken before the hits are touched",
        "programs",
        (
            Edit(
                BlockManager,
                "allocate",
                (
                    ("self.pool.share(hits)", "pass"),
                    ("if num > 0 else list(hits)", "if num > 0 else list(hits); self.pool.share(hits)"),
                ),
            ),
        ),
    ),
    _mutant("freed head first", "programs", BlockManager, "free", "table.reverse()", "pass"),
    _mutant(
        "blocks kept that were not written",
        "programs",
        BlockManager,
        "free",
        "num_written // self.block_size",
        "(num_written + self.block_size - 1) // self.block_size",
    ),
    _mutant(
        "published tokens off by one",
        "programs",
        BlockManager,
        "publish",
        "stop = num_tokens // self.block_size",
        "stop = (num_tokens + 1) // self.block_size",
    ),
    _mutant(
        "a block too few for a partly filled last one",
        "programs",
        BlockManager,
        "append_slots",
        "-(-num_tokens // self.block_size)",
        "num_tokens // self.block_size",
    ),
    _mutant(
        "room looked for one token short",
        "programs",
        BlockManager,
        "need",
        "-(-num_tokens // self.block_size)",
        "-(-(num_tokens - 1) // self.block_size)",
    ),
    # The scheduler.
    _mutant(
        "no check that a request can ever fit",
        "refused",
        intake_module,
        "add",
        "if blocks > config.num_blocks:",
        "if 0:",
    ),
    _mutant(
        "a request that only just fits is refused",
        "programs",
        Scheduler,
        "_most_tokens",
        "num_prompt + cap - 1",
        "num_prompt + cap",
    ),
    _mutant(
        "a confirmed entry before its step is complete",
        "programs",
        Scheduler,
        "_plan_item",
        "if self._share:",
        "if True:",
    ),
    _mutant(
        "publishing a block whose last token is not known yet",
        "chunks",
        Scheduler,
        "_plan_item",
        "min(request.sched, request.known)",
        "request.sched",
    ),
    _mutant(
        "keeping a block of the newest step whose input is not known yet",
        "aborts",
        leaving_module,
        "num_written",
        "scheduler._seq - scheduler._lag",
        "scheduler._seq",
    ),
    _mutant(
        "a row that samples before the end of what is known",
        "programs",
        Scheduler,
        "_plan_item",
        "samples = start + num == request.known + request.pending",
        "samples = start + num >= request.num_prompt",
    ),
    _mutant(
        "a watermark while idle",
        "programs",
        admitting_module,
        "has_room",
        "config.watermark_blocks if scheduler._running else 0",
        "config.watermark_blocks",
    ),
    _mutant(
        "the watermark ignored",
        "watermark",
        admitting_module,
        "has_room",
        "config.watermark_blocks if scheduler._running else 0",
        "0",
    ),
    _mutant(
        "admission on the first chunk alone",
        "whole prompt",
        admitting_module,
        "has_room",
        "max(tokens, request.known) if config.scheduler_reserve_full_isl else tokens",
        "tokens",
    ),
    _mutant(
        "a waiting request admitted past the limit of sequences",
        "programs",
        admitting_module,
        "admit",
        "+ scheduler._seats(request) > config.max_num_seqs",
        "+ scheduler._seats(request) > config.max_num_seqs + 1",
    ),
    _mutant("tokens admitted beyond the budget", "programs", admitting_module, "admit", "budget -= num", "pass"),
    _mutant(
        "admission in a step that preempted",
        "programs",
        Scheduler,
        "schedule",
        "if self._waiting and not preempted and not self._rejected:",
        "if self._waiting:",
    ),
    _mutant(
        "a victim from those that have their place",
        "programs",
        placing_module,
        "choose_victim",
        "return scheduler._running[last]",
        "return scheduler._running[0]",
    ),
    _mutant(
        "a user's victim from those that have their place",
        "victims",
        placing_module,
        "without_place",
        "if (turns.get(other.id, 0), other.key) >= mine and other.id not in loading",
        "if other.id not in loading",
    ),
    _mutant(
        "the preempted sent to the back",
        "programs",
        leaving_module,
        "take_blocks_back",
        "scheduler._waiting.push(request)",
        "request.key = (*request.key[:-2], 1 << 60, request.id); scheduler._waiting.push(request)",
    ),
    _mutant("preemptions not counted", "programs", leaving_module, "take_blocks_back", "request.epoch += 1", "pass"),
    _mutant(
        "the token of a request preempted in flight is dropped",
        "programs",
        completing_module,
        "complete",
        "request.state != FINISHED and not request.in_cohort",
        "request.state == RUNNING and not request.in_cohort",
    ),
    _mutant(
        "the token of a request aborted in flight is kept",
        "programs",
        completing_module,
        "complete",
        "request.state != FINISHED and not request.in_cohort",
        "not request.in_cohort",
    ),
    _mutant(
        "one token more than max_tokens",
        "programs",
        Scheduler,
        "_commit_plan",
        "outputs >= request.cap",
        "outputs > request.cap",
    ),
    _mutant(
        "deferred requests are not held back",
        "deferred",
        Scheduler,
        "_is_being_written",
        "request.block_key(num_hits) in self._writing",
        "False",
    ),
    _mutant(
        "deferred requests are held back for ever",
        "programs",
        completing_module,
        "complete",
        "for key in flight.pending_keys:",
        "for key in ():",
    ),
    Mutant(
        "the calendar of last tokens is a step late",
        "programs",
        tuple(
            Edit(
                DecodeCohort,
                function,
                (
                    (
                        "cap_seq = request.cap + request.num_prompt - 1 - base",
                        "cap_seq = request.cap + request.num_prompt - base",
                    ),
                ),
            )
            for function in ("join", "leave")
        ),
    ),
    Mutant(
        "a cohort's blocks come a step late",
        "programs",
        tuple(
            Edit(DecodeCohort, function, (("(1 - base - self._lookahead)", "(2 - base - self._lookahead)"),))
            for function in ("join", "leave")
        ),
    ),
    Mutant(
        "a cohort's full blocks are published a block late",
        "hits of a running request",
        tuple(
            Edit(DecodeCohort, function, (("[-base % size]", "[(-base - 1) % size]"),))
            for function in ("join", "leave")
        ),
    ),
    # Policies.
    _mutant(
        "promised blocks are not counted",
        "promise",
        admitting_module,
        "has_room",
        "spare += promised_blocks(scheduler)",
        "pass",
    ),
    _mutant(
        "a promise of one token too little",
        "promise",
        admitting_module,
        "promised_blocks",
        "-(-scheduler._most_tokens(r.num_prompt, r.cap) // size)",
        "scheduler._most_tokens(r.num_prompt, r.cap) // size",
    ),
    _mutant(
        "the first in the order may be a victim",
        "first victim",
        placing_module,
        "choose_victim",
        "len(candidates) > 1 and is_first(scheduler, request)",
        "False",
    ),
    _mutant(
        "decodes go on in a step of prompts",
        "batching",
        placing_module,
        "place_running",
        "if not batch.decodes:",
        "if False:",
    ),
    _mutant(
        "decodes wait for prompts although they come first",
        "batching",
        placing_module,
        "turn",
        "return 0 if decodes or not batch.decodes_first else 1",
        "return 0",
    ),
    _mutant(
        "a prompt is cut although steps hold whole ones",
        "whole steps",
        admitting_module,
        "admit",
        "if whole_prompts and budget < config.max_num_batched_tokens:",
        "if False:",
    ),
    _mutant(
        "a batching may stall those that run",
        "stall",
        Scheduler,
        "schedule",
        "if batch is not MIXED and self._chunks",
        "if False and self._chunks",
    ),
    _mutant(
        "somebody is admitted although the batching forbids it",
        "batching",
        Scheduler,
        "schedule",
        "blocked = not batch.admit or admitting.admit",
        "blocked = admitting.admit",
    ),
    _mutant(
        "a run although the cache decides who is next",
        "next in a run",
        Scheduler,
        "_stays_blocked",
        "(full or not (self._cohort.num_sharing or self._dynamic))",
        "(full or not self._cohort.num_sharing)",
    ),
    _mutant(
        "policies remember the run before",
        "own policies",
        Policies,
        "__init__",
        "policy = _ask(given, partial(copy.deepcopy, given))",
        "policy = given",
    ),
    _mutant(
        "the virtual time stands still",
        "fair",
        FairShare,
        "started",
        "self._virtual = max(self._virtual, self._start.pop(request.id, 0))",
        "pass",
    ),
    # Fast-forward.
    _mutant(
        "a run goes one step past a stop",
        "fast-forward",
        fastforward_module,
        "horizon",
        'turns, term = finish_bound, "finish"',
        'turns, term = finish_bound + 1, "finish"',
    ),
    _mutant(
        "a run goes one step past a last token",
        "fast-forward",
        fastforward_module,
        "horizon",
        "turns, term = cap_seq - scheduler._seq, _cap_term(scheduler._cohort",
        "turns, term = cap_seq - scheduler._seq + 1, _cap_term(scheduler._cohort",
    ),
    _mutant(
        "a run goes one step past the last free block",
        "fast-forward",
        fastforward_module,
        "horizon",
        'turns, term = within, "blocks"',
        'turns, term = within + 1, "blocks"',
    ),
    _mutant(
        "a run overlooks who left the cohort in flight",
        "fast-forward",
        fastforward_module,
        "horizon",
        "if entry.detached:",
        "if False:",
    ),
    _mutant(
        "a run begins while something else is in flight",
        "fast-forward",
        fastforward_module,
        "horizon",
        "not all(entry.plan.steady for entry in flight)",
        "not flight[-1].plan.steady",
    ),
    _mutant(
        "blocks counted at the wrong phase",
        "fast-forward",
        DecodeCohort,
        "turns_within",
        "(seq + step) % self.block_size",
        "(seq + step + 1) % self._block_size",
    ),
    _mutant(
        "one cycle of blocks too many",
        "fast-forward",
        DecodeCohort,
        "turns_within",
        "turns = cycles * self.block_size",
        "turns = (cycles + 1) * self._block_size",
    ),
    _mutant(
        "a run although outputs may become hits of the queue's head",
        "followers",
        Scheduler,
        "_stays_blocked",
        "(full or not (self._cohort.num_sharing or self._dynamic))",
        "(full or not self._dynamic)",
    ),
    _mutant(
        "the limit of a policy ignored",
        "pulses",
        drive_module,
        "up_to",
        "return ends if limit >= ends[-1] else ends[: bisect_right(ends, limit) + 1]",
        "return ends",
    ),
    _mutant(
        "the limit of a policy off by one",
        "pulses",
        drive_module,
        "up_to",
        "bisect_right(ends, limit) + 1",
        "bisect_right(ends, limit) + 2",
    ),
    _mutant(
        "a run goes one step past the wake-up",
        "fast-forward",
        drive_module,
        "drive",
        "turns = bisect_left(ends, now)",
        "turns = bisect_left(ends, now) + 1",
    ),
    _mutant(
        "a run advances the blocks of one step less",
        "fast-forward",
        fastforward_module,
        "advance",
        "for seq in range(first, last + 1):\n        crossing",
        "for seq in range(first, max(last, first + 1)):\n        crossing",
    ),
    _mutant(
        "a run advances the blocks of one step more",
        "fast-forward",
        fastforward_module,
        "advance",
        "for seq in range(first, last + 1):\n        crossing",
        "for seq in range(first, last + 2):\n        crossing",
    ),
    _mutant(
        "a run's context tokens off by one step",
        "fast-forward",
        fastforward_module,
        "advance",
        "context + (seq - first) * cohort.num",
        "context + (seq - first + 1) * cohort.num",
    ),
    _mutant(
        "a run's planned tokens off by one step",
        "fast-forward",
        fastforward_module,
        "advance",
        "cohort.num * turns",
        "cohort.num * (turns - 1)",
    ),
    _mutant(
        "a run's members off by one token",
        "fast-forward",
        fastforward_module,
        "advance",
        "cohort.advance(turns)",
        "cohort.advance(turns - 1)",
    ),
    _mutant(
        "a run completes one step less",
        "fast-forward",
        fastforward_module,
        "advance",
        "scheduler._done += turns",
        "scheduler._done += turns - 1",
    ),
    _mutant(
        "who ends with a run stays in the cohort",
        "fast-forward",
        fastforward_module,
        "advance",
        "scheduler._retire_capped(last)",
        "pass",
    ),
    _mutant(
        "a run publishes what a step in flight writes",
        "followers",
        fastforward_module,
        "advance",
        "range(first - 1 - lag, last - lag)",
        "range(first - 1 - lag, last - lag + 2)",
    ),
    _mutant(
        "a run forgets to publish",
        "followers",
        fastforward_module,
        "advance",
        "scheduler._publish_fills(last - lag)",
        "pass",
    ),
    _mutant(
        "a run's blocks recorded a step late",
        "fast-forward",
        Scheduler,
        "num_blocks_taken",
        "self._seq + step",
        "self._seq + step + 1",
    ),
    _mutant(
        "a run's context recorded a step late",
        "fast-forward",
        Recorder,
        "advanced",
        "num * (turns - 1)",
        "num * turns",
    ),
    _mutant(
        "an identity is told a token twice",
        "programs",
        Scheduler,
        "_catch_up",
        "if request.told < self._done:",
        "if True:",
    ),
    _mutant(
        "an identity is not told what was sampled before it left the cohort",
        "programs",
        leaving_module,
        "leave_cohort",
        "scheduler._catch_up(request)",
        "pass",
    ),
    # Eviction.
    _mutant(
        "a block given up before what follows it",
        "evictions",
        RankedOrder,
        "_evict",
        "if index.is_needed(block):",
        "if False:",
    ),
    _mutant(
        "what was put aside never comes back", "evictions", RankedOrder, "_evict", "self._bring_back(before)", "pass"
    ),
    _mutant(
        "an entry of the past counts",
        "evictions",
        RankedOrder,
        "_evict",
        "self._ticket[block] != ticket",
        "not self._ticket[block]",
    ),
    _mutant("a block in use may be given up", "evictions", RankedOrder, "remove", "self._ticket[block] = 0", "pass"),
    _mutant("uses are not counted", "policies of eviction", RankedOrder, "used", "self._num_uses[block] += 1", "pass"),
    _mutant("what is given up stays in the index", "evictions", RankedOrder, "_evict", "index.remove([block])", "pass"),
    # Fork and copy-on-write.
    _mutant(
        "a shared block written in place",
        "forks",
        BlockManager,
        "_shared_last",
        "self.pool.refs(request.table[place]) > 1",
        "False",
    ),
    _mutant(
        "a copy for the last one that has the block, too",
        "forks",
        BlockManager,
        "_shared_last",
        "self.pool.refs(request.table[place]) > 1",
        "True",
    ),
    _mutant(
        "the copy of a shared block not counted",
        "forks",
        BlockManager,
        "need",
        "blocks += 1\n    if hits",
        "pass\n    if hits",
    ),
    _mutant(
        "the copied block is not given back", "forks", BlockManager, "append_slots", "self.pool.drop([source])", "pass"
    ),
    _mutant("a copy that no plan is given", "forks", BlockManager, "append_slots", "self._copies.append", "list"),
    _mutant(
        "the source of a copy becomes the target of another",
        "copy sources",
        BlockManager,
        "free",
        "block in self._copy_sources and self.pool.refs(block) == 1",
        "False",
    ),
    _mutant("a fork without references", "forks", BlockManager, "fork", "self.pool.share(child.table)", "pass"),
    _mutant(
        "a fork takes slots beyond the tokens along",
        "forks",
        BlockManager,
        "fork",
        "parent.table[: -(-parent.sched // self.block_size)]",
        "list(parent.table)",
    ),
    _mutant("the parent forgets that it shares", "forks", BlockManager, "fork", "self.cow[parent.id] = parent", "pass"),
    _mutant(
        "a beam's tables change owners one after another",
        "forks",
        groups_module,
        "reorder",
        "scheduler.manager.reorder(members, sources)",
        "[scheduler.manager.reorder([m], [s]) for m, s in zip(members, sources)]",
    ),
    _mutant(
        "a beam takes a step in part",
        "narrow",
        groups_module,
        "_tokens_each",
        "count = min(tokens - 1, threshold, budget)",
        "count = min(tokens, threshold, budget)",
    ),
    _mutant(
        "a beam is preempted in part",
        "forks",
        leaving_module,
        "preempt",
        "group.members if group is not None and group.beam else [victim]",
        "[victim]",
    ),
    _mutant(
        "seats for sequences to come are not kept",
        "forks",
        admitting_module,
        "start_running",
        "scheduler._seats_kept += scheduler._seats(request) - 1",
        "pass",
    ),
    _mutant(
        "a beam's tokens named by whoever had them first",
        "forks",
        groups_module,
        "begin",
        "root.shared_blocks = root.key_blocks = prompt_blocks",
        "root.shared_blocks = prompt_blocks",
    ),
    # Swap.
    _mutant(
        "a swap that is not copied", "swaps", HostBlocks, "swap_out", "self._out.append(BlockCopy(block, host))", "pass"
    ),
    _mutant(
        "a swapped request comes back without a copy",
        "swaps",
        tiers_module,
        "swap_in",
        "scheduler._swap_in.append",
        "tuple",
    ),
    _mutant("host blocks kept for ever", "swaps", HostBlocks, "swap_in", "self.release(table)", "pass"),
    _mutant(
        "host blocks of an aborted request kept for ever",
        "swaps",
        leaving_module,
        "end",
        "scheduler.host.release(request.host)",
        "pass",
    ),
    _mutant(
        "a partly filled block swapped under a key",
        "swaps",
        tiers_module,
        "swap_out",
        "if i < named else None",
        "if True else None",
    ),
    _mutant("shared blocks copied twice", "one copy", HostBlocks, "swap_out", "self._copied[block] = host", "pass"),
    _mutant(
        "what the host has, and nobody holds, is not counted",
        "tiers",
        HostBlocks,
        "swap_out",
        "missing + len(revived) > self.pool.num_free",
        "missing > self.pool.num_free",
    ),
    _mutant(
        "a swap loses the tokens of its last block",
        "swaps",
        tiers_module,
        "swap_out",
        "num = -(-request.sched // size)",
        "num = request.sched // size",
    ),
    _mutant(
        "a block copied out for nobody is written twice",
        "copied for nobody",
        HostBlocks,
        "_take",
        "if self._out and blocks:",
        "if False:",
    ),
    # The host tier.
    _mutant("a transfer without references", "tiers", Transfers, "_begin", "self._device.share(device)", "device = ()"),
    _mutant("a load does not hold its sources", "tiers", Transfers, "load", "self.host.pool.share(sources)", "pass"),
    _mutant(
        "a failed store can be hit",
        "tiers",
        Transfers,
        "end",
        "if ok and self.host.index.find(key) is None:",
        "if self.host.index.find(key) is None:",
    ),
    _mutant("a failed load counts as done", "tiers", tiers_module, "transfer_ended", "if ok:", "if True:"),
    _mutant("a lease that is never over", "tiers", Transfers, "expired", "> now", "> 0"),
    _mutant(
        "the rest of a prompt that is being loaded is not promised",
        "promises",
        tiers_module,
        "promised",
        "sum(need(request, (), request.known) for request in scheduler._loading.values())",
        "0",
    ),
    _mutant("stored before it is written", "same block again", tiers_module, "must_run", " and block not in new", ""),
    _mutant(
        "stored without what is before it",
        "tiers",
        Transfers,
        "store",
        "held.update(dict.fromkeys(index.ancestors(block)))",
        "pass",
    ),
    _mutant(
        "a victim whose blocks are in transfer",
        "loading victim",
        placing_module,
        "choose_victim",
        "while loading and scheduler._running[last].id in loading:",
        "while False:",
    ),
    # ---- contiguous runs
    _mutant(
        "a hole apart from the one before it", "extents", Holes, "give_back", "if before is not None:", "if False:"
    ),
    _mutant(
        "a hole apart from the one behind it",
        "extents",
        Holes,
        "give_back",
        "if first + size in self._size_at:",
        "if False:",
    ),
    _mutant(
        "first fit from the back", "extents", FirstFit, "_choose", "if tree[node] < num:", "if tree[node + 1] >= num:"
    ),
    _mutant("best fit takes the largest", "extents", BestFit, "_choose", "bisect_left(self._by_size, (num, 0))", "-1"),
    _mutant(
        "a buddy merged with a part of its buddy",
        "extents",
        Buddy,
        "give_back",
        "self._size_at.get(first ^ size) == size",
        "(first ^ size) in self._size_at",
    ),
    _mutant(
        "a buddy keeps what it was rounded up by",
        "extents",
        ExtentPool,
        "drop_run",
        "self._holes.give_back(first, run.size)",
        "self._holes.give_back(first, run.num_blocks)",
    ),
    _mutant(
        "a run given back twice",
        "extents",
        ExtentPool,
        "drop_run",
        "self._runs.pop(first, None)",
        "self._runs.get(first)",
    ),
    _mutant(
        "free blocks counted where a hole matters",
        "contiguous",
        ContiguousManager,
        "fits",
        "self.extents.has_room(blocks) and ",
        "",
    ),
    _mutant(
        "a watermark that overlooks the rounding",
        "contiguous",
        ContiguousManager,
        "fits",
        "self.extents.rounded(blocks) + spare",
        "blocks + spare",
    ),
    _mutant(
        "a buddy's largest run taken for the pool",
        "contiguous",
        ContiguousManager,
        "limit",
        "if blocks > self.extents.longest_run:",
        "if blocks > self.extents.num_blocks:",
    ),
    _mutant(
        "an oracle not held to its promise",
        "contiguous",
        ContiguousManager,
        "limit",
        "return min(cap, self._num_outputs(spec))",
        "return cap",
    ),
    _mutant(
        "the power of two above a power of two",
        "contiguous",
        ContiguousManager,
        "_num_outputs",
        "(length - 1).bit_length()",
        "length.bit_length()",
    ),
    _mutant(
        "a run without the lookahead",
        "contiguous",
        ContiguousManager,
        "_num_blocks",
        " + self._lookahead",
        "",
    ),
    _mutant(
        "slots out of reach that are in use still counted",
        "contiguous",
        ContiguousManager,
        "free",
        "self._cannot -= self._unreachable(request, run)",
        "pass",
    ),
    _mutant(
        "external slots of another head",
        "contiguous",
        ContiguousManager,
        "external_blocks",
        "if self._external[0] != size:",
        "if not self._external[0]:",
    ),
    _mutant(
        "external slots of older holes",
        "contiguous",
        ContiguousManager,
        "free",
        "self._external = (0, 0)",
        "pass",
    ),
    _mutant(
        "a run of steps takes reserved blocks from the free",
        "contiguous runs",
        Recorder,
        "advanced",
        "drawn = new",
        "drawn = 0",
    ),
    _mutant(
        "a run of steps keeps what is out of reach",
        "contiguous runs",
        ContiguousManager,
        "append_block_each",
        "self.run_unreachable.append(self._cannot)",
        "self.run_unreachable.append(self.run_unreachable[0] if self.run_unreachable else self._cannot)",
    ),
    # The account of prefix misses.
    _mutant(
        "another tenant's content is a first sight",
        "prefix misses",
        PrefixStats,
        "admitted",
        "salted += self._is_cached(keys)",
        "pass",
    ),
    _mutant(
        "the last block of a prompt is a miss of the cache",
        "prefix misses",
        PrefixStats,
        "admitted",
        "(asked - 1) // size",
        "asked // size",
    ),
    _mutant(
        "what was evicted has never been seen",
        "prefix misses",
        PrefixStats,
        "admitted",
        "if identity.key(i) in self._blocks:",
        "if False:",
    ),
    _mutant(
        "another tenant's content counts although it is lost",
        "prefix misses",
        PrefixStats,
        "_is_cached",
        "if key_of(block) == key:",
        "if True:",
    ),
    _mutant(
        "a sequence that forked asks for the prompt again",
        "prefix misses of forks",
        PrefixStats,
        "admitted",
        "request.epoch or request.id != request.root_id",
        "request.epoch",
    ),
    _mutant(
        "a further block of a content takes the place of the first",
        "prefix misses of twins",
        PrefixStats,
        "published",
        "if old != block and key_of(old) == key",
        "if False",
    ),
    _mutant(
        "what a swap stored has never been seen",
        "prefix misses of swaps",
        PrefixStats,
        "stored",
        "self._note(request, i, request.block_key(i))",
        "pass",
    ),
    _mutant(
        "who comes back before its token is known gets no further row",
        "back early",
        admitting_module,
        "admit",
        "if request.sched < request.known + request.pending:",
        "if request.sched < request.known:",
    ),
]

EQUIVALENT: list[tuple[Mutant, str]] = [
    (
        _mutant(
            "a completed chunk does not look at the epoch",
            "programs",
            completing_module,
            "complete",
            " and request.epoch == item.epoch",
            "",
        ),
        "With at most two steps in flight, a request that a plan preempts is admitted again before the older plan is "
        "complete only where the former has nothing to run. What is published early then is written by the plan that "
        "admits it, which runs before any that could hit it. It would matter with three.",
    ),
    (
        _mutant(
            "a run although the queue's head was not refused",
            "fast-forward",
            Scheduler,
            "_stays_blocked",
            "return blocked and (full",
            "return (full",
        ),
        "A head is left waiting without a refusal only while it is deferred, for what a plan in flight writes; that "
        "plan has prefill rows, so no run begins before it is complete, and by then the head has been looked at again.",
    ),
]
"""Edits that change nothing that can be seen, and why."""
