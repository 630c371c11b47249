"""When replicas die, and when they are back."""

from __future__ import annotations

from dataclasses import dataclass

from sim.draws import exponential, uniform
from sim.errors import SimError

__all__ = ["NEVER", "Faults", "load_ns"]

NEVER = -1
"""As a time: it does not happen."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Crashes of replicas and what follows. Times in ns."""

    crashes: tuple[tuple[int, int], ...] = ()
    """(replica, time) of crashes that are planned; one of a replica that is down then does nothing."""
    mtbf_ns: int = 0
    """Mean time between a replica's start and its crash, exponentially distributed; 0: none but those planned."""
    restart_ns: tuple[int, int] | None = None
    """From a crash until the replica serves again: uniform between both. None: each replica's own `restart_ns`."""
    health_interval_ns: int = 0
    """How often a gateway asks each replica's health; a crash and a return are noticed at the next multiple of it.
    0: at once."""
    seed: int = 0

    def check(self, num_replicas: int) -> None:
        """Raises SimError: a crash of a replica that does not exist, or a time that cannot be."""
        for replica, at in self.crashes:
            if not 0 <= replica < num_replicas:
                known = f"0 to {num_replicas - 1}" if num_replicas > 1 else "0 alone"
                raise SimError(f"A crash names replica {replica}; there are {known}.")
            if at < 0:
                raise SimError(f"A crash of replica {replica} is at {at} ns; it must not be before the start.")
        if self.mtbf_ns < 0 or self.health_interval_ns < 0:
            raise SimError("The times between crashes and between health checks must not be negative.")
        if self.restart_ns is not None and not 0 <= self.restart_ns[0] <= self.restart_ns[1]:
            raise SimError(f"A restart takes from {self.restart_ns[0]} to {self.restart_ns[1]} ns, which cannot be.")

    def lives_ns(self, replica: int, life: int) -> int:
        """How long the replica's life number `life` lasts; NEVER: until something else ends it."""
        if not self.mtbf_ns:
            return NEVER
        return max(1, int(exponential(self.seed, 1, replica, life) * self.mtbf_ns))

    def down_ns(self, replica: int, life: int, own: int) -> int:
        """How long it takes after the crash that ended life `life`; `own` is the replica's; NEVER: for good."""
        if self.restart_ns is None:
            return own
        low, high = self.restart_ns
        return low + int(uniform(self.seed, 2, replica, life) * (high - low + 1))

    def noticed_at(self, now: int) -> int:
        """When the health check that follows `now` is made."""
        interval = self.health_interval_ns
        return now if not interval else -(-now // interval) * interval


def load_ns(weights_bytes: int, bytes_per_s: float, start_s: float) -> int:
    """How long an engine takes to come up: it reads its weights, and needs `start_s` beside that (process, compilation,
    profiling, graphs). Raises SimError: the rate is not positive."""
    if not bytes_per_s > 0 or start_s < 0:
        raise SimError(f"Weights cannot be loaded at {bytes_per_s:g} bytes/s with {start_s:g} s beside it.")
    return round((weights_bytes / bytes_per_s + start_s) * 1e9)
