"""A user's policy: how it is loaded, what it may decide, and the words when it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_kit import Case, Job, simulate
from hypothesis import given, settings
from shadow import play
from strategies import cases

from engine.core import (
    NO_LIMIT,
    Admission,
    Order,
    PolicyError,
    RequestSpec,
    RequestView,
    Scheduler,
    SchedulerConfig,
    StepOutcome,
    Victim,
    load_policy,
)
from engine.core.batching import BATCHINGS
from engine.core.orders import FCFS, ORDERS
from engine.core.policies import WholePrompt
from engine.core.victims import VICTIMS

HEAD = "from engine.core import Admission, Batching, DynamicOrder, Order, Policy, Victim\n"
KINDS = "DynamicOrder, Order, Admission, Victim, Batching"


def config(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"num_blocks": 10, "max_model_len": 20, "block_size": 2, "max_num_seqs": 4, **changes})


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(HEAD + text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("class Mine(Order:\n    pass\n", "does not run: SyntaxError"),
        ("import no_such_module_anywhere\n", "does not run: ModuleNotFoundError"),
        ("1 / 0\n", "does not run: ZeroDivisionError: division by zero"),
        ("class Other(Order):\n    pass\n", "has no class Mine"),
        ("Mine = 3\n", f"Mine must be a subclass of one of {KINDS}"),
        ("class Mine:\n    pass\n", f"Mine must be a subclass of one of {KINDS}"),
        ("class Mine(Policy):\n    pass\n", f"Mine must be a subclass of one of {KINDS}"),
        ("class Mine(Order):\n    pass\n", r"Mine must define key\(\)"),
        ("class Mine(Admission):\n    pass\n", r"Mine must define admits\(\)"),
        ("class Mine(Victim):\n    pass\n", r"Mine must define choose\(\)"),
        ("class Mine(DynamicOrder):\n    pass\n", r"Mine must define next\(\)"),
        ("class Mine(Batching):\n    pass\n", r"Mine must define step\(\)"),
        ("class Mine(Order):\n    def key(self):\n        return ()\n", r"Mine.key must take \(request\)"),
        (
            "class Mine(DynamicOrder):\n    def next(self, waiting):\n        return 0\n",
            r"Mine.next must take \(waiting, cached_tokens, now\)",
        ),
        ("class Mine(Batching):\n    def step(self, a, b):\n        pass\n", r"Mine.step must take \(state\)"),
        ("class Mine(Victim):\n    def choose(self):\n        pass\n", r"Mine.choose must take \(candidates\)"),
        (
            "class Mine(Admission):\n    def admits(self, request):\n        pass\n",
            r"admits must take \(request, ",
        ),
        (
            "class Mine(Order):\n    def __init__(self, x):\n        pass\n    def key(self, r):\n        return ()\n",
            r"Mine\(\) fails: TypeError",
        ),
    ],
)
def test_a_policy_that_cannot_be_used_is_one_clear_error(tmp_path: Path, text: str, reason: str) -> None:
    """Whatever is wrong with the file or class is one PolicyError of one line, which names both and the reason."""
    path = write(tmp_path, text)
    with pytest.raises(PolicyError, match=reason) as error:
        load_policy(f"{path}:Mine")
    assert f"{path}:Mine" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("mine.py", "write it as path/file.py:Class"),
        (":Mine", "write it as path/file.py:Class"),
        ("mine.py:", "write it as path/file.py:Class"),
        ("", "write it as path/file.py:Class"),
        ("nowhere/mine.py:Mine", "there is no file nowhere/mine.py"),
    ],
)
def test_a_policy_that_is_not_there_is_one_clear_error(where: str, reason: str) -> None:
    """A name without file or class, or of a file that does not exist, says how to write it."""
    with pytest.raises(PolicyError, match=reason) as error:
        load_policy(where)
    assert repr(where) in str(error.value)


def test_a_file_that_is_not_python_is_one_clear_error(tmp_path: Path) -> None:
    """A file that Python cannot import by its name is told so."""
    path = write(tmp_path, "", "mine.txt")
    with pytest.raises(PolicyError, match="is not a Python file"):
        load_policy(f"{path}:Mine")


SHORTEST = """
class Shortest(Order):
    def key(self, request):
        return (request.num_prompt_tokens,)
