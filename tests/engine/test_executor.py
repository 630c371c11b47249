"""The executor on hand-made plans: which tokens it feeds, samples, keeps and reports."""

from __future__ import annotations

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from engine.core.errors import InvariantError  # noqa: E402
from engine.core.types import BlockCopy, BlockId, PlanItem, StepPlan  # noqa: E402
from engine.exec.executor import Clock, TorchExecutor  # noqa: E402
from engine.exec.runner import ModelRunner, Row  # noqa: E402
from engine.exec.sampler import SamplingParams  # noqa: E402
from engine.exec.tiny import TINY  # noqa: E402
from engine.exec.tokenizer import ByteTokenizer  # noqa: E402
from engine.exec.weights import dummy_weights  # noqa: E402
from engine.models.errors import OptionError  # noqa: E402
from engine.models.llama import Decoder  # noqa: E402
from kernels.cache import PagedKVCache  # noqa: E402

PROMPT = list(range(40, 61))
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@functools.cache
def decoder():
    return Decoder(TINY, dummy_weights(TINY), torch.float64)


class Rows:
    def __init__(self, rows):
        self._rows = rows
        self.num = len(rows)
        self.context_tokens = sum(row.start for row in rows)

    def rows(self):
        return self._rows


class View:
    """Block tables that a test may change at will."""

    def __init__(self, **tables):
        self.tables = {int(name[1:]): table for name, table in tables.items()}

    def table(self, request):
        return self.tables[request]


def plan(seq, prefills=(), decodes=()):
    return StepPlan(seq, 0, tuple(prefills), Rows(list(decodes)), (), (), (), False)


def make(steps_in_flight=1):
    cache = PagedKVCache(TINY.num_layers, 12, 4, TINY.num_kv_heads, TINY.head_dim, torch.float64)
    return TorchExecutor(
        ModelRunner(decoder(), cache), Clock(), ByteTokenizer(), TINY.eos_token_ids, steps_in_flight, num_threads=1
    )


@functools.cache
def greedy_tokens(count=10):
    """What the model says to PROMPT, by running all tokens anew for each one."""
    cache = PagedKVCache(TINY.num_layers, 12, 4, TINY.num_kv_heads, TINY.head_dim, torch.float64)
    runner, tokens = ModelRunner(decoder(), cache), list(PROMPT)
    for _ in range(count):
        row = Row(0, 0, len(tokens), True, np.arange(12))
        tokens.append(int(runner.run([row], np.array(tokens)).argmax()))
    return tokens[len(PROMPT) :]


def run(executor, plan, view):
    executor.submit(plan, view, executor.clock())
    return executor.collect()


def test_chunks_then_decodes_give_the_tokens_of_one_whole_pass():
    """A prompt read in chunks over scattered blocks, then decoded, yields the model's own continuation."""
    executor, view = make(), View(r0=[7, 2, 9, 0, 11, 3, 5, 1])
    executor.add(0, PROMPT, GREEDY)
    assert run(executor, plan(1, [PlanItem(0, 0, 0, 10, False)]), view).tokens == {}
    tokens = [run(executor, plan(2, [PlanItem(0, 0, 10, 11, True)]), view).tokens[0]]
    for step in range(5):
        outcome = run(executor, plan(3 + step, (), [PlanItem(0, 0, 21 + step, 1, True)]), view)
        tokens.append(outcome.tokens[0])
    assert tokens == greedy_tokens()[:6]
    assert executor.state(0).output_tokens == tokens


def test_two_steps_in_flight_feed_the_token_that_is_just_being_sampled():
    """A step submitted before the one before it is collected continues from that one's token."""
    executor, view = make(2), View(r0=list(range(8)))
    executor.add(0, PROMPT, GREEDY)
    executor.submit(plan(1, [PlanItem(0, 0, 0, 21, True)]), view, 0)
    tokens = []
    for step in range(5):
        executor.submit(plan(2 + step, (), [PlanItem(0, 0, 21 + step, 1, True)]), view, 0)
        tokens.append(executor.collect().tokens[0])
    tokens.append(executor.collect().tokens[0])
    executor.close()
    assert tokens == greedy_tokens()[:6]


