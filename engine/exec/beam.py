"""Beam search over one request: which sequences go on, and which are done.

The rules are those of transformers' `generate(num_beams=B, do_sample=False)` (release 5.24), so that both give the same
hypotheses. A step looks at the max(2, 1 + number of stop tokens) x B best continuations of the B sequences by summed
log-probability. Among the best B of them, those that end are hypotheses, with score = sum / length ** length_penalty,
of which the best B are kept; the best B that do not end go on. At the length limit everything ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BeamGroup", "BeamStep", "Hypothesis"]


class Hypothesis(NamedTuple):
    """An output that has ended."""

    score: float
    """Summed log-probability over length ** length_penalty; the token that ended it counts in both."""
    tokens: list[int]
    stopped: bool
    """By a stop token, which is the last of `tokens`; otherwise by the length."""


class BeamStep(NamedTuple):
    """What came of a step, for each sequence of the beam in its order."""

    parents: list[int]
    """Which sequence each continues."""
    tokens: list[int]
    done: bool
    """No sequence needs to go on."""


class BeamGroup:
    """The beam of one request. Its sequences are numbered 0 .. width - 1; at first there is one, the prompt."""

    def __init__(
        self,
        width: int,
        max_tokens: int,
        min_tokens: int,
        stops: Sequence[int],
        length_penalty: float,
        early_stopping: bool | str,
    ) -> None:
        self.width = width
        self.history: list[list[int]] = []
        """The parents of every step."""
        self.done = False
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stops = tuple(stops)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._sums: list[float] = [0.0]
        self._outputs: list[list[int]] = [[]]
        self._hypotheses: list[Hypothesis] = []

    @property
    def num_outputs(self) -> int:
        return len(self._outputs[0])

    @property
    def at_limit(self) -> bool:
        """Whether the sequences have as many tokens as they may."""
        return self.num_outputs >= self._max_tokens

    def output(self, index: int) -> list[int]:
        """Tokens that sequence `index` has generated."""
        return self._outputs[index]

    def sums(self) -> list[float]:
        """Summed log-probability of each sequence."""
        return list(self._sums)

    @torch.inference_mode()
    def step(self, logits: Tensor) -> BeamStep:
        """Take the step whose logits [sequences, vocab] these are, in the order of the sequences."""
        length = self.num_outputs + 1
        logprobs = torch.log_softmax(logits, -1)
        vocab = logprobs.shape[1]
        stops = [stop for stop in self._stops if stop < vocab]
        if stops and length <= self._min_tokens:
            logprobs[:, stops] = -torch.inf
        total = logprobs + torch.tensor(self._sums, dtype=logprobs.dtype).unsqueeze(1)
        wanted = max(2, 1 + len(stops)) * self.width
        best = total.view(-1).topk(min(wanted, total.numel()))
        last = length >= self._max_tokens
        going: list[tuple[float, int, int]] = []
        for rank, (value, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            parent, token = divmod(place, vocab)
            stopped = token in stops
            if (stopped or last) and rank < self.width:
                tokens = [*self._outputs[parent], token]
                self._hypotheses.append(Hypothesis(value / length**self._length_penalty, tokens, stopped))
            if not stopped and len(going) < self.width:
                going.append((value, parent, token))
        while len(going) < self.width:
            # A vocabulary smaller than the beam: a row that can never win keeps the number of sequences.
            going.append((-1e9, going[-1][1], going[-1][2]) if going else (-1e9, 0, 0))
        self._hypotheses.sort(key=lambda found: -found.score)
        del self._hypotheses[self.width :]
        self._outputs = [[*self._outputs[parent], token] for _, parent, token in going]
        self._sums = [value for value, _, _ in going]
        parents = [parent for _, parent, _ in going]
        self.history.append(parents)
        self.done = last or self._is_over(length)
        return BeamStep(parents, [token for _, _, token in going], self.done)

    def _is_over(self, length: int) -> bool:
        """Whether the running sequences can be given up: as `early_stopping` says, once B hypotheses are there."""
        if len(self._hypotheses) < self.width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        return not self._sums[0] / length**self._length_penalty > self._hypotheses[-1].score

    def results(self) -> list[Hypothesis]:
        """The best hypotheses, best first; of a beam that was cut short, its running sequences fill up the rest."""
        found = list(self._hypotheses)
        if not self.done and self.num_outputs:
            length = self.num_outputs
            rest = [
                Hypothesis(value / length**self._length_penalty, tokens, False)
                for value, tokens in zip(self._sums, self._outputs, strict=True)
            ]
            found = sorted(found + rest, key=lambda one: -one.score)
        return found[: self.width]
