"""The executor made of tensors: runs the scheduler's plans, samples, and knows what every request's tokens are."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.core.errors import InvariantError
from engine.core.types import BlockCopy, Finish, PlanItem, PlanView, StepOutcome, StepPlan, TransferEnd
from engine.exec.beam import BeamGroup, Hypothesis
from engine.exec.detokenizer import Detokenizer
from engine.exec.runner import ModelRunner, Row
from engine.exec.sampler import Logprob, SampleRow, SamplingParams, sample, uniform
from engine.exec.splitting import run_split
from engine.exec.tokenizer import Tokenizer
from engine.models.errors import OptionError, OutOfMemoryError

__all__ = ["Clock", "RequestState", "TorchExecutor"]


class Clock:
    """Nanoseconds of the machine's monotonic clock since this clock was made (or last set back)."""

    def __init__(self) -> None:
        self._origin = time.monotonic_ns()

    def __call__(self) -> int:
        return time.monotonic_ns() - self._origin

    def restart(self) -> None:
        self._origin = time.monotonic_ns()


class RequestState:
    """One sequence's tokens and text. Only the step that runs changes it; between steps anybody may read it."""

    __slots__ = (
        "_final",
        "_tokens",
        "beam",
        "detokenizer",
        "failed",
        "index",
        "key",
        "logprobs",
        "num_prompt",
        "num_tokens",
        "params",
        "result",
        "siblings",
        "stop_reason",
        "stopped",
        "stops",
    )

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        key: int,
        eos: Sequence[int],
        detokenizer: Detokenizer | None,
    ) -> None:
        self.num_prompt = len(prompt)
        self.num_tokens = self.num_prompt
        self._tokens = np.empty(self.num_prompt + params.max_tokens, dtype=np.int64)
        self._tokens[: self.num_prompt] = prompt
        self.params = params
        self.key = key
        ends = () if params.ignore_eos else tuple(eos)
        self.stops = tuple(dict.fromkeys((*ends, *(params.stop_token_ids or ()))))
        self.detokenizer = detokenizer
        self.logprobs: list[dict[int, Logprob]] = []
        self.stopped = False
        self.failed = False
        self._final: int | None = None
        self.index = 0
        """Which of its request's sequences it is."""
        self.siblings: list[RequestState] = [self]
        """All sequences of its request, by index."""
        self.beam: BeamGroup | None = None
        self.result: Hypothesis | None = None
        """What a beam search has found in `index`-th place, once it has ended."""
        self.stop_reason: int | str | None = None
        """The stop string or the entry of stop_token_ids that ended it; None for an end-of-sequence token."""

    @property
    def ended(self) -> bool:
        """Whether the request takes no further tokens."""
        return self.stopped or self._final is not None

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def output_tokens(self) -> list[int]:
        if self.result is not None:
            return list(self.result.tokens)
        count = self.num_outputs if self._final is None else self._final
        tokens: list[int] = self._tokens[self.num_prompt : self.num_prompt + count].tolist()
        return tokens

    @property
    def text(self) -> str:
        return "" if self.detokenizer is None else self.detokenizer.text

    def slice(self, start: int, count: int) -> np.ndarray:
        return self._tokens[start : start + count]

    def next_sample(self) -> SampleRow:
        return SampleRow(self.params, self.key, self.num_outputs, self.stops)

    def append(self, token: int, logprobs: dict[int, Logprob] | None) -> bool:
        """Take a sampled token; returns whether the request has met a stop."""
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        if logprobs is not None:
            self.logprobs.append(logprobs)
        may_stop = self.num_outputs >= self.params.min_tokens
        if may_stop and token in self.stops:
            self.stopped = True
            if token in (self.params.stop_token_ids or ()):
                self.stop_reason = token
            if self.detokenizer is not None and self.params.include_stop_str_in_output:
                self.detokenizer.push(token, check_stops=False)
        elif self.detokenizer is not None:
            met = self.detokenizer.push(token, check_stops=may_stop)
            if met is not None:
                self.stopped, self.stop_reason = True, met
        return self.stopped

    def become(self, outputs: Sequence[int]) -> None:
        """Go on with the output of a sequence of the same prompt."""
        self.num_tokens = self.num_prompt + len(outputs)
        self._tokens[self.num_prompt : self.num_tokens] = outputs

    def fail(self) -> None:
        """No memory was found for its step: it takes no further tokens, and has those that it had."""
        self.stopped = self.failed = True
        # A step that is in flight still reads a token here.
        self._tokens[self.num_tokens : self.num_tokens + 1] = 0

    def finish(self, num_outputs: int) -> None:
        """The output is complete with this many tokens; a step that still runs the request adds nothing.

        Text that was held back comes out, unless a stop string has cut it.
        """
        if self.failed:
            num_outputs = min(num_outputs, self.num_outputs)
        self._final = num_outputs
        del self.logprobs[num_outputs:]
        if self.detokenizer is not None and not isinstance(self.stop_reason, str):
            self.detokenizer.flush()