def test_tables_are_read_when_a_plan_is_submitted():
    """What happens to a block table after submit does not reach the step."""
    executor, view = make(2), View(r0=[0, 1, 2, 3, 4, 5])
    executor.add(0, PROMPT, GREEDY)
    executor.submit(plan(1, [PlanItem(0, 0, 0, 21, True)]), view, 0)
    view.tables[0] = [6, 6, 6, 6, 6, 6]
    assert executor.collect().tokens == {0: greedy_tokens()[0]}
    executor.close()
    assert not executor.runner.cache.keys[:, :, 6].any()


def test_a_preempted_request_is_recomputed_over_its_outputs_and_goes_on():
    """After recompute in other blocks the next token is new, and none is sampled twice."""
    executor, view = make(), View(r0=[0, 1, 2, 3, 4, 5, 6])
    executor.add(0, PROMPT, GREEDY)
    run(executor, plan(1, [PlanItem(0, 0, 0, 21, True)]), view)
    run(executor, plan(2, (), [PlanItem(0, 0, 21, 1, True)]), view)
    executor.runner.cache.keys.fill_(torch.nan)
    executor.runner.cache.values.fill_(torch.nan)
    view.tables[0] = [11, 9, 7, 5, 3, 1, 0]
    run(executor, plan(3, [PlanItem(0, 1, 0, 16, False)]), view)
    outcome = run(executor, plan(4, [PlanItem(0, 1, 16, 7, True)]), view)
    assert outcome.tokens == {0: greedy_tokens()[2]}
    assert executor.state(0).output_tokens == greedy_tokens()[:3]


def test_a_stop_is_reported_once_and_the_row_behind_it_adds_nothing():
    """The step that was already under way when its request stopped neither reports again nor adds a token."""
    second = greedy_tokens()[1]
    assert second not in greedy_tokens()[:1]
    executor, view = make(2), View(r0=list(range(8)))
    executor.add(0, PROMPT, SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[second]))
    executor.submit(plan(1, [PlanItem(0, 0, 0, 21, True)]), view, 0)
    executor.submit(plan(2, (), [PlanItem(0, 0, 21, 1, True)]), view, 0)
    assert executor.collect().finished == ()
    executor.submit(plan(3, (), [PlanItem(0, 0, 22, 1, True)]), view, 0)
    (finish,) = executor.collect().finished
    assert (finish.request, finish.reason) == (0, "stop")
    state = executor.state(0)
    executor.forget(0)
    assert executor.collect().finished == ()
    executor.close()
    assert state.output_tokens == greedy_tokens()[:2]
    assert state.stop_reason == second


def test_a_row_may_read_what_another_row_of_the_same_step_writes():
    """A prefix hit on blocks that the same step fills sees their new contents."""
    executor = make()
    view = View(r0=[0, 1, 2, 3, 4, 5], r1=[0, 1, 2, 3, 6, 7])
    executor.add(0, PROMPT, GREEDY)
    executor.add(1, PROMPT, GREEDY)
    both = plan(1, [PlanItem(0, 0, 0, 21, True), PlanItem(1, 0, 16, 5, True)])
    assert run(executor, both, view).tokens == {0: greedy_tokens()[0], 1: greedy_tokens()[0]}


def test_plans_that_contradict_the_tokens_stop_the_run():
    """A row that would sample a token out of turn, or a swap where there is no host pool, is an invariant error."""
    for steps in (1, 2):
        executor, view = make(steps), View(r0=list(range(8)))
        executor.add(0, PROMPT, GREEDY)
        with pytest.raises(InvariantError, match="samples token 20 of request 0, which has 21 tokens"):
            run(executor, plan(1, [PlanItem(0, 0, 0, 20, True)]), view)
        swapping = plan(2, [PlanItem(0, 0, 0, 21, True)])
        swapping.swap_out = (BlockCopy(BlockId(0), BlockId(1)),)
        with pytest.raises(InvariantError, match="no host pool"):
            run(executor, swapping, view)
        executor.close()
    with pytest.raises(OptionError, match="steps_in_flight is 3"):
        make(3)


def test_time_goes_forward():
    """Outcomes carry the executor's clock, in order."""
    executor, view = make(), View(r0=list(range(8)))
    executor.add(0, PROMPT, GREEDY)
    ends = [run(executor, plan(1, [PlanItem(0, 0, 0, 21, True)]), view).end]
    ends += [run(executor, plan(2 + k, (), [PlanItem(0, 0, 21 + k, 1, True)]), view).end for k in range(3)]
    assert 0 < ends[0] < ends[1] < ends[2] < ends[3] <= executor.clock()
