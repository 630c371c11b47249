"""What the core knows of a request. Changed by the scheduler and the block manager alone."""

from __future__ import annotations

from engine.core.types import BlockHash, BlockId, BlockIdentity, RequestSpec

__all__ = ["FINISHED", "RUNNING", "WAITING", "Request"]

WAITING = 0
RUNNING = 1
FINISHED = 2


class Request:
    """A request between `add` and its end.

    While it is a member of the decode cohort, `sched`, `known` and `pending` are implied by the cohort's counters
    (see cohort.py) and the fields here are stale; leaving the cohort brings them up to date.
    """

    __slots__ = (
        "base",
        "cap",
        "draining",
        "epoch",
        "floor",
        "id",
        "identity",
        "in_cohort",
        "join_seq",
        "key",
        "known",
        "num_prompt",
        "pending",
        "published",
        "row_seq",
        "sample_seq",
        "sched",
        "shared_blocks",
        "spec",
        "state",
        "table",
        "ticket",
        "written",
    )

    def __init__(self, id: int, spec: RequestSpec, cap: int, shared_blocks: int, key: tuple[int, ...]) -> None:
        self.id = id
        self.spec = spec
        self.identity: BlockIdentity | None = spec.identity
        self.num_prompt = spec.num_prompt_tokens
        self.cap = cap
        """Tokens it may generate: max_tokens, or what the model's length leaves."""
        self.shared_blocks = shared_blocks
        """Leading blocks whose content another request may have; those beyond are private."""
        self.key = key
        """Its place in the order of the policy; unique, since it ends in (arrival, id)."""
        self.state = WAITING
        self.epoch = 0
        """How often it was preempted."""
        self.table: list[BlockId] = []
        """Its blocks, in order. It owns one reference to each."""
        self.sched = 0
        """Tokens whose KV is in its blocks once all plans so far have run."""
        self.known = spec.num_prompt_tokens
        """Tokens with a known value: the prompt, and the outputs of completed steps."""
        self.pending = 0
        """Outputs being sampled by plans in flight."""
        self.written = 0
        """Leading tokens that the cache may keep (outside the cohort; see Scheduler._written)."""
        self.published = 0
        """Leading blocks of the table that the index lists as this content, or that hold a hit."""
        self.draining = False
        """Its last token is being sampled: it keeps its place and its blocks until that step completes."""
        self.in_cohort = False
        self.base = 0
        """In the cohort: sched minus the number of the newest plan."""
        self.join_seq = 0
        """In the cohort: the plan after which it joined."""
        self.floor = 0
        """In the cohort: all that plans up to this one sampled for it was known when it joined."""
        self.row_seq = 0
        """The last plan in which it was a cohort row although it has left the cohort since."""
        self.sample_seq = 0
        """The last plan that sampled for it (kept up to date when it is outside the cohort)."""
        self.ticket = 0
        """Which of its entries in the waiting queue counts."""

    def private_key(self, index: int) -> BlockHash:
        """The key of a block whose content nobody else can have."""
        return BlockHash(-((self.id << 32) | index) - 1)

    def block_key(self, index: int) -> BlockHash:
        if index < self.shared_blocks and self.identity is not None:
            return self.identity.key(index)
        return self.private_key(index)

    def __repr__(self) -> str:
        state = ("waiting", "running", "finished")[self.state]
        where = f"cohort base {self.base} joined {self.join_seq}" if self.in_cohort else f"sched {self.sched}"
        return f"<request {self.id} {state} known {self.known} {where} pending {self.pending} blocks {self.table}>"
