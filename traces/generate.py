"""Generates traces from a description.

Each purpose (arrivals, prompt lengths, output lengths, ...) draws from a stream of its own, so that a change to one of
them leaves the others as they were, and a longer trace begins like a shorter one of the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.lengths import Distribution, Section
from traces.schema import NO_ID, NO_ROW, Trace, make_trace, offsets_of

__all__ = ["generate", "load_generator"]

PROCESSES = ("poisson", "gamma", "constant", "trace", "closed-loop")
_KEYS = (
    "kind",
    "name",
    "num_requests",
    "seed",
    "arrival",
    "prompt_tokens",
    "output_tokens",
    "prefix",
    "sessions",
    "tenants",
    "priorities",
)
_ARRIVAL_KEYS = ("process", "rate_per_s", "cv", "concurrency", "file")
_PREFIX_KEYS = ("num_prefixes", "tokens", "share", "zipf")
_SESSION_KEYS = ("turns", "think_s")
_STREAMS = (
    "arrival",
    "prompt",
    "output",
    "prefix-has",
    "prefix-which",
    "prefix-tokens",
    "turns",
    "think",
    "tenant",
    "priority",
)
_MOST_REQUESTS = 100_000_000


def load_generator(path: Path, seed: int | None = None) -> Trace:
    """The trace that a YAML file describes; `seed` takes the place of the file's own."""
    import yaml

    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TraceError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise TraceError(
            f"{path}{place}: is not YAML ({getattr(error, 'problem', None) or error}); correct it"
        ) from None
    if isinstance(spec, dict) and seed is not None:
        spec = {**spec, "seed": seed}
    return generate(spec, where=str(path), base=path.parent)


def generate(spec: Mapping[str, Any], *, where: str = "generator", base: str | Path = ".") -> Trace:
    """The trace that `spec` describes (traces/README.md has the keys); the same spec gives the same trace anywhere.

    `where` names the description in messages; files in it are relative to `base`. Raises TraceError.
    """
    top = Section.of(spec, where, Path(base))
    top.choice("kind", ("synthetic",))
    n = top.integer("num_requests", 1, most=_MOST_REQUESTS)
    seed = top.integer("seed", 0, default=0, most=2**63 - 1)
    name = str(top.get("name")) if top.has("name") else Path(where).stem
    rng = {stream: _stream(seed, at) for at, stream in enumerate(_STREAMS)}

    prompt = Distribution.of(top, "prompt_tokens", column="prompt_tokens")
    output = Distribution.of(top, "output_tokens", column="output_tokens")
    # Lengths out of one file belong together: a row's prompt and its output are drawn as a pair.
    paired = prompt.source is not None and prompt.source == output.source
    user_tokens = prompt.whole_numbers(rng["prompt"], n)
    output_tokens = output.whole_numbers(_stream(seed, _STREAMS.index("prompt")) if paired else rng["output"], n)

    session, turn, think_ns = _sessions(top, n, rng)
    num_sessions = int(session[-1]) + 1
    start_ns, concurrency = _arrivals(top, num_sessions, rng["arrival"])
    prefix_id, prefix_tokens, num_prefixes = _prefixes(top, num_sessions, rng)
    tenants = top.integer("tenants", 1, default=1, most=2**31)
    priorities = top.integer("priorities", 1, default=1, most=2**31)
    top.done(_KEYS)

    first_row = np.flatnonzero(turn == 0)
    later = turn > 0
    pause = np.cumsum(np.where(later, think_ns, 0))
    arrival_ns = start_ns[session] + pause - pause[first_row][session]
    # A turn's prompt: the session's prefix, then user and output tokens of each turn before, then its own user tokens.
    turns_before = np.cumsum(user_tokens + output_tokens) - output_tokens
    whole_before = (turns_before - user_tokens)[first_row][session]
    prompt_tokens = prefix_tokens[session] + turns_before - whole_before
    if prompt_tokens.max() > 2**31 - 1:
        raise TraceError(f"{where}: sessions grow to {prompt_tokens.max()} tokens; use fewer turns or shorter ones")

    rows = np.arange(n)
    repeated = np.zeros(n, dtype=bool)  # a later turn repeats this row's output
    repeated[:-1] = later[1:]
    user_ids, output_ids = num_prefixes + 2 * rows, num_prefixes + 2 * rows + 1
    has_prefix = prefix_id >= 0
    in_session = later | repeated
    counts = np.where(has_prefix[session] | in_session, has_prefix[session] + 2 * turn + 1, 0)
    offsets = offsets_of(counts)
    owner = np.repeat(rows, counts)
    at = np.arange(offsets[-1]) - offsets[:-1][owner] - has_prefix[session][owner]  # -1 for the prefix
    told = first_row[session][owner] + np.maximum(at, 0) // 2  # the row whose tokens the span holds
    is_user = at % 2 == 0
    ids = np.where(at < 0, prefix_id[session][owner], np.where(is_user, user_ids[told], output_ids[told]))
    tokens = np.where(at < 0, prefix_tokens[session][owner], np.where(is_user, user_tokens[told], output_tokens[told]))
    return make_trace(
        arrival_ns,
        prompt_tokens,
        output_tokens,
        spans=(offsets, ids, tokens),
        output_ids=np.where(repeated, output_ids, NO_ID),
        after=np.where(later, rows - 1, NO_ROW),
        think_ns=np.where(later, think_ns, 0),
        # Half of what the tenants before it left goes to each tenant, so that some ask much more than others.
        tenant=np.minimum(rng["tenant"].geometric(0.5, num_sessions) - 1, tenants - 1)[session],
        priority=rng["priority"].integers(0, priorities, n),
        name=name,
        concurrency=concurrency,
    )


