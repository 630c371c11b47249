"""The profiler: what it writes, that it goes on where it was, and when it refuses to."""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")
pq = pytest.importorskip("pyarrow.parquet")

from engine.exec.engine import Engine, EngineArgs  # noqa: E402
from engine.exec.profiler import METADATA_KEY, profile  # noqa: E402
from engine.models.errors import ProfileError  # noqa: E402


class Batch(NamedTuple):
    kind: str
    rows: tuple[tuple[int, int], ...]


BATCHES = [
    Batch("decode", ((1, 5), (1, 40), (1, 0))),
    Batch("prefill", ((12, 20),)),
    Batch("mixed", ((1, 30), (8, 0), (5, 9))),
    Batch("anchor", ((1, 16),) * 2),
    Batch("replay", ((1, 10),)),
    Batch("replay", ((1, 11), (7, 0))),
]


@functools.cache
def engine(two: bool = False) -> Engine:
    return Engine(EngineArgs(model="tiny", num_gpu_blocks_override=40, max_model_len=128, async_scheduling=two))


def read(path):
    table = pq.read_table(path)
    return table.to_pylist(), json.loads(table.schema.metadata[METADATA_KEY])


@pytest.mark.parametrize("two", [False, True], ids=["one-in-flight", "two-in-flight"])
def test_every_batch_gets_a_row_with_its_shape_and_time(tmp_path, two):
    """Rows hold the terms of the step-time formula as defined, and quartiles around the median."""
    path = tmp_path / "profile.parquet"
    assert profile(engine(two), BATCHES, path, repeats=4, warm_ups=1, about={"note": "x"}) == 6
    rows, about = read(path)
    assert [(row["kind"], row["repeats"]) for row in rows] == [
        ("decode", 4),
        ("prefill", 4),
        ("mixed", 4),
        ("anchor", 4),
        ("replay", 1),
        ("replay", 1),
    ]
    mixed = rows[2]
    assert (mixed["n_tokens"], mixed["n_rows"], mixed["n_decodes"], mixed["decode_context_tokens"]) == (14, 3, 1, 30)
    assert mixed["prefill_tokens"] == 13
    assert mixed["prefill_context_work"] == 8 * (0 + 9 / 2) + 5 * (9 + 6 / 2)
    assert mixed["max_context"] == 31
    for row in rows:
        assert 0 < row["wall_ns_p25"] <= row["wall_ns_median"] <= row["wall_ns_p75"]
    assert (about["model"], about["device"], about["dtype"], about["block_size"]) == ("tiny", "cpu", "float32", 16)
    assert about["note"] == "x"
    assert about["threads"] == engine(two).num_threads


def test_an_unfinished_profile_is_continued(tmp_path):
    """After an interruption the rows that were written stay as they are, and the missing ones are added."""
    path = tmp_path / "profile.parquet"

    def interrupt(done, total):
        assert total == 6
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(engine(), BATCHES, path, repeats=3, warm_ups=0, on_batch=interrupt)
    before, _ = read(path)
    assert len(before) == 2
    assert profile(engine(), BATCHES, path, repeats=3, warm_ups=0) == 6
    after, _ = read(path)
    assert after[:2] == before
    assert [row["batch"] for row in after] == list(range(6))
    assert list(tmp_path.iterdir()) == [path]


def test_a_budget_ends_the_sweep_early(tmp_path):
    """After stop_after_s no batch is begun, and what is there is written."""
    path = tmp_path / "profile.parquet"
    done = profile(engine(), BATCHES[:4] * 200, path, repeats=3, warm_ups=0, stop_after_s=0.2)
    assert 0 < done < 800
    assert len(read(path)[0]) == done


def test_a_profile_of_other_settings_is_left_alone(tmp_path):
    """What differs is named, and the file stays."""
    path = tmp_path / "profile.parquet"
    profile(engine(), BATCHES[:1], path, repeats=3, warm_ups=0)
    content = path.read_bytes()
    with pytest.raises(ProfileError, match="repeats = 3 and cannot be continued with 4"):
        profile(engine(), BATCHES[:1], path, repeats=4, warm_ups=0)
    with pytest.raises(ProfileError, match="steps_in_flight = 1"):
        profile(engine(True), BATCHES[:1], path, repeats=3, warm_ups=0)
    assert path.read_bytes() == content
    path.write_text("not a profile")
    with pytest.raises(ProfileError, match="is not a profile"):
        profile(engine(), BATCHES[:1], path)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batch"),
        ([Batch("decode", ((1, 128),))], "at most 128 in all"),
        ([Batch("decode", ((0, 4),))], "at least 1 new"),
        ([Batch("decode", ((1, 100),) * 10)], "needs 70 blocks"),
    ],
)
def test_batches_that_cannot_run_are_refused(tmp_path, batches, message):
    """A batch beyond the pool or the longest request is named; nothing is written."""
    with pytest.raises(ProfileError, match=message):
        profile(engine(), batches, tmp_path / "profile.parquet")
    assert list(tmp_path.iterdir()) == []
