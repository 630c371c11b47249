"""What the core knows of a request. Changed by the scheduler and the block manager alone."""

from __future__ import annotations

from engine.core.types import NO_LIMIT, BlockHash, BlockId, BlockIdentity, RequestSpec

__all__ = ["FINISHED", "RUNNING", "WAITING", "Group", "Request"]

WAITING = 0
RUNNING = 1
FINISHED = 2


class Group:
    """The sequences of a request with n > 1: one until the first token is sampled, n from then on."""

    __slots__ = ("beam", "forked", "members", "turn")

    def __init__(self, root: Request, beam: bool) -> None:
        self.members: list[Request] = [root]
        """Those that have not ended, by id."""
        self.beam = beam
        """They take every step together, and each step may change who continues whom."""
        self.forked = False
        self.turn = 0
        """The last plan in which a beam was looked at."""


class Request:
    """A sequence: a request, or one of the n of a request, between `add` and its end.

    While it is a member of the decode cohort, `sched`, `known` and `pending` are implied by the cohort's counters
    (see cohort.py) and the fields here are stale; leaving the cohort brings them up to date.
    """

    __slots__ = (
        "base",
        "cap",
        "computed",
        "epoch",
        "floor",
        "group",
        "host",
        "id",
        "identity",
        "identity_blocks",
        "in_cohort",
        "join_seq",
        "key",
        "key_blocks",
        "known",
        "num_prompt",
        "pending",
        "published",
        "publishes_output",
        "root_blocks",
        "root_id",
        "row_seq",
        "sample_seq",
        "sched",
        "shared_blocks",
        "spec",
        "state",
        "table",
        "ticket",
        "told",
        "waits",
        "written",
    )

    def __init__(self, id: int, spec: RequestSpec, cap: int, shared_blocks: int, key: tuple[int, ...]) -> None:
        self.id = id
        self.spec = spec
        self.identity: BlockIdentity | None = spec.identity
        self.num_prompt = spec.num_prompt_tokens
        self.cap = cap
        """Tokens it may generate: max_tokens, or what the model's length leaves."""
        self.identity_blocks = shared_blocks
        """Leading blocks that its identity names; those beyond are private."""
        self.shared_blocks = shared_blocks
        """Leading blocks that are published while it runs. Private ones among them serve sequences of its own."""
        self.publishes_output = spec.identity is not None and spec.identity.shares_output
        """Whether it publishes blocks of generated tokens while it runs."""
        self.key_blocks = NO_LIMIT
        """Leading blocks that have a key. A beam's tokens change owners, so only the prompt's blocks have one."""
        self.root_id = id
        """The first sequence of its request, and how many leading blocks it has in common with that one."""
        self.root_blocks = 0
        self.group: Group | None = None
        self.key = key
        """Its place in the order of the policy; unique, since it ends in (arrival, id)."""
        self.state = WAITING
        self.epoch = 0
        """How often it was preempted."""
        self.computed = 0
        """The most tokens that it had in its blocks when it was preempted."""
        self.table: list[BlockId] = []
        """Its blocks, in order. It owns one reference to each."""
        self.host: list[BlockId] = []
        """While it is swapped out: the host's blocks that hold its `sched` tokens. It owns one reference to each."""
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
        self.waits = False
        """It keeps its place and its blocks, and gets no row, until something in flight comes back: its last token, the
        step in which its group forks or is reordered, or a load."""
        self.in_cohort = False
        self.base = 0
        """In the cohort: sched minus the number of the newest plan."""
        self.join_seq = 0
        """In the cohort: the plan after which it joined."""
        self.floor = 0
        """In the cohort: all that plans up to this one sampled for it was known when it joined."""
        self.told = 0
        """In the cohort: the last plan whose token its identity knows."""
        self.row_seq = 0
        """The last plan in which it was a cohort row although it has left the cohort since."""
        self.sample_seq = 0
        """The last plan that sampled for it (kept up to date when it is outside the cohort)."""
        self.ticket = 0
        """Which of its entries in the waiting queue counts."""

    @property
    def is_beam(self) -> bool:
        return self.group is not None and self.group.beam

    @property
    def unforked(self) -> bool:
        """It stands for all n sequences of its request, which begin when it samples for the first time."""
        return self.group is not None and not self.group.forked

    def private_key(self, index: int) -> BlockHash:
        """The key of a block whose content no other request can have."""
        owner = self.root_id if index < self.root_blocks else self.id
        return BlockHash(-((owner << 32) | index) - 1)

    def block_key(self, index: int) -> BlockHash:
        if index < self.identity_blocks and self.identity is not None:
            return self.identity.key(index)
        return self.private_key(index)

    def __repr__(self) -> str:
        state = ("waiting", "running", "finished")[self.state]
        where = f"cohort base {self.base} joined {self.join_seq}" if self.in_cohort else f"sched {self.sched}"
        return f"<request {self.id} {state} known {self.known} {where} pending {self.pending} blocks {self.table}>"