def _stream(seed: int, key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(key,))))


def _arrivals(top: Section, n: int, rng: np.random.Generator) -> tuple[np.ndarray, int | None]:
    """(int64[n] arrivals in ns, the first at 0; closed loop's concurrency)."""
    section = top.section("arrival")
    process = section.choice("process", PROCESSES)
    concurrency = None
    if process == "closed-loop":
        concurrency = section.integer("concurrency", 1)
        arrival = np.zeros(n, dtype=np.int64)
    elif process == "trace":
        arrival = _recorded(section, n)
    else:
        rate = section.number("rate_per_s", 0, above=True, most=1e9)
        if process == "constant":
            gaps = np.ones(n)
        elif process == "poisson":
            gaps = rng.standard_exponential(n)
        else:
            shape = section.number("cv", 0, above=True, most=1e3) ** -2
            gaps = rng.standard_gamma(shape, n) / shape
        gaps[0] = 0.0
        arrival = np.rint(np.cumsum(gaps) * (1e9 / rate))
        if arrival[-1] > 2**62:
            raise TraceError(f"{section.label('rate_per_s')} is {rate:g}; {n} requests would take over a century")
        arrival = arrival.astype(np.int64)
    section.done(_ARRIVAL_KEYS)
    return arrival, concurrency


def _recorded(section: Section, n: int) -> np.ndarray:
    from traces.readers import load

    path = section.file("file")
    recorded = load(path).arrival_ns
    if len(recorded) < n:
        raise TraceError(f"{path}: has {len(recorded)} arrivals and num_requests asks for {n}; ask for fewer")
    arrival = recorded[:n]
    if section.has("rate_per_s"):
        rate = section.number("rate_per_s", 0, above=True, most=1e9)
        if arrival[-1] == 0:
            raise TraceError(f"{section.label('rate_per_s')} cannot be had from {path}: its arrivals are all at once")
        arrival = np.rint(arrival * ((n - 1) * 1e9 / rate / float(arrival[-1]))).astype(np.int64)
    return arrival


def _sessions(top: Section, n: int, rng: dict[str, np.random.Generator]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(session, turn within it, pause before it in ns), each int64[n]; the last session ends with the rows."""
    if not top.has("sessions"):
        return np.arange(n), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    section = top.section("sessions")
    turns = Distribution.of(section, "turns").whole_numbers(rng["turns"], n)
    think = Distribution.of(section, "think_s", least=0, whole=False) if section.has("think_s") else None
    section.done(_SESSION_KEYS)
    ends = np.cumsum(turns)
    num_sessions = int(np.searchsorted(ends, n)) + 1
    turns = turns[:num_sessions]
    turns[-1] -= ends[num_sessions - 1] - n
    session = np.repeat(np.arange(num_sessions), turns)
    turn = np.arange(n) - offsets_of(turns)[session]
    think_ns = np.zeros(n, dtype=np.int64)
    if think is not None:
        think_ns = np.rint(think.numbers(rng["think"], n) * 1e9).astype(np.int64)
    return session, turn, think_ns


def _prefixes(top: Section, n: int, rng: dict[str, np.random.Generator]) -> tuple[np.ndarray, np.ndarray, int]:
    """(prefix of each of n sessions, -1 for none; its tokens, 0 for none; how many prefixes there are)."""
    if not top.has("prefix"):
        return np.full(n, -1), np.zeros(n, dtype=np.int64), 0
    section = top.section("prefix")
    num = section.integer("num_prefixes", 1, most=_MOST_REQUESTS)
    share = section.number("share", 0, most=1, default=1.0)
    zipf = section.number("zipf", 0, most=100, default=0.0)
    tokens = Distribution.of(section, "tokens").whole_numbers(rng["prefix-tokens"], num)
    section.done(_PREFIX_KEYS)
    weights = np.arange(1, num + 1, dtype=np.float64) ** -zipf
    bounds = np.cumsum(weights)
    drawn = np.searchsorted(bounds, rng["prefix-which"].random(n) * bounds[-1], side="right")
    which = np.where(rng["prefix-has"].random(n) < share, np.minimum(drawn, num - 1), -1)
    return which, np.where(which >= 0, tokens[which], 0), num
