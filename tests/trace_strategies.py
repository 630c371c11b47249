"""Hypothesis strategies for traces; the rest are in strategies.py, which needs the core."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["generator_specs"]


@st.composite
def generator_specs(draw: st.DrawFn, max_requests: int = 40) -> dict[str, object]:
    """Descriptions of small synthetic traces: every arrival process, shared prefixes and sessions, in all mixtures."""
    lengths = st.one_of(
        st.integers(1, 40),
        st.fixed_dictionaries({"dist": st.just("uniform"), "low": st.integers(1, 5), "high": st.integers(5, 60)}),
        st.fixed_dictionaries(
            {"dist": st.just("lognormal"), "mean": st.floats(1, 50), "sigma": st.floats(0, 1.5), "high": st.just(200)}
        ),
    )
    arrival = st.one_of(
        st.fixed_dictionaries({"process": st.sampled_from(["poisson", "constant"]), "rate_per_s": st.floats(0.1, 1e3)}),
        st.fixed_dictionaries(
            {"process": st.just("gamma"), "rate_per_s": st.floats(0.1, 1e3), "cv": st.floats(0.1, 5)}
        ),
        st.fixed_dictionaries({"process": st.just("closed-loop"), "concurrency": st.integers(1, 6)}),
    )
    spec: dict[str, object] = {
        "kind": "synthetic",
        "num_requests": draw(st.integers(1, max_requests)),
        "seed": draw(st.integers(0, 2**32)),
        "arrival": draw(arrival),
        "prompt_tokens": draw(lengths),
        "output_tokens": draw(lengths),
    }
    if draw(st.booleans()):
        spec["prefix"] = {
            "num_prefixes": draw(st.integers(1, 4)),
            "tokens": draw(lengths),
            "share": draw(st.floats(0, 1)),
            "zipf": draw(st.floats(0, 2)),
        }
    if draw(st.booleans()):
        turns = draw(st.one_of(st.integers(1, 5), st.just({"dist": "uniform", "low": 1, "high": 6})))
        spec["sessions"] = {"turns": turns, "think_s": draw(st.floats(0, 3))}
    return spec
