"""Rows of the ledger about a device's memory, from the figures of `experiments.utilization`."""

from __future__ import annotations

from typing import Any

from experiments.claims import Settled
from sim.hardware import device
from sim.memory import MemoryRequest, plan
from sim.models import preset
from sim.releases import CONTEXT_BYTES, NCCL_BYTES, RELEASES
from sim.transients import eager_attention_bytes

__all__ = ["settle"]

_GIB = 1 << 30
A100 = device("a100-80g")


def settle(figures: dict[str, Any]) -> list[Settled]:
    """Every row of this experiment, in order."""
    return [
        _hour_four(figures["hours"]),
        _reserves(figures["real"]),
        _defaults(),
        _left_over(),
        _matrix(figures["spikes"]),
        _log_line(),
        _safe(figures["grid"]),
        _legal(figures["spikes"]),
        _sequences(figures["grid"]),
        _quantised(figures["grid"]),
        _all_of_it(figures["grid"]["utilization"]),
        _headroom(figures["grid"]["utilization"]),
    ]


def _hour_four(hours: dict[str, Any]) -> Settled:
    """A01."""
    growing, calm = hours["growing"], hours["calm"]
    dies = growing["crashed"] and abs(growing["at_h"] - 4) < 0.25 and not calm["crashed"]
    ours = (
        f"{hours['room_gib']:.1f} GiB a device are left for steps that need {hours['largest_step_gib']:.2f}; four "
        f"hours of "
        f"traffic leave that as it is ({calm['served']:,} requests served, no event); with "
        f"{hours['growth_gib_per_hour']:.2f} "
        f"GiB an hour lost the engine dies after {growing['at_h']:.2f} h"
        if growing["at_h"] is not None
        else "no event in four hours, with or without memory lost"
    )
    return Settled(
        "A01",
        "reproduced-only-if" if dies else "does-not-follow",
        ours,
        condition=(
            f"something outside of the pool takes {hours['growth_gib_per_hour']:.2f} GiB an hour on each device "
            f"(fragments "
            "of the allocator, or another process): the pool is fixed, and neither a score matrix of the longest "
            "context "
            f"({hours['score_matrix_gib']:.1f} GiB) nor its log-probabilities ({hours['logprobs_gib']:.1f}) fill "
            f"the rest"
        ),
        numbers={key: value for key, value in hours.items() if not isinstance(value, dict)}
        | {"dies_after_h": growing["at_h"], "events_when_calm": int(calm["crashed"])},
    )


def _reserves(real: list[dict[str, Any]]) -> Settled:
    """A03."""
    errors = {case["case"]: case["error"] for case in real if case["error"] is not None}
    worst = max(abs(error) for error in errors.values())
    shown = ", ".join(f"{case['blocks']:,} for {case['real_blocks']:,}" for case in real if case["error"] is not None)
    return Settled(
        "A03",
        "reproduced" if worst < 0.05 else "open",
        f"a budget of weights, profiled peak and what is there all the time gives the KV blocks of real engines within "
        f"{worst:.1%}: {shown}",
        numbers={"worst_error": worst} | {case["case"]: case["blocks"] for case in real},
    )


def _defaults() -> Settled:
    """A04."""
    by = {entry.name: entry.utilization for entry in RELEASES}
    first = next(name for name, value in by.items() if value != 0.90)
    before = {value for entry, value in zip(RELEASES, by.values(), strict=True) if entry.since < (0, 4, 0)}
    return Settled(
        "A04",
        "does-not-follow" if before == {0.90} else "reproduced",
        f"0.90 in every release from {RELEASES[0].name} on, and {by[first]:.2f} from {first} on",
        condition="before 0.4.0 it was 0.90 as well; 0.95 was dropped before the first releases (vllm#1018)",
        numbers=by,
    )


def _left_over() -> Settled:
    """A05."""
    made = plan(MemoryRequest(preset("llama-3-8b"), A100, "0.19.1", utilization=0.9, tp=2))
    tenth = A100.memory_bytes - made.usable
    inside = {term.name: term.bytes / _GIB for term in made.terms if term.inside}
    outside = {term.name: term.bytes / _GIB for term in made.terms if not term.inside}
    return Settled(
        "A05",
        "does-not-follow",
        f"of the {tenth / _GIB:.1f} GiB that are left over {sum(outside.values()):.2f} are used: "
        f"{', '.join(f'{name} {value:.2f}' for name, value in outside.items())}; activations "
        f"({inside['activations']:.2f}) are "
        "profiled within the budget",
        condition=(
            f"activations lie inside the budget in every release; NCCL's buffers ({NCCL_BYTES / _GIB:.2f} GiB) lie "
            f"outside "
            "only in V1, which looks at the device after they are there; the rest of the tenth is nobody's"
        ),
        numbers={"left_over_gib": tenth / _GIB, **{f"outside_{k}": v for k, v in outside.items()}}
        | {f"inside_{k}": v for k, v in inside.items()},
    )


