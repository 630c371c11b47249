"""What makes two blocks the same, both ways: equal content has equal keys, and nothing else has (P13)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import NO_LIMIT, SpanIdentity, TokenIdentity

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8)
TAGS = st.sampled_from([b"", b"a", b"b", b"ab", b"ba", b"salt", b"adapter", b"a\x00"])


@settings(max_examples=300)
@given(TOKENS, TOKENS, TAGS, TAGS, TAGS, TAGS, st.integers(1, 3))
def test_keys_are_equal_exactly_where_everything_before_is(
    one: list[int], two: list[int], salt: bytes, salt2: bytes, adapter: bytes, adapter2: bytes, size: int
) -> None:
    """P13: two blocks have one key if and only if all tokens up to their end, the salt and the adapter are equal."""
    a = TokenIdentity(one, size, salt, adapter)
    b = TokenIdentity(two, size, salt2, adapter2)
    for i in range(len(one) // size):
        for j in range(len(two) // size):
            same = (one[: (i + 1) * size], salt, adapter) == (two[: (j + 1) * size], salt2, adapter2)
            assert (a.key(i) == b.key(j)) == same


def test_a_salt_is_not_an_adapter() -> None:
    """Salt and adapter are told apart, whichever bytes they have and however they are split between the two."""
    splits = [(b"ab", b""), (b"a", b"b"), (b"", b"ab"), (b"b", b"a"), (b"", b"")]
    keys = [TokenIdentity([1, 2], 2, salt, adapter).key(0) for salt, adapter in splits]
    assert len(set(keys)) == len(splits)


def test_a_key_covers_the_parent() -> None:
    """The same block of tokens behind another prefix is another content."""
    keys = {TokenIdentity([first, 7, 7], 1).key(2) for first in range(5)}
    assert len(keys) == 5


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_tokens_that_become_known_are_like_tokens_of_a_prompt(prompt: list[int], more: list[int], size: int) -> None:
    """A request's keys do not depend on which of its tokens were generated, nor on when keys were asked for."""
    grown = TokenIdentity(prompt, size)
    for token in more:
        grown.append(token)
        for i in range(len(grown.tokens) // size):
            grown.key(i)
    whole = TokenIdentity(prompt + more, size)
    full = (len(prompt) + len(more)) // size
    assert [grown.key(i) for i in range(full)] == [whole.key(i) for i in range(full)]


def test_a_block_that_is_not_full_has_no_key() -> None:
    """Asking for the key of a block whose last token is not known is an error, not a wrong key."""
    with pytest.raises(IndexError, match="block 1 is not full: 3 tokens are known"):
        TokenIdentity([1, 2, 3], 2).key(1)
    with pytest.raises(IndexError, match="beyond the 3 tokens"):
        SpanIdentity([(4, 3)], 2).key(1)


Path = list[tuple[int, int]]
"""A request as a walk down a tree: (which child, how many tokens on the way)."""


def spans_and_tokens(path: Path, names: dict[tuple[tuple[int, int], ...], int]) -> tuple[Path, list[int]]:
    """The walk as spans, and as tokens that are equal exactly where the walks are."""
    spans: Path = []
    tokens: list[int] = []
    for depth in range(1, len(path) + 1):
        name = names.setdefault(tuple(path[:depth]), len(names) + 1)
        length = path[depth - 1][1]
        spans.append((name, length))
        tokens.extend(1000 * name + k for k in range(length))
    return spans, tokens


@st.composite
def tree_pairs(draw: st.DrawFn) -> tuple[Path, Path]:
    """Two walks that go together for a while."""
    step = st.tuples(st.integers(0, 1), st.sampled_from([1, 2, 3, 7, 16, 33]))
    common = draw(st.lists(step, max_size=4))
    ends = st.lists(step, min_size=0 if common else 1, max_size=3)
    return common + draw(ends), common + draw(ends)


@settings(max_examples=300)
@given(tree_pairs(), st.integers(1, 40))
def test_spans_and_tokens_agree_on_what_is_equal(pair: tuple[Path, Path], size: int) -> None:
    """At any block size, the blocks that two requests share by their spans are those they share by their tokens."""
    names: dict[tuple[tuple[int, int], ...], int] = {}
    (spans_a, tokens_a), (spans_b, tokens_b) = (spans_and_tokens(path, names) for path in pair)
    a, b = SpanIdentity(spans_a, size), SpanIdentity(spans_b, size)
    real_a, real_b = TokenIdentity(tokens_a, size), TokenIdentity(tokens_b, size)
    for i in range(len(tokens_a) // size):
        for j in range(len(tokens_b) // size):
            assert (a.key(i) == b.key(j)) == (real_a.key(i) == real_b.key(j))


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(1, 9),
    st.integers(1, 12),
)
def test_a_follow_up_has_the_outputs_it_follows(
    lengths: list[int], output: int, quoted: int, question: int, size: int
) -> None:
    """A prompt that quotes the first tokens of an output, named by its id, shares exactly the blocks within them."""
    quoted = min(quoted, output)
    spans = [(100 + i, length) for i, length in enumerate(lengths)]
    first = SpanIdentity(spans, size, output_id=7)
    follow = SpanIdentity([*spans, *([(7, quoted)] if quoted else []), (200, question)], size)
    prompt = sum(lengths)
    for i in range((prompt + min(output, quoted + question)) // size):
        assert (first.key(i) == follow.key(i)) == ((i + 1) * size <= prompt + quoted)
    assert first.shares_output
    assert not follow.shares_output
    assert first.shared_tokens == NO_LIMIT
    assert follow.shared_tokens == prompt + quoted + question


def test_a_salt_keeps_the_tenants_of_a_trace_apart() -> None:
    """Equal spans with another salt, or without one, are other contents."""
    keys = {SpanIdentity([(1, 4)], 2, salt=salt).key(0) for salt in (0, 1, 2)}
    assert len(keys) == 3
    assert SpanIdentity([(1, 4)], 2, salt=1).key(0) == SpanIdentity([(1, 4)], 2, salt=1).key(0)


def test_shared_tokens_may_be_given_smaller() -> None:
    """What nobody else has can be said to be private; an output's id makes all of it shared again."""
    assert SpanIdentity([(1, 8)], 4, shared_tokens=3).shared_tokens == 3
    assert SpanIdentity([(1, 8)], 4, shared_tokens=3, output_id=2).shared_tokens == NO_LIMIT
    assert TokenIdentity([1], 4).shared_tokens == NO_LIMIT
    assert TokenIdentity([1], 4).shares_output


def test_two_ways_to_cut_one_prefix_do_not_collide() -> None:
    """A span id names the whole prefix up to its end, so cutting that prefix elsewhere gives no wrong hit."""
    tokens = [0, 1, 2, 3, 4, 5]
    whole = SpanIdentity([(6, 6)], 2)
    parts = SpanIdentity([(2, 2), (6, 4)], 2)  # the same six tokens
    for i in range(3):
        for j in range(3):
            if whole.key(i) == parts.key(j):
                assert tokens[: 2 * i + 2] == tokens[: 2 * j + 2]
