"""What limits a run: the signals of the steps table as shares of its time, and one line that names the limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from experiments.metrics import Tables

__all__ = ["REASONS", "limit_line", "limits"]

REASONS = ("tokens", "sequences", "kv", "policy")
"""What stopped the first of the waiting: see engine.core.signals."""

_SAYS = {
    "tokens": "step tokens: {share} of the time the head of the queue waits for the steps' budget "
    "(--max-num-batched-tokens)",
    "sequences": "sequences: {share} of the time the head of the queue waits for a place among those that run "
    "(--max-num-seqs)",
    "kv": "KV memory: {share} of the time the head of the queue waits for blocks",
    "policy": "policy: {share} of the time the head of the queue waits because a policy holds it back",
}
_SELDOM = 0.05
"""Somebody waits for less than this share of the time: no queue to speak of."""
_IDLE = 0.5
"""The device computes for less than this share of the time."""


def limits(tables: Tables) -> dict[str, Any]:
    """The part of summary.json that says what limited the run. Shares are of `duration_s`, 0 to 1.

    gpu_busy              time that the device computed
    waiting_share         time in which the head of the queue waited, by what stopped it
    waiting_by_reason     requests that waited, averaged over time, by what stopped the first of them
    zero_progress_steps   steps that computed nothing that was not computed before
    preempted_tokens, recomputed_tokens    in all
    """
    from experiments.metrics import duration_ns

    steps = tables.steps
    seconds = duration_ns(tables.requests)
    # What a step found waiting waits until the next step is decided; the last until its end.
    starts = np.asarray(steps["start_ns"], dtype=np.int64)
    ends = np.asarray(steps["end_ns"], dtype=np.int64)
    lasted = np.diff(starts, append=ends[-1:]) if len(ends) else ends
    share: dict[str, float] = {}
    mean: dict[str, float] = {}
    for reason in REASONS:
        waiting = np.asarray(steps[f"waiting_for_{reason}"], dtype=np.int64)
        share[reason] = float(lasted[waiting > 0].sum()) / seconds if seconds else 0.0
        mean[reason] = float((waiting * lasted).sum()) / seconds if seconds else 0.0
    num = np.asarray(steps["num_steps"], dtype=np.int64)
    busy = steps.get("gpu_busy_ns")
    return {
        "gpu_busy": None if busy is None or not seconds else min(1.0, float(np.asarray(busy).sum()) / seconds),
        "waiting_share": share,
        "waiting_by_reason": mean,
        "zero_progress_steps": int((np.asarray(steps["zero_progress"]) * num).sum()),
        "preempted_tokens": int(np.asarray(steps["preempted_tokens"]).sum()),
        "recomputed_tokens": int(np.asarray(steps["recomputed_tokens"]).sum()),
    }


def limit_line(summary: Mapping[str, Any]) -> str:
    """One sentence: what limits the run of this summary."""
    share = summary["waiting_share"]
    busy = summary["gpu_busy"]
    if sum(share.values()) < _SELDOM:
        if busy is not None and busy < _IDLE:
            return f"Limit: none; the device computes {busy:.0%} of the time, and hardly anybody waits."
        text = "the time of the steps; hardly anybody waits to be admitted"
    else:
        reason = max(REASONS, key=lambda name: (share[name], -REASONS.index(name)))
        text = _SAYS[reason].format(share=f"{share[reason]:.0%}")
    if busy is not None:
        text += f"; the device computes {busy:.0%} of the time"
    if summary["recomputed_tokens"]:
        text += f"; {summary['recomputed_tokens']:,} tokens were computed again after preemptions"
    if summary["zero_progress_steps"]:
        text += f"; {summary['zero_progress_steps']:,} steps made no progress"
    return f"Limit: {text}."