def _matrix(spikes: list[dict[str, Any]]) -> Settled:
    """A06."""
    spec = preset("llama-3-70b")
    fused = plan(MemoryRequest(spec, A100, "0.19.1", tp=4)).layers_peak / _GIB
    matrix = eager_attention_bytes(spec, 32000, 32000, 4) / _GIB
    died = {s["engine"] for s in spikes if s["longest"] == 28000 and s["utilization"] == 0.9 and s.get("crashed")}
    unharmed = {
        s["engine"] for s in spikes if s["longest"] == 28000 and s["utilization"] == 0.9 and not s.get("crashed")
    }
    fused_died = any("fused" in name for name in died)
    return Settled(
        "A06",
        "reproduced" if fused_died else "reproduced-only-if",
        f"32,000 tokens of a 70B model on four devices: a score matrix of {matrix:,.0f} GiB against {fused:.2f} for "
        f"a step of a "
        f"fused attention; of seven engines served, {len(died)} died of a prompt of 28,000 tokens, none of them "
        f"with a fused "
        "attention alone",
        condition=(
            "attention builds its matrix (no release of vLLM on a GPU does), or log-probabilities of the whole "
            "prompt are "
            "asked for, and neither was profiled; a fused attention is linear in the tokens of a step"
        ),
        numbers={"matrix_gib": matrix, "fused_step_gib": fused, "died": sorted(died), "unharmed": sorted(unharmed)},
    )


def _log_line() -> Settled:
    """A07."""
    used, total, free = 78.23, 79.35, 1.12
    scores, logits = 32768 * 32768 * 4 / _GIB, 32768 * 32000 * 4 / _GIB
    budget = 0.9 * total
    beyond = used - budget - CONTEXT_BYTES / _GIB
    return Settled(
        "A07",
        "does-not-follow",
        f"4.00 GiB are one head's float32 scores of 32,768 tokens ({scores:.2f}; the logits of as many over 32,000 "
        f"words are "
        f"{logits:.2f}); {used / total:.1%} of the device is in use, where 0.90 allows {budget:.1f} GiB and the "
        f"context "
        f"{CONTEXT_BYTES / _GIB:.2f}",
        condition=(
            f"{beyond:.1f} GiB must be allocated outside of pool and budget before the 4.00 are asked for: a "
            f"utilization of "
            f"about {(used - CONTEXT_BYTES / _GIB) / total:.2f}, other heads' matrices that are still alive, or "
            f"another process"
        ),
        numbers={"share_in_use": used / total, "budget_gib": budget, "beyond_gib": beyond, "scores_gib": scores,
                 "logits_gib": logits, "free_gib": free},
    )  # fmt: skip


def _safe(grid: dict[str, list[dict[str, Any]]]) -> Settled:
    """A09."""
    at = {row["utilization"]: row for row in grid["utilization"] if row["version"] == "0.19.1"}
    given = at[0.9]["kv_tokens"] - at[0.85]["kv_tokens"]
    spec = preset("mistral-7b")
    long, short = (
        plan(MemoryRequest(spec, A100, "0.6.4", max_model_len=n, chunked=False)) for n in (32768, 16384)
    )  # fmt: skip
    saved = (long.layers_peak - short.layers_peak) / _GIB
    seqs = {row["max_num_seqs"]: row["sampler_gib"] for row in grid["max_num_seqs"] if row["version"] == "0.19.1"}
    return Settled(
        "A09",
        "reproduced-only-if",
        f"0.90 to 0.85 gives up {given:,} tokens of KV ({0.05 * A100.memory_bytes / _GIB:.1f} GiB) and leaves a "
        f"step that much "
        f"more room; max-model-len 32,768 to 16,384 shrinks the profiled step by {saved:.2f} GiB, which KV gets; "
        f"max-num-seqs 256 to 128 the sampler's by {seqs[256] - seqs[128]:.2f}",
        condition=(
            "something that was not profiled needs the room that a lower utilization leaves; where steps are "
            "profiled as they "
            "are served, 0.90 has no event either, and the limits bound the peak only where prompts are not cut"
        ),
        numbers={"kv_tokens_given_up": given, "layers_saved_gib": saved, "sampler_saved_gib": seqs[256] - seqs[128]},
    )