"""


def finish_order(options: SchedulerConfig, prompts: Sequence[int]) -> list[int]:
    """Requests in the order in which they end, one at a time."""
    scheduler = Scheduler(options)
    for prompt in prompts:
        scheduler.add(RequestSpec(0, prompt, 2), 0)
    ended: list[int] = []
    for turn in range(100):
        plan = scheduler.schedule(turn)
        if plan.runs:
            ended.extend(finish.request for finish in scheduler.complete(plan, StepOutcome(turn + 1)).finished)
    assert not scheduler.has_unfinished
    return ended


def test_a_policy_from_a_file_decides(tmp_path: Path) -> None:
    """`file.py:Class` loads, needs no change here, and its order is the order of service."""
    policy = load_policy(f"{write(tmp_path, SHORTEST)}:Shortest")
    assert policy.name == "Shortest"
    assert finish_order(config(max_num_seqs=1), [9, 3, 6]) == [0, 1, 2]
    assert finish_order(config(max_num_seqs=1, policies=(policy,)), [9, 3, 6]) == [1, 2, 0]


def test_two_files_of_one_name_are_two_policies(tmp_path: Path) -> None:
    """Loading a file does not shadow another file of the same name."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    first = load_policy(f"{write(one, SHORTEST)}:Shortest")
    second = load_policy(f"{write(two, SHORTEST.replace('(request', '(-request'))}:Shortest")
    assert finish_order(config(max_num_seqs=1, policies=(first,)), [9, 3, 6]) == [1, 2, 0]
    assert finish_order(config(max_num_seqs=1, policies=(second,)), [9, 3, 6]) == [0, 2, 1]


class FirstCandidate(Victim):
    """Takes from the front."""

    def choose(self, candidates: Sequence[RequestView]) -> int:
        return candidates[0].id


class LongestTable(Victim):
    """Takes the most blocks at once."""

    def choose(self, candidates: Sequence[RequestView]) -> int:
        return max(candidates, key=lambda view: (view.num_blocks, view.id)).id


def test_victims_come_from_those_without_a_place() -> None:
    """Rule 5: a victim policy sees, in order, the request that needs a block and those behind it, and no other."""
    seen: list[list[int]] = []

    class Spy(Victim):
        def choose(self, candidates: Sequence[RequestView]) -> int:
            seen.append([view.id for view in candidates])
            return candidates[-1].id

    jobs = tuple(Job(0, (0,) * 3, 9, 9, private=True) for _ in range(3))
    played = play(Case(config(num_blocks=7, policies=(Spy(),)), jobs))
    assert set(played.finished.values()) == {"length"}
    assert played.preemptions == len(seen) > 0
    assert all(ids == sorted(ids) for ids in seen)
    assert [0, 1, 2] in seen or [1, 2] in seen


@pytest.mark.parametrize("policy", [FirstCandidate(), LongestTable()])
def test_another_victim_changes_who_loses(policy: Victim) -> None:
    """A victim policy is asked and obeyed: other requests are preempted than by default."""
    jobs = tuple(Job(0, (0,) * (3 + 2 * (i == 1)), 8, 8, private=True) for i in range(3))
    usual = play(Case(config(num_blocks=11), jobs)).preempted
    chosen = simulate(Case(config(num_blocks=11, policies=(policy,)), jobs), False).recorder.requests()
    by_row = dict(zip(chosen["row"].tolist(), chosen["num_preemptions"].tolist(), strict=True))
    assert set(chosen["outcome"]) == {"length"}
    assert {row: times for row, times in by_row.items() if times} != usual


class Never(Admission):
    """Admits nobody."""

    def admits(self, request: RequestView, need_blocks: int, free_blocks: int, num_running: int, now: int) -> bool:
        return False


