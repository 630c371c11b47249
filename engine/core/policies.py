"""The choices that the scheduler leaves to small objects: their kinds, and how a user's own are loaded.

A policy sees requests as `RequestView`s: what their sender said and what was done so far, never how long their output
will be (but for those that say that they are an oracle). A policy of the user's is a subclass of one of the kinds
below, in a file of their own, named on the command line as `path/file.py:Class`. Every scheduler works on a copy of its
own of each policy, so what a policy remembers is of one run.

orders, victims, batching   the built-in ones
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from engine.core.errors import PolicyError
from engine.core.types import NO_LIMIT, BlockHash

__all__ = [
    "MIXED",
    "Admission",
    "Batch",
    "Batching",
    "BlockFacts",
    "DynamicOrder",
    "Eviction",
    "Order",
    "Policy",
    "RequestView",
    "StepView",
    "Victim",
    "WholePrompt",
    "load_policy",
]


class RequestView(NamedTuple):
    """What a policy may know of a request. Times in ns."""

    id: int
    arrival: int
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    deadline: int
    tenant: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    predicted_tokens: int = 0
    """What somebody predicted the output's length to be; 0: nobody did."""
    oracle_tokens: int = 0
    """The output's true length, for policies whose `oracle` is True; 0 for all others, and where it is not known."""


class Policy:
    """Base of all policies."""

    oracle: ClassVar[bool] = False
    """Whether it asks for what no engine can know, the true length of outputs. Its name should say so."""

    def stable_until(self, now: int) -> int:
        """The time in ns up to which this policy, asked again about the same requests, gives the same answers.

        The default promises nothing, and nothing is fast-forwarded past it.
        """
        return now

    @property
    def name(self) -> str:
        return type(self).__name__


class Order(Policy):
    """In which order requests are served, waiting and running alike. The smallest key is first."""

    def key(self, request: RequestView) -> tuple[int, ...]:
        """Asked once, when the request is added. (arrival, id) is put behind it, so that no two are equal."""
        raise NotImplementedError

    def started(self, request: RequestView) -> None:
        """The request is admitted, for the first time or after a preemption. For orders that keep account."""


class DynamicOrder(Order):
    """An order of the waiting that changes with time or with what is cached: asked anew at each admission.

    `key` still says who is first among the running, and in which order the waiting are looked at.
    """

    window: ClassVar[int] = 128
    """How many of the waiting, the first by key, it is shown. Each costs a look into the prefix cache."""

    def key(self, request: RequestView) -> tuple[int, ...]:
        return ()

    def next(self, waiting: Sequence[RequestView], cached_tokens: Sequence[int], now: int) -> int:
        """The id of the one of `waiting` to be admitted next. If it does not fit, nobody is admitted.

        `cached_tokens`: how many leading tokens of each the prefix cache would serve now.
        """
        raise NotImplementedError


class Admission(Policy):
    """Whether the next waiting request may start now, beyond there being room for it."""

    def admits(self, request: RequestView, need_blocks: int, free_blocks: int, num_running: int, now: int) -> bool:
        """`need_blocks`: free blocks that it takes (its whole prompt). False keeps it, and all behind it, waiting.

        Not asked while nothing runs: then the first that fits starts, so that no policy can stall the queue. May be
        asked twice in a step about the same request.
        """
        raise NotImplementedError


class Victim(Policy):
    """Who loses its blocks when a running request needs one and none is free."""

    def choose(self, candidates: Sequence[RequestView]) -> int:
        """The id of one of `candidates`: the running requests that have no place in this step yet, in order.

        The first of all that run is never among them, unless it is alone: so it always goes on, and every run ends.
        """
        raise NotImplementedError


class BlockFacts(NamedTuple):
    """What an eviction policy may know of a cached block. Times are counts of uses, over all blocks."""

    key: BlockHash
    """What it holds."""
    position_tokens: int
    """Tokens before it in its prompt."""
    num_uses: int
    """How many requests have had it, since it was computed."""
    first_use: int
    last_use: int
    priority: int
    """Of the request that had it last."""


class Eviction(Policy):
    """Which cached block is given up when there is no blank one.

    Only blocks that nobody refers to are, and never one that would leave another cached block unreachable: the order
    is among the others.
    """

    def stable_until(self, now: int) -> int:
        return NO_LIMIT  # it is asked about blocks, when they become free, and not about time

    def rank(self, block: BlockFacts) -> tuple[int, ...]:
        """Asked when a block becomes free. The smallest rank goes first; of equal ones, the one that is free longer."""
        raise NotImplementedError

    def evicted(self, rank: tuple[int, ...]) -> None:
        """A block with this rank is given up."""