class _Job:
    """A submitted step, with everything copied that the scheduler may change later."""

    __slots__ = ("plan", "rows", "seq", "states")

    def __init__(self, plan: StepPlan, rows: list[Row], states: list[RequestState]) -> None:
        self.seq = plan.seq
        self.plan = plan
        """For its block moves, which do not change."""
        self.rows = rows
        self.states = states


class TorchExecutor:
    """Runs steps in the order of `submit`, each as its block moves, one forward pass and one round of sampling.

    A CPU has no link beside which it could compute: transfers are done in the step that begins them, after its copies.

    With one step in flight a step runs inside `collect`. With two a thread of the executor's own runs them, so that
    the next step can be scheduled meanwhile; a row then finds the token that the step before it sampled, because
    token ids are read when a step begins to run.
    """

    def __init__(
        self,
        runner: ModelRunner,
        clock: Callable[[], int],
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        steps_in_flight: int = 1,
        seed: int = 0,
        num_threads: int | None = None,
        keeps_blocks: bool = False,
    ) -> None:
        """`keeps_blocks`: full blocks may be read by other requests (prefix caching), so none may be left unwritten."""
        if steps_in_flight not in (1, 2):
            raise OptionError(f"steps_in_flight is {steps_in_flight}; it must be 1 or 2")
        self.runner = runner
        self.clock = clock
        self._tokenizer = tokenizer
        self._eos = tuple(eos_token_ids)
        self._seed = seed
        self._num_threads = num_threads
        self._keeps_blocks = keeps_blocks
        self.num_split_steps = 0
        """Steps that did not fit the device's memory and were run in parts."""
        self._states: dict[int, RequestState] = {}
        self.busy_ns: list[int] = []
        """How long each step that has run computed: forward pass and sampling, without what the host adds."""
        self._pending: list[_Job] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[StepOutcome | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if steps_in_flight == 2:
            self._thread = threading.Thread(target=self._work, name="kvtwin-steps", daemon=True)
            self._thread.start()

    # ---- requests -------------------------------------------------------------------------------------------------

    def add(
        self, request: int, prompt: Sequence[int], params: SamplingParams, max_tokens: int | None = None
    ) -> RequestState:
        """Take in a request under the scheduler's id for it; its state is the executor's until `forget`.

        The states of its other sequences, if it has several, are taken in under the ids that follow; all are
        `siblings` of the one that is returned. `max_tokens`: what the model's length leaves of it.
        """
        if params.best_of is not None and params.logprobs is None:
            params = replace(params, logprobs=0)  # what its outputs are ranked by
        siblings: list[RequestState] = []
        for index in range(params.num_sequences):
            if params.seed is None:
                key = int(uniform(self._seed, request + index) * 2**53)
            else:
                key = params.seed + index
            detokenizer = None
            if params.detokenize and self._tokenizer is not None and not params.use_beam_search:
                detokenizer = Detokenizer(self._tokenizer, params.stop_strings, params.include_stop_str_in_output)
            state = RequestState(prompt, params, key, self._eos, detokenizer)
            state.index = index
            state.siblings = siblings
            siblings.append(state)
            self.adopt(request + index, state)
        first = siblings[0]
        if params.use_beam_search:
            limit = params.max_tokens if max_tokens is None else max_tokens
            beam = BeamGroup(
                params.n, limit, params.min_tokens, first.stops, params.length_penalty, params.early_stopping
            )
            for state in siblings:
                state.beam = beam
        return first

    def adopt(self, request: int, state: RequestState) -> None:
        """Take in a request whose state somebody else has made (the profiler)."""
        self._states[request] = state

    def state(self, request: int) -> RequestState:
        return self._states[request]

    def forget(self, request: int) -> None:
        """Drop a finished or aborted request. A step that still runs it keeps what it needs."""
        self._states.pop(request, None)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan, view: PlanView, now: int) -> None:
        """Take a plan: rows and block tables are copied here, and what `view` shows may change afterwards."""
        items: list[PlanItem] = [*plan.decodes.rows(), *plan.prefills]
        rows = [
            Row(
                item.request,
                item.start,
                item.num_tokens,
                item.samples,
                np.array(view.table(item.request), dtype=np.int64),
            )
            for item in items
        ]
        rows = self.runner.order(rows)
        job = _Job(plan, rows, [self._states[row.request] for row in rows])
        if self._thread is None:
            self._pending.append(job)
        else:
            self._jobs.put(job)

    def collect(self) -> StepOutcome:
        """The outcome of the oldest step that was submitted and not collected; runs it, or waits for it."""
        if self._thread is None:
            return self._run(self._pending.pop(0))
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """End the executor's thread, after the steps that were submitted."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        if self._num_threads is not None:
            # OpenMP counts threads per calling thread.
            torch.set_num_threads(self._num_threads)
        while (job := self._jobs.get()) is not None:
            try:
                self._outcomes.put(self._run(job))
            except BaseException as error:  # noqa: BLE001 (raised again in collect, where the caller is)
                self._outcomes.put(error)

    def _run(self, job: _Job) -> StepOutcome:
        transfers = self._move(job.plan)
        rows, states = job.rows, job.states
        if not rows:
            self.busy_ns.append(0)
            return StepOutcome(self.clock(), {}, transfers=transfers)
        begin = self.clock()
        tokens = np.concatenate([state.slice(row.start, row.num) for row, state in zip(rows, states, strict=True)])
        sampling = [(row, state) for row, state in zip(rows, states, strict=True) if row.samples]
        for row, state in sampling:
            if row.start + row.num != state.num_tokens and not state.ended:
                raise InvariantError(
                    f"step {job.seq} samples token {row.start + row.num} of request {row.request}, "
                    f"which has {state.num_tokens} tokens"
                )
        step = _Sampled()
        try:
            logits = self.runner.run(rows, tokens)
        except torch.OutOfMemoryError:
            sampling, logits = self._run_in_parts(job, tokens, step)
        if sampling:
            _sample_beams(sampling, logits, step)
            _sample_sequences(sampling, logits, step)
        end = self.clock()
        self.busy_ns.append(end - begin)
        return StepOutcome(end, step.tokens, tuple(step.finished), step.parents or None, transfers)

    def _run_in_parts(
        self, job: _Job, tokens: np.ndarray, step: _Sampled
    ) -> tuple[list[tuple[Row, RequestState]], torch.Tensor]:
        """The step again, in parts; the rows that sample, with their logits. Rows that cannot run fail their request.

        Raises:
            OutOfMemoryError: a row that cannot run is to fill a block that other requests may read, or is of a beam.
        """
        self.num_split_steps += 1
        size = self.runner.cache.block_size
        done = run_split(self.runner.run, self.runner.order, job.rows, tokens, size, self.runner.release_unused)
        for place, position in done.failed.items():
            row, state = job.rows[place], job.states[place]
            fills = (row.start + row.num) // size > position // size
            if (self._keeps_blocks and fills) or len(state.siblings) > 1:
                raise OutOfMemoryError(
                    f"request {row.request} finds no memory for a step of one token behind {position}; "
                    "lower gpu_memory_utilization, so that steps have more room beside the KV pool"
                )
            state.fail()
            # A token that no text has: the block that it falls in is never found by another request.
            step.tokens[row.request] = -1 - row.request
            step.finished.append(Finish(row.request, "no-memory"))
        places = [place for place, row in enumerate(job.rows) if row.samples and place in done.logits]
        if not places:
            return [], torch.empty(0)
        return [(job.rows[p], job.states[p]) for p in places], torch.stack([done.logits[p] for p in places])

    def _move(self, plan: StepPlan) -> tuple[TransferEnd, ...]:
        """The step's block moves, phase by phase; returns the transfers that have ended, which are all of them."""
        cache, host = self.runner.cache, self.runner.host
        if (plan.swap_out or plan.swap_in or plan.transfers) and host is None:
            raise InvariantError("a plan moves blocks to or from the host, and this engine has no host pool")
        if host is not None:
            if plan.swap_out:
                host.store(*_both(plan.swap_out))
            if plan.swap_in:
                host.load(*_both(plan.swap_in))
        if plan.copies:
            sources, destinations = _both(plan.copies)
            where = cache.keys.device
            cache.copy_blocks(torch.tensor(sources, device=where), torch.tensor(destinations, device=where))
        if host is not None:
            for transfer in plan.transfers:
                (host.load if transfer.load else host.store)(*_both(transfer.copies))
        return tuple(TransferEnd(transfer.id, True) for transfer in plan.transfers)