@settings(max_examples=40)
@given(cases(aborts=False))
def test_no_admission_policy_can_stall_an_idle_engine(case: Case) -> None:
    """P7: with a policy that admits nobody, requests are served one at a time, and all of them end."""
    options = SchedulerConfig(
        num_blocks=case.config.num_blocks,
        block_size=case.config.block_size,
        max_model_len=case.config.max_model_len,
        max_num_seqs=4,
        steps_in_flight=case.config.steps_in_flight,
        policies=(Never(),),
    )
    played = play(Case(options, tuple(replace(job, n=1, beam=False) for job in case.jobs)))
    assert len(played.finished) == len(case.jobs)
    assert played.preemptions == 0


def test_an_admission_policy_sees_what_it_decides_on() -> None:
    """It is asked about the first waiting request, with the blocks that its prompt takes and those that are free."""
    asked: list[tuple[int, int, int, int, int]] = []

    class Spy(Admission):
        def admits(self, request: RequestView, need_blocks: int, free_blocks: int, num_running: int, now: int) -> bool:
            asked.append((request.id, need_blocks, free_blocks, num_running, now))
            return False

    scheduler = Scheduler(config(policies=(Spy(),)))
    for prompt in (5, 4, 2):
        scheduler.add(RequestSpec(0, prompt, 3), 0)
    assert scheduler.schedule(7).admitted == (0,)
    assert asked == [(1, 2, 7, 1, 7)]


def broken(kind: str) -> Any:
    """A policy of this kind that raises."""

    class BrokenOrder(Order):
        def key(self, request: RequestView) -> tuple[int, ...]:
            raise KeyError("lost")

    class BrokenAdmission(Admission):
        def admits(self, *_: Any) -> bool:
            raise KeyError("lost")

    class BrokenVictim(Victim):
        def choose(self, candidates: Sequence[RequestView]) -> int:
            raise KeyError("lost")

    class BrokenLimit(FCFS):
        def stable_until(self, now: int) -> int:
            raise KeyError("lost")

    return {c.__name__: c for c in (BrokenOrder, BrokenAdmission, BrokenVictim, BrokenLimit)}[kind]()


class KeyOfText(Order):
    """Says "a" of one request and 1 of the next, which have no order."""

    def key(self, request: RequestView) -> tuple[Any, ...]:
        return ("a",) if request.id else (1,)


class LimitOfNone(FCFS):
    def stable_until(self, now: int) -> Any:
        return None


def ask_for_order() -> None:
    scheduler = Scheduler(config(policies=(KeyOfText(),)))
    for _ in range(2):
        scheduler.add(RequestSpec(0, 2, 2), 0)


def ask_for_limit() -> None:
    Scheduler(config(policies=(LimitOfNone(),))).stable_until(0)


@pytest.mark.parametrize(("ask", "name"), [(ask_for_order, "KeyOfText"), (ask_for_limit, "LimitOfNone")])
def test_an_answer_of_the_wrong_type_is_named(ask: Callable[[], None], name: str) -> None:
    """An answer that the scheduler cannot compare is the policy's error, and names it."""
    with pytest.raises(PolicyError, match=f"policy {name}"):
        ask()


PRESSED = tuple(Job(0, (0,) * 3, 9, 9, private=True) for _ in range(3))


@pytest.mark.parametrize("kind", ["BrokenOrder", "BrokenAdmission", "BrokenVictim"])
def test_a_policy_that_raises_is_named(kind: str) -> None:
    """What a policy raises becomes a PolicyError with its name and the reason."""
    with pytest.raises(PolicyError, match=f"policy {kind} failed: KeyError: 'lost'"):
        play(Case(config(num_blocks=7, policies=(broken(kind),)), PRESSED))


def test_a_policy_that_raises_when_asked_how_long_it_holds_is_named() -> None:
    """The same holds for `stable_until`."""
    with pytest.raises(PolicyError, match="policy BrokenLimit failed: KeyError"):
        Scheduler(config(policies=(broken("BrokenLimit"),))).stable_until(0)


@pytest.mark.parametrize("answer", [99, -1, None, "0"])
def test_a_victim_that_is_not_a_candidate_is_refused(answer: Any) -> None:
    """A policy that names somebody else, or nobody, is told so; no blocks are taken from a request with a place."""

    class Wrong(Victim):
        def choose(self, candidates: Sequence[RequestView]) -> int:
            return answer  # type: ignore[no-any-return]

    with pytest.raises(PolicyError, match=r"policy Wrong chose .* which is not one of the candidates"):
        play(Case(config(num_blocks=7, policies=(Wrong(),)), PRESSED))


