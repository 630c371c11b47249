"""Bytes of weights from a config.json alone: exact counts, shards and formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import ModelError
from sim.models import PRESETS, load_model, preset
from sim.weights import FORMATS, weight_bytes, weight_format

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize(
    ("name", "parameters", "gib"),
    [
        ("llama-2-7b", 6_738_415_616, 12.5514),
        ("llama-2-70b", 68_976_648_192, 128.4791),
        ("llama-3-8b", 8_030_261_248, 14.9575),
        ("llama-3.1-8b", 8_030_261_248, 14.9575),
        ("mistral-7b", 7_241_732_096, 13.4888),
        ("mixtral-8x7b", 46_702_792_704, 86.9907),
        ("qwen2.5-14b", 14_770_033_664, 27.5113),
    ],
)
def test_gib_follow_from_exact_counts(name: str, parameters: int, gib: float) -> None:
    """A model's config.json gives the published number of parameters, and two bytes of each."""
    spec = load_model(CONFIGS / f"{name}.json")
    assert spec.num_parameters() == parameters
    total = weight_bytes(spec, FORMATS["bf16"]).total
    assert total == 2 * parameters
    assert total / 2**30 == pytest.approx(gib, abs=5e-4)


@given(st.sampled_from(sorted(PRESETS)), st.sampled_from([1, 2, 4, 8]), st.sampled_from(sorted(FORMATS)))
def test_parts_sum_to_the_shard(name: str, tp: int, form: str) -> None:
    """Unquantised, the parts sum to the shard's exact bytes; quantised, only the matrices shrink."""
    spec = PRESETS[name]
    try:
        spec.check_tp(tp)
    except ModelError:
        return
    plain, small = weight_bytes(spec, FORMATS["bf16"], 2, tp), weight_bytes(spec, FORMATS[form], 2, tp)
    assert plain.total == spec.weights_bytes(2, tp)
    assert (small.tables, small.rest) == (plain.tables, plain.rest)
    assert small.matrices * (16 // (FORMATS[form].bits or 16)) == plain.matrices
    assert (small.scales > 0) == (form != "bf16")
    assert min(plain.rest, plain.tables) > 0


def test_formats_leave_tables_in_16_bits() -> None:
    """Llama-3-8B: 5.3 GiB in 4 bits (5.7 GB, as AWQ checkpoints have), of which 2.0 are embedding and head."""
    spec = preset("llama-3-8b")
    small = weight_bytes(spec, weight_format("awq"))
    assert small.total / 1e9 == pytest.approx(5.73, abs=0.02)
    assert small.tables == 2 * 2 * spec.vocab * spec.hidden
    eight = weight_bytes(spec, weight_format("fp8"))
    assert eight.matrices == spec.num_parameters() - small.tables // 2 - spec.hidden * (2 * spec.layers + 1)
    assert weight_format(None).name == weight_format("auto").name == "bf16"
    with pytest.raises(ModelError, match="known ones are"):
        weight_format("float3")