class _Sampled:
    """What a step's sampling has given so far."""

    __slots__ = ("finished", "parents", "tokens")

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.parents: dict[int, int] = {}
        self.finished: list[Finish] = []


def _both(copies: Sequence[BlockCopy]) -> tuple[list[int], list[int]]:
    return [int(copy.src) for copy in copies], [int(copy.dst) for copy in copies]


def _sample_sequences(sampling: Sequence[tuple[Row, RequestState]], logits: torch.Tensor, step: _Sampled) -> None:
    """A token for each row that is not of a beam; `n` of them from the first logits of a request with n sequences."""
    places: list[int] = []
    wanted: list[tuple[int, RequestState]] = []
    for place, (row, state) in enumerate(sampling):
        if state.beam is not None:
            continue
        begins = not state.num_outputs and not state.ended and state.index == 0
        for sequence in state.siblings if begins else (state,):
            places.append(place)
            wanted.append((row.request - state.index + sequence.index, sequence))
    if not wanted:
        return
    if places != list(range(len(sampling))):
        logits = logits[places]
    drawn = sample(logits, [state.next_sample() for _, state in wanted])
    for (request, state), token, logprobs in zip(wanted, drawn.tokens, drawn.logprobs, strict=True):
        step.tokens[request] = token
        # A request that has ended meanwhile may still have had a row in this step.
        if not state.ended and state.append(token, logprobs):
            step.finished.append(Finish(request, "stop"))


def _sample_beams(sampling: Sequence[tuple[Row, RequestState]], logits: torch.Tensor, step: _Sampled) -> None:
    """A step of each beam that has rows: all of its sequences, or at first the one that stands for them."""
    beams: dict[int, list[tuple[int, int]]] = {}
    for place, (row, state) in enumerate(sampling):
        if state.beam is not None:
            beams.setdefault(row.request - state.index, []).append((state.index, place))
    for first, members in beams.items():
        members.sort()
        states = sampling[members[0][1]][1].siblings
        beam = states[0].beam
        if beam is None or states[0].ended:
            continue
        begins = not beam.num_outputs
        if len(members) != (1 if begins else beam.width):
            raise InvariantError(f"a step has {len(members)} rows of the beam of request {first}")
        done = beam.step(logits[[place for _, place in members]].cpu())
        for index, state in enumerate(states):
            state.become(beam.output(index))
            step.tokens[first + index] = done.tokens[index]
            if not begins:
                step.parents[first + index] = first + done.parents[index]
            if done.done and not beam.at_limit:
                step.finished.append(Finish(first + index, "stop"))
