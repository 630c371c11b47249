"""Which replica a gateway sends a request to.

A router knows what a gateway knows: which replicas pass their health checks, and what it has sent to each and not got
back. It never looks into a replica. One of your own is a subclass of `Router` with a `choose`, named on the command
line as `path/file.py:Class`.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from sim.draws import mixed
from sim.errors import SimError
from traces import Trace

__all__ = [
    "ROUTERS",
    "LeastLoaded",
    "PowerOfTwo",
    "PrefixAffinity",
    "ReplicaView",
    "RoundRobin",
    "RoutedRequest",
    "Router",
    "Session",
    "load_router",
]


class RoutedRequest:
    """What a router may know of a request."""

    __slots__ = ("_trace", "attempt", "max_tokens", "priority", "prompt_tokens", "row", "session", "tenant")

    def __init__(self, trace: Trace, row: int, attempt: int, session: int) -> None:
        self._trace = trace
        self.row = row
        self.attempt = attempt
        """1 for the first, more for a retry."""
        self.session = session
        """The same for all turns of a conversation: the row of its first."""
        self.prompt_tokens = int(trace.prompt_tokens[row])
        self.max_tokens = int(trace.output_tokens[row])
        self.tenant = int(trace.tenant[row])
        self.priority = int(trace.priority[row])

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """(id, tokens) of each part of the prompt; an id names all of the prompt up to the part's end."""
        return self._trace.spans(self.row)


class ReplicaView:
    """What a gateway knows of a replica. Routers only read it."""

    __slots__ = ("healthy", "index", "kv_tokens", "max_outstanding", "outstanding", "outstanding_tokens", "weight")

    def __init__(self, index: int, kv_tokens: int, max_outstanding: int | None, weight: float = 1.0) -> None:
        self.index = index
        self.kv_tokens = kv_tokens
        """Tokens that its KV cache holds."""
        self.max_outstanding = max_outstanding
        """Requests it is sent at most at a time; None: no limit."""
        self.weight = weight
        """How fast it is beside the others, where replicas differ: load is divided by it."""
        self.outstanding = 0
        """Requests sent and not answered."""
        self.outstanding_tokens = 0
        """Prompt tokens of those, and the tokens that they may generate."""
        self.healthy = True
        """By its last health check."""

    @property
    def load(self) -> float:
        """Outstanding requests for its speed."""
        return self.outstanding / self.weight