class StepView(NamedTuple):
    """What a batching policy may know of the step that is being decided."""

    num_waiting: int
    num_running: int
    num_decoding: int
    """Running requests that have one token to compute."""
    num_prefilling: int
    """Running requests that have more: prompts in chunks."""
    head_fits: bool
    """Whether the next waiting request could be admitted. False where the policy does not `look_at_head`."""
    now: int


class Batch(NamedTuple):
    """What a step holds."""

    admit: bool = True
    """Waiting requests may start. (Taken as True while nothing runs.)"""
    decodes: bool = True
    """Running requests that have one token to compute compute it. If not, they keep their blocks and pause."""
    prefills: bool = True
    """Prompts in chunks go on."""
    decodes_first: bool = False
    """Decodes get their tokens and blocks before prompts in chunks do, wherever they stand in the order."""
    whole_prompts: bool = False
    """Who is admitted computes its whole prompt in this step, and has blocks for all of it. A prompt that is longer
    than a whole step is cut into steps all the same."""


MIXED = Batch()
"""One token budget for everybody, in order."""


class Batching(Policy):
    """Which of admissions, prefills and decodes a step holds.

    A step that would be empty although there is something to do is filled as if the answer had been `MIXED`.
    """

    look_at_head: ClassVar[bool] = True
    """Whether `StepView.head_fits` is wanted; it costs a look into the prefix cache at each step."""

    def step(self, state: StepView) -> Batch:
        raise NotImplementedError


class WholePrompt(Admission):
    """Room is enough (the scheduler has looked at that already)."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def admits(self, request: RequestView, need_blocks: int, free_blocks: int, num_running: int, now: int) -> bool:
        return True


_KINDS: dict[type[Policy], tuple[str, int]] = {
    DynamicOrder: ("next", 3),
    Order: ("key", 1),
    Admission: ("admits", 5),
    Victim: ("choose", 1),
    Batching: ("step", 1),
    Eviction: ("rank", 1),
}
"""The method that a class of each kind must define, and how many arguments it is called with."""


def load_policy(where: str) -> Policy:
    """Load `path/file.py:Class` and check that it is a policy that can be asked.

    Raises:
        PolicyError: no such file or class, the file does not run, the class is no policy, or it cannot be made.
    """
    path, separator, name = where.rpartition(":")
    if not separator or not path or not name:
        raise PolicyError(f"policy {where!r}: write it as path/file.py:Class")
    if not Path(path).is_file():
        raise PolicyError(f"policy {where!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"kvtwin_policy_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise PolicyError(f"policy {where!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise PolicyError(f"policy {where!r}: {path} does not run: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if found is None:
        raise PolicyError(f"policy {where!r}: {path} has no class {name}")
    _check_kind(where, name, found)
    try:
        policy = found()
    except (Exception, SystemExit) as error:
        raise PolicyError(f"policy {where!r}: {name}() fails: {type(error).__name__}: {error}") from error
    assert isinstance(policy, Policy)  # it is an instance of a subclass
    return policy


def _check_kind(where: str, name: str, found: object) -> None:
    """That `found` is a class of some kind, with the methods of its kind.

    Raises:
        PolicyError: it is not.
    """
    if not inspect.isclass(found) or not issubclass(found, tuple(_KINDS)):
        kinds = ", ".join(kind.__name__ for kind in _KINDS)
        raise PolicyError(f"policy {where!r}: {name} must be a subclass of one of {kinds} (engine.core.policies)")
    for kind, (method, num) in _KINDS.items():
        if not issubclass(found, kind):
            continue
        function = getattr(found, method)
        if function is getattr(kind, method) and not (kind is Order and issubclass(found, DynamicOrder)):
            raise PolicyError(f"policy {where!r}: {name} must define {method}()")
        try:
            inspect.signature(function).bind(*[None] * (num + 1))  # and self
        except TypeError as error:
            names = [p for p in inspect.signature(getattr(kind, method)).parameters if p != "self"]
            raise PolicyError(f"policy {where!r}: {name}.{method} must take ({', '.join(names)})") from error
        except ValueError:
            continue  # it has no signature that can be read
