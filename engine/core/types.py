"""The records that cross the core's border: what a request asks, what a step does, what came of it.

All times are integer nanoseconds. All of these are written once and then only read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, NewType, Protocol

__all__ = [
    "FOR_KV",
    "FOR_NOTHING",
    "FOR_POLICY",
    "FOR_SEQUENCES",
    "FOR_TOKENS",
    "NO_LIMIT",
    "BlockCopy",
    "BlockHash",
    "BlockId",
    "BlockIdentity",
    "Cohort",
    "Executor",
    "FastExecutor",
    "Finish",
    "GlideExecutor",
    "PlanItem",
    "PlanView",
    "RequestSpec",
    "StepEvents",
    "StepOutcome",
    "StepPlan",
    "Transfer",
    "TransferEnd",
    "Usage",
]

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", object)
"""What makes two full blocks the same. Hashable: bytes for real tokens, int for identities of a trace."""

NO_LIMIT = 1 << 62
"""'Never', for counts of steps and for times in ns."""

# What the first of the waiting requests waits for.
FOR_NOTHING = 0
FOR_TOKENS = 1
"""The step's budget of tokens."""
FOR_SEQUENCES = 2
"""Running sequences, of which there may be max_num_seqs."""
FOR_KV = 3
"""KV blocks."""
FOR_POLICY = 4
"""An admission or batching policy, or what another request is writing (same_step `defer`)."""


class BlockIdentity(Protocol):
    """What the content of a request's blocks is: equal keys mean equal KV, from the prompt's start on."""

    @property
    def shared_tokens(self) -> int:
        """Leading tokens that another request may have too. Blocks beyond are private to this request."""
        ...

    @property
    def shares_output(self) -> bool:
        """Whether generated tokens have an identity that another request may have."""
        ...

    def key(self, index: int) -> BlockHash:
        """The key of full block `index`; its last token must be known."""
        ...

    def bare_key(self, index: int) -> BlockHash:
        """The same for the content alone, whatever the salt and the adapter: equal for all who could share it."""
        ...

    def append(self, token: int) -> None:
        """One generated token became known: in order, but several at once where nobody asked in between; and maybe
        never where `shares_output` is false."""
        ...

    def fork(self) -> BlockIdentity:
        """The identity of another sequence with the same tokens so far."""
        ...


class PrefixRow(NamedTuple):
    """What a request's prompt found in the prefix cache, in tokens (see engine.core.prefixstats)."""

    request: int
    tenant: int
    asked_tokens: int
    """The prompt: the sum of those below."""
    hit_tokens: int
    """In the device's cache."""
    host_hit_tokens: int
    """In the host tier."""
    never_seen_tokens: int
    evicted_tokens: int
    other_salt_tokens: int
    """Cached for another tenant or adapter at this time, and never for this one."""
    short_tokens: int


class RequestSpec(NamedTuple):
    """A request as its sender gives it."""

    arrival: int
    """When it was sent, in ns."""
    num_prompt_tokens: int
    max_tokens: int
    """The most tokens it may generate."""
    identity: BlockIdentity | None = None
    """None: nothing of it can be shared, and nobody else's blocks can serve it."""
    priority: int = 0
    """Lower is served first, as in vLLM."""
    deadline: int = NO_LIMIT
    tenant: int = 0
    n: int = 1
    """Sequences that it generates from one prompt: they share its blocks, and each has an id of its own, from the id
    that `add` returns on."""
    beam: bool = False
    """The `n` sequences are a beam: they take every step together, and its outcome says which continues which."""
    predicted_tokens: int = 0
    """Somebody's prediction of the output's length; 0: none."""
    oracle_tokens: int = 0
    """The output's true length, for policies and allocators that are named oracle and for nobody else; 0: not known."""


class PlanItem(NamedTuple):
    """One row of a step outside the cohort: a prefill chunk, a recompute, or a decode that rejoins."""

    request: int
    epoch: int
    """How often the request had been preempted when this was planned."""
    start: int
    """Tokens of the request whose KV is in its blocks before the step."""
    num_tokens: int
    samples: bool
    """Whether the row's last token yields an output token."""


