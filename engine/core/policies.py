"""The choices that the scheduler leaves to small objects, and how a user's own are loaded.

A policy sees requests as `RequestView`s: what their sender said and what was done so far, never how long their output
will be. A policy of the user's is a subclass of one of the kinds below, in a file of their own, named on the command
line as `path/file.py:Class`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import PolicyError
from engine.core.types import NO_LIMIT

__all__ = [
    "FCFS",
    "ORDERS",
    "Admission",
    "LastIn",
    "Order",
    "Policy",
    "Priority",
    "RequestView",
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


class Policy:
    """Base of all policies."""

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


class Admission(Policy):
    """Whether the first waiting request may start now, beyond there being room for it."""

    def admits(self, request: RequestView, need_blocks: int, free_blocks: int, num_running: int, now: int) -> bool:
        """`need_blocks`: free blocks that its whole prompt takes. False keeps it, and all behind it, waiting.

        Not asked while nothing runs: then the first that fits starts, so that no policy can stall the queue.
        """
        raise NotImplementedError


class Victim(Policy):
    """Who loses its blocks when a running request needs one and none is free."""

    def choose(self, candidates: Sequence[RequestView]) -> int:
        """The id of one of `candidates`: the running requests that have no place in this step yet, in order."""
        raise NotImplementedError


class FCFS(Order):
    """First come, first served."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def key(self, request: RequestView) -> tuple[int, ...]:
        return ()


class Priority(Order):
    """The lowest priority value first, as in vLLM."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def key(self, request: RequestView) -> tuple[int, ...]:
        return (request.priority,)


class WholePrompt(Admission):
    """Room for the whole prompt is enough (the scheduler has looked at that already)."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def admits(self, request: RequestView, need_blocks: int, free_blocks: int, num_running: int, now: int) -> bool:
        return True


class LastIn(Victim):
    """The last in the order: under FCFS, the last admitted."""

    def stable_until(self, now: int) -> int:
        return NO_LIMIT

    def choose(self, candidates: Sequence[RequestView]) -> int:
        return candidates[-1].id


ORDERS: dict[str, type[Order]] = {"fcfs": FCFS, "priority": Priority}
"""The orders that `--scheduling-policy` names."""

_KINDS: dict[type[Policy], str] = {Order: "key", Admission: "admits", Victim: "choose"}


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
    kinds = ", ".join(kind.__name__ for kind in _KINDS)
    if not inspect.isclass(found) or not issubclass(found, tuple(_KINDS)):
        raise PolicyError(f"policy {where!r}: {name} must be a subclass of one of {kinds} (engine.core.policies)")
    for kind, method in _KINDS.items():
        if issubclass(found, kind) and getattr(found, method) is getattr(kind, method):
            raise PolicyError(f"policy {where!r}: {name} must define {method}()")
    try:
        policy = found()
    except (Exception, SystemExit) as error:
        raise PolicyError(f"policy {where!r}: {name}() fails: {type(error).__name__}: {error}") from error
    assert isinstance(policy, Policy)  # it is an instance of a subclass
    return policy