def test_a_victim_that_has_its_place_is_refused() -> None:
    """Rule 5: the second request has its place in the step already when the third needs a block."""

    class Front(Victim):
        def choose(self, candidates: Sequence[RequestView]) -> int:
            return 1

    scheduler = Scheduler(config(num_blocks=6, policies=(Front(),)))
    scheduler.add(RequestSpec(0, 3, 5), 0)
    scheduler.add(RequestSpec(0, 3, 5), 0)
    scheduler.add(RequestSpec(0, 4, 4), 0)
    scheduler.complete(scheduler.schedule(0), StepOutcome(1))
    with pytest.raises(PolicyError, match="policy Front chose 1"):
        scheduler.schedule(1)  # requests 0 and 1 have a slot left, request 2 needs a third block


def test_policies_never_see_the_true_output_length() -> None:
    """Rule 13: a view has what the sender said and what was done so far, and nothing of the future."""
    assert set(RequestView._fields) == {
        "id",
        "arrival",
        "num_prompt_tokens",
        "max_tokens",
        "priority",
        "deadline",
        "tenant",
        "num_output_tokens",
        "num_computed_tokens",
        "num_blocks",
        "num_preemptions",
        "predicted_tokens",
        "oracle_tokens",
    }
    seen: list[RequestView] = []

    class Curious(Order):
        def key(self, request: RequestView) -> tuple[int, ...]:
            seen.append(request)
            return ()

    class CuriousOracle(Curious):
        oracle = True

    for policy in (Curious(), CuriousOracle()):
        Scheduler(config(policies=(policy,))).add(RequestSpec(0, 2, 9, oracle_tokens=5), 0)
    assert [view.oracle_tokens for view in seen] == [0, 5]


def test_views_follow_what_was_done() -> None:
    """A view's counts are those of completed steps, blocks of the table, tokens that are planned."""
    views: list[RequestView] = []

    class Spy(Victim):
        def choose(self, candidates: Sequence[RequestView]) -> int:
            views.extend(candidates)
            return candidates[-1].id

    scheduler = Scheduler(config(num_blocks=5, policies=(Spy(),)))
    scheduler.add(RequestSpec(3, 4, 5, priority=6, deadline=7, tenant=8), 0)
    scheduler.add(RequestSpec(4, 3, 5, predicted_tokens=6, oracle_tokens=4), 0)
    scheduler.add(RequestSpec(5, 1, 5, tenant=1), 0)
    scheduler.complete(scheduler.schedule(0), StepOutcome(1))
    scheduler.schedule(1)
    assert views == [
        RequestView(1, 4, 3, 5, 0, NO_LIMIT, 0, 1, 3, 2, 0, 6, 0),
        RequestView(2, 5, 1, 5, 0, NO_LIMIT, 1, 1, 1, 1, 0, 0, 0),
    ]


def test_only_built_in_policies_promise_to_stay_the_same() -> None:
    """The default of a user's policy promises nothing, so nothing is fast-forwarded past it."""
    built_in = [WholePrompt, *ORDERS.values(), *VICTIMS.values(), *BATCHINGS.values()]
    assert all(policy().stable_until(5) == NO_LIMIT for policy in built_in)
    assert Never().stable_until(5) == 5
    assert Scheduler(config()).stable_until(5) == NO_LIMIT
    assert Scheduler(config(policies=(Never(),))).stable_until(5) == 5


def test_priority_serves_the_lowest_first() -> None:
    """Under `priority` the lowest value is first, ties by arrival and then by id."""
    scheduler = Scheduler(config(scheduling_policy="priority", max_num_seqs=1))
    for arrival, priority in ((0, 2), (5, 1), (4, 1), (4, 1)):
        scheduler.add(RequestSpec(arrival, 2, 1, priority=priority), 9)
    ended: list[int] = []
    for turn in range(4):
        plan = scheduler.schedule(turn)
        ended.extend(finish.request for finish in scheduler.complete(plan, StepOutcome(turn + 1)).finished)
    assert ended == [2, 3, 1, 0]