class BlockCopy(NamedTuple):
    """The whole content of one block, in all layers. Which tiers the ids belong to, the phase says."""

    src: BlockId
    dst: BlockId


class Transfer(NamedTuple):
    """Copies between the tiers that run beside steps. Until it ends it holds a reference to every block in it."""

    id: int
    load: bool
    """From host to device (a promotion), or else from device to host (a store)."""
    copies: tuple[BlockCopy, ...]


class TransferEnd(NamedTuple):
    id: int
    ok: bool
    """False: nothing can be said of what is in its destination blocks, and nothing writes to them any more."""


class Cohort(Protocol):
    """All rows of a step that decode one token each, as one object."""

    @property
    def num(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """Sum over rows of the tokens in the cache before the step."""
        ...

    def rows(self) -> list[PlanItem]:
        """The rows in scheduled order. To be called before the scheduler is touched again."""
        ...


class StepPlan:
    """What the executor has to do in one step. Steps run in the order of `seq`.

    Phases run in the order swap_out (device to host), swap_in (host to device), copies (device to device), writes
    (prefills and decodes together). No block is written twice in a phase, or both read and written. `transfers` begin
    after the copies and run beside this step and later ones; their ends are told with the outcome of a step.
    """

    __slots__ = (
        "admitted",
        "copies",
        "decodes",
        "joined",
        "loading",
        "now",
        "preempted",
        "prefills",
        "rejected",
        "revoked",
        "seq",
        "steady",
        "swap_in",
        "swap_out",
        "transfers",
    )

    def __init__(
        self,
        seq: int,
        now: int,
        prefills: tuple[PlanItem, ...],
        decodes: Cohort,
        admitted: tuple[int, ...],
        preempted: tuple[int, ...],
        joined: tuple[tuple[int, int, int], ...],
        steady: bool,
    ) -> None:
        self.seq = seq
        """Number of the plan, from 1 on."""
        self.now = now
        """When it was decided, in ns."""
        self.prefills = prefills
        self.decodes = decodes
        self.admitted = admitted
        """Requests that began (or began again) to run, in order."""
        self.preempted = preempted
        """Requests that lost their blocks, in the order of preemption."""
        self.joined = joined
        """(request, epoch, outputs it will have after this step): will be cohort rows from the next plan on."""
        self.steady = steady
        """The next plan will be this one again, one token later, unless a horizon ends or something arrives."""
        self.copies: tuple[BlockCopy, ...] = ()
        self.swap_out: tuple[BlockCopy, ...] = ()
        self.swap_in: tuple[BlockCopy, ...] = ()
        self.transfers: tuple[Transfer, ...] = ()
        self.revoked: tuple[int, ...] = ()
        """Transfers whose lease is over: they must not read or write anything from now on, and have failed."""
        self.loading: tuple[tuple[int, int], ...] = ()
        """(request, leading tokens that it need not compute) of those admitted that wait for a load first."""
        self.rejected: tuple[Finish, ...] = ()
        """Requests that were given up for lack of blocks (preemption_mode `reject`). Also where the plan is not run."""

    @property
    def runs(self) -> bool:
        """Whether there is anything to do. If not, the plan is not submitted, has seq 0, and may still have preempted
        somebody. A plan that runs may have no rows: it then waits for the next transfer to end."""
        return self.seq > 0

    @property
    def num_tokens(self) -> int:
        """New tokens of the step, over all rows."""
        return self.decodes.num + sum(item.num_tokens for item in self.prefills)

    @property
    def num_rows(self) -> int:
        """Requests that compute something in this step."""
        return self.decodes.num + len(self.prefills)


class Finish(NamedTuple):
    request: int
    reason: str
    """`stop` (met a stop token or string), `length` (max_tokens or the model's length), `abort`, or `no-memory` (given
    up where blocks ran out)."""
    num_output_tokens: int = 0
    """How many outputs it has got. Filled in by the core."""
    num_preemptions: int = 0
    """Filled in by the core."""


class StepOutcome(NamedTuple):
    """What came of a step."""

    end: int
    """When it ended, in ns."""
    tokens: Mapping[int, int] | None = None
    """The sampled token of each request that sampled. None where tokens have no value (the simulator)."""
    finished: tuple[Finish, ...] = ()
    """Who met a stop in this step. Reaching max_tokens is the core's to notice, and need not be told."""
    parents: Mapping[int, int] | None = None
    """For sequences of a beam: whose tokens (up to the one sampled in this step) each continues; its own if not named.
    When a request with n > 1 samples for the first time, `tokens` has one for each of its n sequences."""
    transfers: tuple[TransferEnd, ...] = ()
    """Transfers that have ended since the outcome before."""


class StepEvents(NamedTuple):
    """What a completed step means for requests."""

    first_tokens: tuple[int, ...]
    """Requests that got their first output token."""
    resumed: tuple[tuple[int, int], ...]
    """(request, number of the plan that sampled its previous token), of rows outside the cohort: the gap between
    the two tokens may span several steps."""
    finished: tuple[Finish, ...]
    forked: tuple[tuple[int, int], ...] = ()
    """(parent, child): sequences that began in this step, before anything else here happened to them."""


class Usage(NamedTuple):
    """Where every slot of the pool is. All but `shared` sum to the size of the pool."""

    held: int
    """Physical slots that carry a token, each counted once."""
    tail: int
    """Unused slots in the last blocks of requests."""
    reserved_may: int
    """Unused whole blocks of requests, up to prompt + max_tokens."""
    reserved_cannot: int
    """The same beyond prompt + max_tokens."""
    external: int
    """Free, but in no hole that fits the head of the queue. Always 0 in a paged pool."""
    transfer: int
    """Held only by a transfer."""
    cached: int
    """Free, with content that a prefix hit could still use."""
    free: int
    shared: int
    """Slots saved by sharing: logical minus physical."""


class PlanView(Protocol):
    """What an executor may read of the scheduler while it runs a plan."""

    def table(self, request: int) -> Sequence[BlockId]:
        """The request's block table, live: read it before the scheduler is touched again."""
        ...


class Executor(Protocol):
    """Runs steps in the order in which they are submitted."""

    def submit(self, plan: StepPlan, view: PlanView, now: int) -> None: ...

    def collect(self) -> StepOutcome:
        """The outcome of the oldest step that was submitted and not collected; waits for it."""
        ...


class FastExecutor(Executor, Protocol):
    """An executor that knows the future well enough to run many steps at once: the simulator."""

    def finish_bound(self) -> int:
        """How many completions from now (of the oldest step in flight on) surely meet no stop."""
        ...

    def preview(self, turns: int) -> Sequence[int]:
        """End times in ns of the next `turns` completions, if the newest submitted plan repeats."""
        ...

    def advance(self, ends: Sequence[int], plans: Sequence[StepPlan]) -> None:
        """So many steps completed, at these times; `plans` are now the ones in flight, oldest first."""
        ...


class GlideExecutor(FastExecutor, Protocol):
    """One that can also take decode steps for which no plan is made. No step is in flight meanwhile."""

    def next_stop(self) -> int:
        """The first plan, by number, in which somebody is known to stop by itself; NO_LIMIT: none."""
        ...

    def stops_in(self, seq: int) -> list[Finish]:
        """Who stops in plan `seq`, in which all that were ever told of and still run have a row."""
        ...

    def glide(self, rows: int, context: int, turns: int, seq: int, now: int, until: int) -> list[int]:
        """End times in ns of plans seq, seq + 1, ... of `rows` decodes each, decided at the end of the one before.

        `context`: cached tokens of the first of them. At most `turns` (1 or more), the last being the first that ends
        at or after `until`.
        """
        ...
