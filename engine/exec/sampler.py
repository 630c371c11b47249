"""Sampling: what a request may ask, and how a step's logits become tokens.

The token at output position k depends on (seed, k, logits) alone. So a request that was preempted and recomputed, or
that ran in another batch, draws the same token again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.models.errors import SamplingError

__all__ = ["Logprob", "Sample", "SampleRow", "SamplingParams", "sample", "uniform"]

_FIRST_CANDIDATES = 256
"""Most likely tokens that are sorted at first for top-p; the whole vocabulary is, where these do not reach it."""
_MAX_LOGPROBS = 20
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to sample a request's output. Names and defaults are vLLM's."""

    n: int = 1
    """Outputs from one prompt."""
    best_of: int | None = None
    """Generate so many and return the `n` with the highest mean log-probability a token (as vLLM V0 had it)."""
    use_beam_search: bool = False
    """Beam search of width `n`, without sampling; the rules are transformers', see beam.py."""
    beam_width: int | None = None
    """The same as `use_beam_search` with this `n`."""
    length_penalty: float = 1.0
    """Beam search: a score is the summed log-probability over length ** this."""
    early_stopping: bool | str = False
    """Beam search ends when there are `n` hypotheses (True), when none is likely to get better (False), or when none
    can ("never")."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    """None: derived from the engine's seed and the request's number, so that a run can be repeated."""
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """Also return the log-probabilities of the sampled and of this many most likely tokens (at most 20)."""
    detokenize: bool = True
    forced_tokens: Sequence[int] | None = None
    """Ours: output tokens to emit whatever is sampled, from the first on, for traces whose outputs are known.

    Sampling is done all the same, so a step costs what it costs in service.
    """
    stop_strings: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        _integer("n", self.n)
        if self.n < 1:
            raise SamplingError(f"n is {self.n}; it must be at least 1")
        _number("temperature", self.temperature, 0.0, None)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise SamplingError("top_p is 0; it must be above 0 and at most 1")
        _integer("top_k", self.top_k)
        if self.top_k < -1:
            raise SamplingError(f"top_k is {self.top_k}; it must be positive, or 0 or -1 for all tokens")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed)
        _integer("max_tokens", self.max_tokens)
        if self.max_tokens < 1:
            raise SamplingError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        _integer("min_tokens", self.min_tokens)
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise SamplingError(
                f"min_tokens is {self.min_tokens}; it must lie between 0 and max_tokens ({self.max_tokens})"
            )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs)
            if not 0 <= self.logprobs <= _MAX_LOGPROBS:
                raise SamplingError(f"logprobs is {self.logprobs}; it must lie between 0 and {_MAX_LOGPROBS}")
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(text, str) and text for text in strings):
            raise SamplingError(f"stop is {self.stop!r}; it must be strings that are not empty")
        if strings and not self.detokenize:
            raise SamplingError("stop strings need the text, and detokenize is off")
        object.__setattr__(self, "stop_strings", strings)
        self._check_sequences()
        for name in ("stop_token_ids", "forced_tokens"):
            for token in getattr(self, name) or ():
                _integer(f"an entry of {name}", token)
                if token < 0:
                    raise SamplingError(f"an entry of {name} is {token}; token ids are not negative")

    def _check_sequences(self) -> None:
        if self.beam_width is not None:
            _integer("beam_width", self.beam_width)
            if self.n not in (1, self.beam_width):
                raise SamplingError(f"n is {self.n} and beam_width is {self.beam_width}; give one of them")
            if self.beam_width < 1:
                raise SamplingError(f"beam_width is {self.beam_width}; it must be at least 1")
            object.__setattr__(self, "n", self.beam_width)
            object.__setattr__(self, "use_beam_search", True)
        if self.best_of is not None:
            _integer("best_of", self.best_of)
            if self.best_of < self.n:
                raise SamplingError(f"best_of is {self.best_of}; it must be at least n ({self.n})")
            if self.use_beam_search:
                raise SamplingError("best_of and beam search exclude each other")
        if not self.use_beam_search:
            return
        _number("length_penalty", self.length_penalty, -1e6, None)
        if self.early_stopping not in (True, False, "never"):
            raise SamplingError(f"early_stopping is {self.early_stopping!r}; it must be True, False or 'never'")
        for name in ("stop", "forced_tokens", "logprobs"):
            if getattr(self, name) is not None:
                raise SamplingError(f"beam search does not take {name}")

    @property
    def num_sequences(self) -> int:
        """How many are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


def _integer(name: str, value: object) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise SamplingError(f"{name} is {value!r}; it must be an integer")


def _number(name: str, value: object, low: float, high: float | None) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise SamplingError(f"{name} is {value!r}; it must be a finite number")
    if value < low or (high is not None and value > high):
        limits = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise SamplingError(f"{name} is {value}; it must be {limits}")


class Logprob(NamedTuple):
    """Natural log of the model's own probability (before temperature and cuts), and the token's rank from 1."""

    logprob: float
    rank: int


class SampleRow(NamedTuple):
    """What a row of logits needs to be sampled."""

    params: SamplingParams
    key: int
    """The request's seed."""
    position: int
    """Number of the output token that is drawn, from 0."""
    stops: tuple[int, ...]
    """Token ids that end the request; barred before `min_tokens` are out."""


