"""Mooncake's schema with other block sizes, and Qwen-Bailian."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_formats_csv import complaint, write

import traces

BAILIAN = [
    {"chat_id": 9, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 13, "turn": 1},
    {"chat_id": 11, "parent_chat_id": -1, "timestamp": 61.2, "input_length": 20, "output_length": 0, "turn": 1},
    {"chat_id": 10, "parent_chat_id": 9, "timestamp": 62.5, "input_length": 60, "output_length": 8, "turn": 2},
    {"chat_id": 12, "parent_chat_id": 7, "timestamp": 62.5, "input_length": 16, "output_length": 8, "turn": 4},
]
IDS = [[1, 2, 3], [1, 8], [1, 2, 4, 5], [6]]


def as_lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def bailian(ids: list[list[int]] = IDS) -> str:
    return as_lines([{**row, "type": "text", "hash_ids": given} for row, given in zip(BAILIAN, ids, strict=True)])


def test_mooncake_block_size_is_told_from_the_lengths(tmp_path: Path) -> None:
    """Ids of 16 tokens need no option; a file that fits 512 is read with 512; a size given is the size used."""
    rows: list[dict[str, object]] = [
        {"timestamp": 1.5, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 9, "input_length": 32, "output_length": 4, "hash_ids": [1, 2]},
    ]
    trace = traces.load(write(tmp_path, "m.jsonl", as_lines(rows)))
    assert trace.span_block == 16
    assert trace.spans(0) == [(1, 16), (2, 16), (3, 8)]
    assert trace.arrival_ns.tolist() == [0, 7_500_000]
    assert traces.load(tmp_path / "m.jsonl", id_tokens=16) == trace
    short: list[dict[str, object]] = [{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [4]}]
    assert traces.load(write(tmp_path, "s.jsonl", as_lines(short))).span_block == 512
    rows.append({"timestamp": 9, "input_length": 200, "output_length": 4, "hash_ids": [7, 8]})
    assert "has 2 hash_ids for input_length 200; at 16 tokens an id it needs 13" in complaint(
        write(tmp_path, "w.jsonl", as_lines(rows))
    )


def test_bailian_is_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    """Times are seconds, ids 16 tokens, a row that generated nothing is left out, and turns arrive when they did."""
    trace = traces.load(write(tmp_path, "b.jsonl", bailian()))
    assert trace.arrival_ns.tolist() == [0, 1_386_000_000, 1_386_000_000]
    assert trace.spans(0) == [(1, 16), (2, 16), (3, 8)]
    assert trace.spans(1) == [(1, 16), (2, 16), (4, 16), (5, 12)]
    assert trace.dropped == 1
    assert (trace.after == traces.NO_ROW).all()


def test_bailian_turns_can_wait_for_their_parents(tmp_path: Path) -> None:
    """With turns_wait a row follows the chat it names; one whose parent is not in the file waits for nobody."""
    trace = traces.load(write(tmp_path, "b.jsonl", bailian()), turns_wait=True)
    assert trace.after.tolist() == [-1, 0, -1]
    assert trace.think_ns.tolist() == [0, 1_386_000_000, 0]


def test_bailian_contents_are_chained_to_prefixes(tmp_path: Path) -> None:
    """Ids that name contents alone share only where all before them is equal too; missing ones are the row's own."""
    trace = traces.load(write(tmp_path, "b.jsonl", bailian([[1, 2, 3], [1, 8], [2, 1, 3, 4], [1]])))
    first, second, third = (trace.spans(row) for row in range(3))
    assert not {name for name, _ in first} & {name for name, _ in second}
    assert third[0] == first[0]
    fewer = traces.load(write(tmp_path, "f.jsonl", bailian([[1, 2], [1, 8], [1, 2], [1]])))
    assert fewer.spans(0)[:2] == fewer.spans(1)[:2]
    assert fewer.spans(0)[2][0] != fewer.spans(1)[2][0]
    assert [tokens for _, tokens in fewer.spans(1)] == [16, 16, 16, 12]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hash_ids": [1, 2, 3, 4]}, "has 4 hash_ids for input_length 40"),
        ({"hash_ids": None}, "hash_ids must be a list"),
        ({"timestamp": "61"}, 'timestamp is "61"'),
        ({"parent_chat_id": None}, "parent_chat_id is null"),
        ({"output_length": -1}, "output_length is -1"),
    ],
)
def test_a_wrong_bailian_row_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    """The error names the file and the line."""
    path = write(tmp_path, "b.jsonl", bailian() + as_lines([{**BAILIAN[0], "hash_ids": [1, 2, 3], **change}]))
    assert f"{path}, line 5: " in complaint(path)
    assert says in complaint(path)


def test_the_shared_bailian_rows_read(shared_data: Path) -> None:
    """Rows of the published schema give two turns that share their first 32 tokens."""
    trace = traces.load(shared_data / "traces" / "fixtures" / "bailian_SYNTHETIC.jsonl")
    assert trace.spans(0)[:2] == trace.spans(1)[:2] == [(1, 16), (2, 16)]
    assert trace.shared_prompt_tokens().tolist() == [32, 32]