class Router:
    """Base of all routers. Decisions must depend on arguments, own state and the seed alone."""

    name = "router"

    def start(self, replicas: Sequence[ReplicaView], seed: int) -> None:
        """Told once, before anything else: all replicas, and a seed for what is drawn."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: int) -> int:
        """The index of one of `replicas`, which can take the request now; `now` in ns."""
        raise NotImplementedError

    def sent(self, request: RoutedRequest, replica: int, now: int) -> None:
        """The request went to that replica."""

    def lost(self, replica: int) -> None:
        """The replica has gone, and with it all that its cache held."""


class RoundRobin(Router):
    """One after another."""

    name = "round-robin"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: int) -> int:
        index = min((view.index for view in replicas if view.index >= self._next), default=replicas[0].index)
        self._next = index + 1
        return index


def _least(replicas: Sequence[ReplicaView]) -> int:
    return min(replicas, key=lambda view: (view.load, view.index)).index


class LeastLoaded(Router):
    """The replica with the fewest outstanding requests; the first of several."""

    name = "least-loaded"

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: int) -> int:
        return _least(replicas)


class PowerOfTwo(Router):
    """The less loaded of two drawn replicas: nearly as even as looking at all."""

    name = "power-of-two"

    def __init__(self) -> None:
        self._seed = 0

    def start(self, replicas: Sequence[ReplicaView], seed: int) -> None:
        self._seed = seed

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: int) -> int:
        if len(replicas) == 1:
            return replicas[0].index
        drawn = mixed(self._seed, request.row, request.attempt)
        first = drawn % len(replicas)
        second = (first + 1 + (drawn >> 32) % (len(replicas) - 1)) % len(replicas)
        return _least([replicas[first], replicas[second]])


class Session(Router):
    """All turns of a conversation to one replica, by rendezvous hashing: when a replica comes or goes, only its own
    conversations move. A request without turns before or after it is a conversation of its own."""

    name = "session"

    def __init__(self) -> None:
        self._seed = 0

    def start(self, replicas: Sequence[ReplicaView], seed: int) -> None:
        self._seed = seed

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: int) -> int:
        return max(replicas, key=lambda view: mixed(self._seed, request.session, view.index)).index


class PrefixAffinity(Router):
    """The replica that was sent the longest part of the prompt before, if that is more than `threshold` of it; else, or
    where load is uneven (the fullest has `balance_abs` more than the emptiest, and `balance_rel` times as many), the
    least loaded.

    What a replica remembers is guessed from what it was sent: the newest `kv_tokens` of it. The form and the defaults
    of its thresholds are those of SGLang's cache-aware router.
    """

    name = "prefix"

    def __init__(self, threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5) -> None:
        self.threshold = threshold
        self.balance_abs = balance_abs
        self.balance_rel = balance_rel
        self._known: dict[int, OrderedDict[int, int]] = {}
        """By replica: part of a prompt -> its tokens, the newest last."""
        self._tokens: dict[int, int] = {}
        self._room: dict[int, int] = {}

    def start(self, replicas: Sequence[ReplicaView], seed: int) -> None:
        self._known = {view.index: OrderedDict() for view in replicas}
        self._tokens = {view.index: 0 for view in replicas}
        self._room = {view.index: view.kv_tokens for view in replicas}

    def matched(self, request: RoutedRequest, replica: int) -> int:
        """Leading tokens of the prompt that the replica was sent before."""
        known = self._known[replica]
        total = 0
        for name, tokens in request.spans:
            if name not in known:
                break
            total += min(tokens, known[name])
        return total

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: int) -> int:
        loads = [view.load for view in replicas]
        high, low = max(loads), min(loads)
        if high - low > self.balance_abs and high > self.balance_rel * low:
            return _least(replicas)
        best = max(replicas, key=lambda view: (self.matched(request, view.index), -view.load, -view.index))
        if self.matched(request, best.index) > self.threshold * request.prompt_tokens:
            return best.index
        return _least(replicas)

    def sent(self, request: RoutedRequest, replica: int, now: int) -> None:
        known = self._known[replica]
        total = self._tokens[replica]
        # The end of the prompt first, so that it is forgotten first.
        for name, tokens in reversed(request.spans):
            before = known.pop(name, 0)
            known[name] = max(tokens, before)
            total += known[name] - before
        while total > self._room[replica] and known:
            total -= known.popitem(last=False)[1]
        self._tokens[replica] = total

    def lost(self, replica: int) -> None:
        self._known[replica].clear()
        self._tokens[replica] = 0


ROUTERS: dict[str, type[Router]] = {
    kind.name: kind for kind in (RoundRobin, LeastLoaded, PowerOfTwo, PrefixAffinity, Session)
}
"""By the name on the command line."""


def load_router(where: str) -> Router:
    """A built-in router by name, or a class of the user's as `path/file.py:Class`.

    Raises:
        SimError: there is no such router, file or class, the file does not run, or the class is none that can choose.
    """
    if where in ROUTERS:
        return ROUTERS[where]()
    path, separator, name = where.rpartition(":")
    if not separator:
        near = difflib.get_close_matches(where, ROUTERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ROUTERS)}, and path/file.py:Class."
        raise SimError(f"There is no router '{where}'; {hint}")
    if not Path(path).is_file():
        raise SimError(f"Router '{where}': there is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"kvtwin_router_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise SimError(f"Router '{where}': {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise SimError(f"Router '{where}': {path} does not run: {type(error).__name__}: {error}.") from error
    found = getattr(module, name, None)
    if found is None:
        raise SimError(f"Router '{where}': {path} has no class {name}.")
    if not (inspect.isclass(found) and issubclass(found, Router) and found.choose is not Router.choose):
        raise SimError(f"Router '{where}': {name} must be a subclass of sim.routers.Router that defines choose().")
    try:
        router = found()
    except (Exception, SystemExit) as error:
        raise SimError(f"Router '{where}': {name}() fails: {type(error).__name__}: {error}.") from error
    assert isinstance(router, Router)  # it is an instance of a subclass
    return router