def _legal(spikes: list[dict[str, Any]]) -> Settled:
    """A10."""

    def died(share: float) -> set[str]:
        return {s["engine"] for s in spikes if s["longest"] == 28000 and s["utilization"] == share and s.get("crashed")}

    cured = sorted(died(0.9) - died(0.8))
    hopeless = sorted(died(0.9) & died(0.8))
    blocks = {
        s["utilization"]: s["kv_blocks"]
        for s in spikes
        if s["engine"] == "cut prompts, fused" and s["longest"] == 28000
    }
    given = 16 * (blocks[0.9] - blocks[0.8])
    return Settled(
        "A10",
        "reproduced-only-if" if cured else "does-not-follow",
        f"served at 0.90, {'; '.join(sorted(died(0.9))) or 'nobody'} die of the prompt of 28,000 tokens; 0.80 cures "
        f"{'; '.join(cured) or 'nobody'}, and not {'; '.join(hopeless) or 'anybody'}; it gives up {given:,} tokens "
        f"of KV",
        condition=(
            "nobody profiled what the long prompt needs: log-probabilities of its tokens, of which V0 keeps three "
            "float32 copies for all rows at once, or the score matrix of a chunk of it; with a fused attention, a "
            "release that profiles max_model_len tokens (V0) or cuts prompts (V1) serves it at 0.90"
        ),
        numbers={"died_at_0.90": sorted(died(0.9)), "died_at_0.80": sorted(died(0.8)), "kv_tokens_given_up": given},
    )


def _sequences(grid: dict[str, list[dict[str, Any]]]) -> Settled:
    """A11."""
    seqs = {row["max_num_seqs"]: row for row in grid["max_num_seqs"] if row["version"] == "0.19.1"}
    tokens = {row["max_num_batched_tokens"]: row for row in grid["max_num_batched_tokens"]}
    per_seq = (seqs[1024]["sampler_gib"] - seqs[256]["sampler_gib"]) / 768 * 1024
    per_token = (tokens[32768]["layers_gib"] - tokens[2048]["layers_gib"]) / 30720 * 1024 * 1024
    return Settled(
        "A11",
        "reproduced-only-if",
        f"the sampler takes {per_seq:.2f} MiB a sequence (0.19, vocabulary 128,256), the layers {per_token:.0f} KiB "
        f"a token and "
        f"nothing a sequence; at 2,048 tokens and 256 sequences the sampler's {seqs[256]['sampler_gib']:.2f} GiB "
        f"are the peak, at "
        f"8,192 tokens the layers' {tokens[8192]['layers_gib']:.2f}",
        condition=(
            "the sampler is the peak: few tokens a step and a large vocabulary; prefills are bounded by tokens, not by "
            "sequences"
        ),
        numbers={"mib_per_sequence": per_seq, "kib_per_token": per_token},
    )


def _quantised(grid: dict[str, list[dict[str, Any]]]) -> Settled:
    """A48."""
    by = {row["quantization"]: row for row in grid["quantization"]}
    gained = by["awq"]["kv_tokens"] - by[None]["kv_tokens"]
    weights = {name: row["weights_gib"] * _GIB / 1e9 for name, row in by.items()}
    return Settled(
        "A48",
        "reproduced" if gained > 70_000 else "does-not-follow",
        f"Llama-3-8B goes from {weights[None]:.1f} to {weights['awq']:.1f} GB in 4 bits (8.5 in 8), since embedding "
        f"and head stay "
        f"in 16; {gained:,} more tokens of KV on an A100-80G, in blocks of the same size",
        numbers={
            "gb_16_bits": weights[None],
            "gb_fp8": weights["fp8"],
            "gb_4_bits": weights["awq"],
            "kv_tokens_gained": gained,
        },
    )


def _all_of_it(rows: list[dict[str, Any]]) -> Settled:
    """B07."""
    verdicts = {row["version"]: row["verdict"] for row in rows if row["utilization"] == 1.0}
    return Settled(
        "B07",
        "reproduced" if all(verdict != "starts" for verdict in verdicts.values()) else "does-not-follow",
        "at 1.0 " + ", ".join(f"vLLM {version}: {verdict}" for version, verdict in verdicts.items()),
        numbers=verdicts,
    )


def _headroom(rows: list[dict[str, Any]]) -> Settled:
    """B11."""
    fine = {}
    for version in dict.fromkeys(row["version"] for row in rows):
        fine[version] = max(r["utilization"] for r in rows if r["version"] == version and r["verdict"] == "starts")
    at = {row["version"]: row for row in rows if row["utilization"] == 0.9}
    left = {version: row["headroom_gib"] for version, row in at.items()}
    return Settled(
        "B11",
        "reproduced-only-if",
        f"0.90 leaves {', '.join(f'{gib:.1f} GiB in {version}' for version, gib in left.items())} beyond context "
        f"and graphs; "
        f"the highest of the sweep that starts and stays is "
        f"{', '.join(f'{value} in {version}' for version, value in fine.items())}",
        condition=(
            "something unprofiled needs the headroom; article A, which calls 0.90 a trap and asks for blocks of 8, "
            "disagrees: "
            "served with what was profiled, 0.90 has no event, and FlashAttention takes multiples of 16"
        ),
        numbers={
            **{f"headroom_gib_{v}": gib for v, gib in left.items()},
            **{f"highest_{v}": x for v, x in fine.items()},
        },
    )
