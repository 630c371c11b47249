"""Rows of the ledger that only numbers settle, computed from the project's own shapes, devices, defaults and core."""

from __future__ import annotations

from experiments.experiment import Context, ExperimentResult, Settled
from sim.models import preset

__all__ = ["run"]

_MIB = 1 << 20


def run(context: Context) -> ExperimentResult:
    """All rows of this experiment."""
    claims = [kv_bytes()]
    return ExperimentResult(claims=claims, summary={claim.id: dict(claim.numbers) for claim in claims})


def kv_bytes() -> Settled:
    """A13: keys and values of Llama-3-8B, a token and a block of 16."""
    token = preset("llama-3-8b").kv_bytes_per_token("float16")
    block = 16 * token
    same = token == 128 * 1024 and block == 2 * _MIB
    return Settled(
        "A13",
        "reproduced" if same else "does-not-follow",
        f"{token:,} B a token, {block / _MIB:.2f} MiB a block",
        "" if same else "other shapes",
        {"token_bytes": token, "block_bytes": block},
    )