class Sample(NamedTuple):
    tokens: list[int]
    logprobs: list[dict[int, Logprob] | None]


def uniform(key: int, position: int) -> float:
    """A number in [0, 1) that depends on its two arguments alone (two rounds of the splitmix64 finaliser)."""
    state = (key * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _MASK
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sample:
    """Draw one token for each row of `logits` [rows, vocab] (float32 or float64; changed in place)."""
    logprobs = _logprobs(logits, rows)
    for index, row in enumerate(rows):
        if row.stops and row.position < row.params.min_tokens:
            logits[index, [stop for stop in row.stops if stop < logits.shape[1]]] = -torch.inf
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        some = logits if len(drawn) == len(rows) else logits[drawn]
        for index, token in zip(drawn, _draw(some, [rows[i] for i in drawn]), strict=True):
            tokens[index] = token
    for index, row in enumerate(rows):
        forced = row.params.forced_tokens
        if forced is not None and row.position < len(forced):
            tokens[index] = int(forced[row.position])
    if any(entry is not None for entry in logprobs):
        _add_sampled(logits, logprobs, tokens)
    return Sample(tokens, [None if entry is None else entry.table for entry in logprobs])


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Sample rows [n, vocab] by inverting the distribution function in the order of the vocabulary."""
    where = logits.device
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=logits.dtype, device=where).unsqueeze(1)
    # The maximum is taken off first: a tiny temperature must not overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature)
    probabilities = torch.softmax(scaled, -1)
    cut = [i for i, row in enumerate(rows) if row.params.top_p < 1 or row.params.top_k > 0 or row.params.min_p > 0]
    if cut:
        threshold = _thresholds(probabilities[cut], [rows[i].params for i in cut])
        limits = torch.zeros(len(rows), 1, dtype=probabilities.dtype, device=where)
        limits[cut] = threshold.unsqueeze(1)
        probabilities = probabilities.masked_fill_(probabilities < limits, 0.0)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    places = [uniform(row.key, row.position) for row in rows]
    drawn = torch.tensor(places, dtype=torch.float64, device=where) * total
    drawn = torch.minimum(drawn, torch.nextafter(total, torch.zeros_like(total)))
    tokens: list[int] = torch.searchsorted(cumulative, drawn.unsqueeze(1), right=True).squeeze(1).tolist()
    return tokens


def _thresholds(probabilities: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The least probability [n] that each row keeps: top-k first, then top-p of what that left, and min-p.

    Tokens as likely as the last one kept are kept too, so the set does not depend on how ties are sorted.
    """
    vocab = probabilities.shape[1]
    ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    needed = max(
        k if p.top_p == 1 and k < vocab else min(k, _FIRST_CANDIDATES) for k, p in zip(ks, params, strict=True)
    )
    ranked = probabilities.topk(min(needed, vocab), -1).values
    result = torch.zeros(len(params), dtype=probabilities.dtype, device=probabilities.device)
    for i, (k, p) in enumerate(zip(ks, params, strict=True)):
        row = ranked[i]
        if k < vocab or p.top_p < 1:
            if p.top_p < 1:
                mass = 1.0 if k == vocab else _mass_of_top(probabilities[i], k)
                if k > row.shape[0] and float(row.sum(dtype=torch.float64)) < p.top_p * mass:
                    row = probabilities[i].sort(descending=True).values
                reached = row[:k].cumsum(0, dtype=torch.float64)
                last = min(int((reached < p.top_p * mass).sum()), min(k, row.shape[0]) - 1)
            else:
                last = k - 1
            result[i] = row[last]
        if p.min_p > 0:
            result[i] = torch.maximum(result[i], ranked[i, 0] * p.min_p)
    return result


def _mass_of_top(probabilities: Tensor, k: int) -> float:
    return float(probabilities.topk(k).values.sum(dtype=torch.float64))


class _Entry:
    """The log-probabilities of one row while they are being collected."""

    __slots__ = ("normaliser", "raw", "table")

    def __init__(self, raw: Tensor, top: int) -> None:
        self.raw = raw.clone()
        self.normaliser = float(torch.logsumexp(self.raw, -1))
        self.table: dict[int, Logprob] = {}
        if top:
            values, ids = self.raw.topk(top)
            for rank, (value, token) in enumerate(zip(values.tolist(), ids.tolist(), strict=True), 1):
                self.table[token] = Logprob(value - self.normaliser, rank)


def _logprobs(logits: Tensor, rows: Sequence[SampleRow]) -> list[_Entry | None]:
    return [
        None if row.params.logprobs is None else _Entry(logits[index], row.params.logprobs)
        for index, row in enumerate(rows)
    ]


def _add_sampled(logits: Tensor, entries: Sequence[_Entry | None], tokens: Sequence[int]) -> None:
    for entry, token in zip(entries, tokens, strict=True):
        if entry is not None and token not in entry.table and token < logits.shape[1]:
            value = entry.raw[token]
            rank = int((entry.raw > value).sum()) + 1
            entry.table[token] = Logprob(float(value) - entry.normaliser, rank)
