"""Tokenizers and the text of an output while it grows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from engine.exec import smollm2  # noqa: E402
from engine.exec.detokenizer import Detokenizer  # noqa: E402
from engine.exec.tokenizer import ByteTokenizer, from_json  # noqa: E402
from engine.exec.weights import load_model  # noqa: E402
from engine.models.errors import DownloadError, ModelError  # noqa: E402


@given(st.text())
def test_bytes_survive_the_round_trip(text):
    """What the byte tokenizer encodes it decodes again."""
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(min_size=1))
def test_text_grows_to_the_whole_and_never_shows_half_a_character(text):
    """Token by token the text is a prefix of the final one, and it ends as the text itself."""
    tokenizer = ByteTokenizer()
    growing = Detokenizer(tokenizer)
    for token in tokenizer.encode(text):
        growing.push(token)
        assert text.startswith(growing.text)
    growing.flush()
    assert growing.text == text


@given(
    text=st.text("ab-é", max_size=30),
    stops=st.lists(st.text("ab-é", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_a_stop_string_ends_the_text_where_it_first_appears(text, stops, include):
    """The stop is noticed at the token that completes it, and the text is cut before it (or after it, if asked)."""
    tokenizer = ByteTokenizer()
    growing = Detokenizer(tokenizer, stops, include)
    met = None
    for token in tokenizer.encode(text):
        met = growing.push(token)
        if met is not None:
            break
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    if not ends:
        assert met is None
        return
    assert ends[met] == min(ends.values())
    at = text.find(met)
    assert growing.text == text[: at + (len(met) if include else 0)]


def test_a_broken_character_at_the_end_comes_out_as_a_mark():
    """An output that ends within a character is not silently shortened."""
    growing = Detokenizer(ByteTokenizer())
    for token in [104, 105, 0xC3]:
        growing.push(token)
    assert growing.text == "hi"
    growing.flush()
    assert growing.text == "hi\ufffd"


def test_a_tokenizer_json_is_read_and_a_broken_one_is_named(tmp_path):
    """A Hugging Face tokenizer.json works; a damaged one is named in one sentence."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    tokenizer = from_json(path, (2,), None)
    assert tokenizer.encode("hello world") == [1, 2]
    with pytest.raises(ModelError, match="no ChatML marks"):
        tokenizer.chat([{"role": "user", "content": "hello"}])
    path.write_text("{")
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        from_json(path, (), None)


@pytest.mark.weights
def test_the_default_models_tokenizer():
    """Digits stand alone, text survives the round trip, and a conversation is written in ChatML."""
    try:
        smollm2.fetch()
    except DownloadError as error:
        pytest.skip(str(error))
    tokenizer = load_model("smollm2", "dummy").tokenizer
    assert len(tokenizer.encode("2026")) == 4
    for text in ("def f(x):\n    return x**2\n", "naïve — 東京 🚀", " two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids.count(2) == 2
    assert tokenizer.decode(ids).startswith("system\nYou are a helpful AI assistant named SmolLM")
    assert tokenizer.decode(ids).endswith("user\nHi\nassistant\n")
