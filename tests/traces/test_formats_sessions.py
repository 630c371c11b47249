"""LLMServingSim, RAGPulse, agent calls and ShareGPT: formats whose prompts are built from parts."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_formats_csv import complaint, write
from test_formats_hashed import as_lines

import traces
from traces.readers.llmservingsim import PrefixTree

SERVING = [
    {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 500, "input_tok_ids": [7, 8, 9], "output_tok_ids": [1, 2]},
    {"input_toks": 6, "output_toks": 4, "arrival_time_ns": 900, "input_tok_ids": [7, 8, 9, 1, 2, 5]},
    {"input_toks": 3, "output_toks": 1, "arrival_time_ns": 700, "input_tok_ids": [7, 8, 4], "output_tok_ids": [3]},
    {"input_toks": 5, "output_toks": 1, "arrival_time_ns": 950},
]
AGENT = [
    {"set": "a", "session": "x", "turn": 0, "dt_us": 0, "in_chars": 130, "out_chars": 9, "hashes": [1, 2]},
    {"set": "a", "session": "x", "turn": 1, "dt_us": 2_000_000, "in_chars": 192, "out_chars": 0, "hashes": [1, 2, 3]},
    {"set": "b", "session": "x", "turn": 0, "dt_us": 0, "in_chars": 100, "out_chars": 40, "hashes": [1]},
    {"set": "a", "session": "x", "turn": 3, "dt_us": 2_500_000, "in_chars": 0, "out_chars": 8, "hashes": []},
]
TABLES = {
    "1_sys_prompt": ("sys_prompt_id", {1: 100, 2: 50}),
    "2_passages": ("passage_id", {10: 30, 11: 40}),
    "3_history": ("history_id", {20: 5}),
    "4_user_input": ("user_input_id", {30: 7, 31: 8}),
    "5_web_search": ("web_search_id", {40: 500}),
}


def rag(when: str, length: int, passages: list[int], user: int, session: str = "s") -> dict[str, object]:
    parts = {"sys_prompt": [1, 2], "passages_ids": passages, "history": [20], "web_search": [], "user_input": [user]}
    return {
        "timestamp": when,
        "input_length": length,
        "output_length": 9,
        "hash_ids": parts,
        "session_id": session,
    }


RAGPULSE = [
    rag("82", 202, [10], 30),
    rag("93", 241, [10, 11], 31, "t"),
    rag("0", 241, [11, 10], 31),
    rag("125", 202, [10], 30),
]


def rag_folder(folder: Path, rows: list[dict[str, object]], leave_out: str = "") -> Path:
    """A trace with its tables beside it; the passages are packed, as the published ones may be."""
    for name, (key, lengths) in TABLES.items():
        text = as_lines([{key: i, "token_length": n} for i, n in lengths.items()])
        if name == "2_passages":
            (folder / f"{name}.jsonl.xz").write_bytes(lzma.compress(text.encode()))
        elif name != leave_out:
            write(folder, f"{name}.jsonl", text)
    return write(folder, "0_trace.jsonl", as_lines(rows) + "\n")


def test_llmservingsim_shares_exactly_the_equal_tokens(tmp_path: Path) -> None:
    """Prompts share their equal beginnings to the token, a repeated output is that output, and ids are not needed."""
    trace = traces.load(write(tmp_path, "l.jsonl", as_lines(SERVING)))
    assert trace.arrival_ns.tolist() == [0, 200, 400, 450]
    first, other, longer = (trace.spans(row) for row in range(3))
    assert [tokens for _, tokens in first] == [2, 1]
    assert other[0] == first[0]
    assert longer[:2] == first
    assert [tokens for _, tokens in longer] == [2, 1, 2, 1]
    assert trace.output_ids.tolist() == [longer[2][0], -1, -1, -1]
    assert trace.span_offsets[3] == trace.span_offsets[4]  # no ids, no spans


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12))
def test_a_prefix_tree_knows_what_any_two_lists_share(lists: list[list[int]]) -> None:
    """For any two lists, the nodes on both paths add up to the tokens that the two begin with alike."""
    tree = PrefixTree()
    for tokens in lists:
        tree.add(np.array(tokens, dtype=">u4").tobytes())
    tree.build()
    paths = [list(zip(*tree.path(entry), strict=True)) for entry in range(len(lists))]
    for a, first in zip(lists, paths, strict=True):
        assert sum(n for _, n in first) == len(a)
        for b, second in zip(lists, paths, strict=True):
            shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            assert sum(n for _, n in set(first) & set(second)) == shared


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_toks": 4}, "has 3 input_tok_ids for a length of 4"),
        ({"output_toks": 3}, "has 2 output_tok_ids for a length of 3"),
        ({"input_tok_ids": [7, 8, "x"]}, "input_tok_ids must be a list of whole numbers"),
        ({"arrival_time_ns": None}, "arrival_time_ns is null"),
        ({"output_toks": 0, "output_tok_ids": []}, "output_toks is 0"),
    ],
)
def test_a_wrong_llmservingsim_row_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    """The error names the file and the line."""
    path = write(tmp_path, "l.jsonl", as_lines([*SERVING, {**SERVING[0], **change}]))
    assert f"{path}, line 5: " in complaint(path)
    assert says in complaint(path)


def test_ragpulse_prompts_are_their_components(tmp_path: Path) -> None:
    """Rows are sorted by time, a blank last line is none, and prompts share the components they begin with."""
    trace = traces.load(rag_folder(tmp_path, RAGPULSE))
    assert trace.arrival_ns.tolist() == [0, 82 * 10**9, 93 * 10**9, 125 * 10**9]
    assert trace.prompt_tokens.tolist() == [233, 192, 233, 192]
    assert [tokens for _, tokens in trace.spans(1)] == [100, 50, 30, 5, 7]
    assert trace.spans(3) == trace.spans(1)
    assert trace.spans(2)[:3] == trace.spans(1)[:3]
    # The same passages in another order share nothing but what stands before them.
    assert {name for name, _ in trace.spans(0)} & {name for name, _ in trace.spans(2)} == {
        name for name, _ in trace.spans(0)[:2]
    }


def test_ragpulse_separators_and_sessions_are_choices(tmp_path: Path) -> None:
    """With separators prompts are input_length long, the rest at their end; with turns_wait a session is one by one."""
    path = rag_folder(tmp_path, RAGPULSE)
    trace = traces.load(path, separators=True, turns_wait=True)
    assert trace.prompt_tokens.tolist() == [241, 202, 241, 202]
    assert trace.spans(1)[-1][1] == 17
    assert trace.after.tolist() == [-1, 0, -1, 1]
    assert trace.think_ns.tolist() == [0, 82 * 10**9, 0, 43 * 10**9]


def test_ragpulse_without_tables_is_lengths_alone(tmp_path: Path) -> None:
    """No table gives lengths; some but not all of them is a mistake, and so is a table of another trace."""
    bare = tmp_path / "bare"
    bare.mkdir()
    trace = traces.load(write(bare, "0_trace.jsonl", as_lines(RAGPULSE)))
    assert trace.prompt_tokens.tolist() == [241, 202, 241, 202]
    assert len(trace.span_ids) == 0
    assert "has no table 3_history.jsonl beside it" in complaint(rag_folder(tmp_path, RAGPULSE, leave_out="3_history"))
    for rows, says in (
        ([rag("1", 180, [10], 30)], "line 1: has input_length 180, and its components have 192"),
        ([rag("1", 202, [12], 30)], "line 1: names passages_ids 12, which is not in the table 2_passages"),
        ([rag("noon", 202, [10], 30)], "line 1: timestamp is 'noon'"),
        ([{**RAGPULSE[0], "hash_ids": {"sys_prompt": [1], "tools": [2]}}], "line 1: hash_ids must be an object with"),
    ):
        assert says in complaint(rag_folder(tmp_path, rows))
    assert "table of RAGPulse's components" in complaint(tmp_path / "2_passages.jsonl.xz")


def test_agent_calls_wait_for_each_other(tmp_path: Path) -> None:
    """A hash is 16 tokens, the rest of a prompt its own; each set has sessions of its own, and calls follow in turn."""
    trace = traces.load(write(tmp_path, "a.jsonl", as_lines(AGENT)))
    assert trace.arrival_ns.tolist() == [0, 0, 2 * 10**9, 2_500_000_000]
    assert trace.prompt_tokens.tolist() == [32, 25, 48, 1]
    assert trace.output_tokens.tolist() == [3, 10, 1, 2]
    assert trace.after.tolist() == [-1, -1, 0, 2]
    assert trace.think_ns.tolist() == [0, 0, 2 * 10**9, 500_000_000]
    assert trace.spans(0) == [(1, 16), (2, 16)]
    assert trace.spans(1)[0] == (1, 16)
    assert trace.spans(1)[1][1] == 9
    apart = traces.load(tmp_path / "a.jsonl", turns_wait=False, rate_per_s=0.1, seed=2, chars_per_token=2)
    assert (apart.after == traces.NO_ROW).all()
    assert apart.prompt_tokens.sum() == 65 + 96 + 50 + 1
    assert (apart.arrival_ns == 0).sum() == 1  # the second session starts later than the first


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hashes": [1]}, "has 1 hashes for in_chars 130; at 64 characters a hash it needs 2"),
        ({"turn": 3}, "is turn 3 of session x after turn 3"),
        ({"dt_us": -1}, "dt_us is -1"),
        ({"hashes": ["a", "b"]}, "hashes must be a list of whole numbers"),
    ],
)
def test_a_wrong_agent_row_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    """The error names the file and the line; so does a size of tokens that does not divide a hash."""
    path = write(tmp_path, "a.jsonl", as_lines([*AGENT, {**AGENT[0], "turn": 9, **change}]))
    assert f"{path}, line 5: " in complaint(path)
    assert says in complaint(path)
    assert "must be a divisor of 64" in complaint(path, chars_per_token=5)


def chat(*messages: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in messages]}


CHATS = [
    chat(("human", "a" * 8), ("gpt", "b" * 40), ("human", "c" * 4), ("gpt", "d" * 9), ("human", "unanswered")),
    chat(("gpt", "nobody asked"), ("human", ""), ("gpt", "x")),
    chat(("system", "s" * 6), ("human", "e" * 2), ("gpt", "f")),
    chat(("human", "a" * 8), ("gpt", "g" * 40)),
]


def test_sharegpt_turns_build_on_each_other(tmp_path: Path) -> None:
    """Each answered message is a request whose prompt is all before it; equal openings are shared, answers are not."""
    trace = traces.load(write(tmp_path, "s.json", json.dumps(CHATS, indent=1)))
    assert trace.prompt_tokens.tolist() == [2, 2 + 10 + 1, 2, 2]
    assert trace.output_tokens.tolist() == [10, 3, 1, 10]
    assert trace.after.tolist() == [-1, 0, -1, -1]
    assert trace.output_id(0) == trace.spans(1)[1][0]
    assert trace.spans(1)[0] == trace.spans(0)[0] == trace.spans(3)[0]
    assert trace.dropped == 1
    assert (trace.arrival_ns == 0).all()


def test_sharegpt_choices(tmp_path: Path) -> None:
    """One turn of each, another size of tokens, a pause and a seeded rate of conversations."""
    path = write(tmp_path, "s.json", json.dumps(CHATS))
    assert traces.load(path, turns=1).prompt_tokens.tolist() == [2, 2, 2]
    assert traces.load(path, chars_per_token=3.0).prompt_tokens.tolist()[0] == 3
    paced = traces.load(path, rate_per_s=1.0, think_s=0.5, seed=1)
    assert paced == traces.load(path, rate_per_s=1.0, think_s=0.5, seed=1)
    later = int(np.flatnonzero(paced.after >= 0)[0])
    assert paced.arrival_ns[later] - paced.arrival_ns[paced.after[later]] == 500_000_000
    for options, says in (({"turns": 0}, "turns is 0"), ({"chars_per_token": 0}, "chars_per_token is 0")):
        assert says in complaint(path, **options)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[\n{"id": 1, "conversations": []}\n]', "has no conversation with a human's message and an answer"),
        ('[\n{"conversations": []},\n{"id": 4}]', "line 3: begins an entry without a list of conversations"),
        ('[\n{"conversations": []},\n{"conversations": [{"from": "gpt"}]}]', "line 3: begins a conversation with"),
        ('[\n{"conversations": []},\n{"conversations": [', "line 3: begins what is not JSON"),
    ],
)
def test_a_wrong_conversation_is_named(tmp_path: Path, text: str, says: str) -> None:
    """The error names the file and the line where the entry begins."""
    assert says in complaint(write(tmp_path, "s.json", text))


def test_a_long_list_is_read_in_pieces(tmp_path: Path) -> None:
    """Entries over the borders of the pieces that are read, and one longer than a piece, come out whole."""
    many = [chat(("human", f"{i} " + "ü" * (i % 97)), ("gpt", "x" * 400_000 if i == 50 else "y")) for i in range(4000)]
    plain = write(tmp_path, "s.json", json.dumps(many, ensure_ascii=False))
    packed = tmp_path / "s.json.xz"
    packed.write_bytes(lzma.compress(plain.read_bytes(), preset=0))
    trace = traces.load(plain)
    assert len(trace) == 4000
    assert trace.output_tokens.max() == 100_000
    assert traces.load(packed) == trace


def test_the_published_parts_read(shared_data: Path) -> None:
    """The shared files have the requests they announce, and RAGPulse's first row is the one out of order."""
    folder = shared_data / "traces"
    assert len(traces.load(folder / "llmservingsim" / "example_trace.jsonl")) == 10
    agent = traces.load(folder / "agent" / "agent_calls_64char_hash.jsonl.xz")
    assert len(agent) == 1619
    assert (agent.after == traces.NO_ROW).sum() == 69  # sessions
    pulse = traces.load(folder / "ragpulse" / "0_trace.jsonl.xz")
    assert len(pulse) == 7106
    assert pulse.arrival_ns[-1] == 604_603 * 10**9
    exact = traces.load(folder / "ragpulse" / "0_trace.jsonl.xz", separators=True)
    assert set((exact.prompt_tokens - pulse.prompt_tokens).tolist()) == set(range(6, 13))
    assert traces.load(folder / "fixtures" / "sharegpt_SYNTHETIC.json").prompt_tokens.tolist() == [2, 5]
