"""Configurations that optuna proposes, a batch at a time, so that any number of processes gives the same search."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from experiments.errors import UsageError
from experiments.sweepspec import Sweep

__all__ = ["propose"]


def propose(sweep: Sweep) -> Generator[list[dict[str, Any]], list[list[float] | None], None]:
    """Yields batches of points, and takes the objectives of each; the last batch is empty.

    A point whose objectives are None cannot be; the search avoids its like. Trials of a batch are told apart by the
    sampler's constant liar.

    Raises:
        UsageError: optuna is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise UsageError("search: optuna needs Optuna: pip install 'kvtwin[optuna]'.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=sweep.seed, constant_liar=True)
    study = optuna.create_study(
        directions=["minimize" if less else "maximize" for _, less in sweep.objectives], sampler=sampler
    )
    done = 0
    while done < sweep.num:
        trials = [study.ask() for _ in range(min(sweep.batch, sweep.num - done))]
        values = yield [_point(sweep, trial) for trial in trials]
        for trial, found in zip(trials, values, strict=True):
            if found is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, found)
        done += len(trials)
    yield []


def _point(sweep: Sweep, trial: Any) -> dict[str, Any]:
    point: dict[str, Any] = {}
    for axis in sweep.axes:
        if not axis.is_range:
            place = trial.suggest_categorical(axis.name, list(range(len(axis.values))))
            point[axis.name] = axis.values[place]
        elif axis.option.kind is int:
            point[axis.name] = trial.suggest_int(axis.name, int(axis.low), int(axis.high), log=axis.log)
        else:
            point[axis.name] = trial.suggest_float(axis.name, axis.low, axis.high, log=axis.log)
    return point
