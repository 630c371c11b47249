"""What holds for every format: how it is recognised, packed, refused and kept out of memory."""

from __future__ import annotations

import gzip
import lzma
import random
from pathlib import Path

import pytest
from trace_files import sample_files

import traces
from traces import files
from traces.files import TraceFile
from traces.readers import base

BINARY = ("kvtwin-parquet", "servegen-pool")


def test_every_format_has_a_sample_that_it_alone_recognises(tmp_path: Path) -> None:
    """A small file of each format is recognised as that, and by no other format."""
    samples = sample_files(tmp_path)
    assert samples.keys() == traces.FORMATS.keys()
    for name, path in samples.items():
        assert [entry.name for entry in traces.FORMATS.values() if entry.recognises(TraceFile(path))] == [name]
        assert len(traces.load(path)) > 0
        assert traces.load(path) == traces.load(path, format=name)


def test_packing_line_ends_and_blank_lines_change_nothing(tmp_path: Path) -> None:
    """gzip, xz, CRLF, a byte order mark and blank lines at the end give the same trace, for every format of text."""
    for name, path in sample_files(tmp_path).items():
        plain, data = traces.load(path), path.read_bytes()
        changed = [gzip.compress(data), lzma.compress(data)]
        if name not in BINARY:
            changed += [data.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + data, data + b"\n \n"]
        for other in changed:
            path.write_bytes(other)
            assert traces.load(path) == plain, (name, other[:40])
        path.write_bytes(data)


def sentence(path: Path, format: str | None) -> str:
    """What the file is refused with; empty if it is read. Any other exception than TraceError goes through."""
    try:
        traces.load(path, format=format)
    except traces.TraceError as error:
        return str(error)
    return ""


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    """A file cut anywhere, or with bytes changed, is read or refused with a TraceError that names it; nothing else."""
    rng = random.Random(0)
    for name, path in sample_files(tmp_path).items():
        data = path.read_bytes()
        for attempt in range(60):
            changed = bytearray(data[: rng.randrange(len(data))] if attempt % 3 == 0 else data)
            for _ in range(attempt % 3 * 2):
                changed[rng.randrange(len(changed))] = rng.choice(b'0x{}[]",.-9\n\xff')
            path.write_bytes(bytes(changed))
            for format in (None, name):
                said = sentence(path, format)
                assert not said or (str(path) in said and "\n" not in said)
        path.write_bytes(data)


def test_another_formats_file_is_one_sentence(tmp_path: Path) -> None:
    """A reader that is forced on the file of another format refuses it with a TraceError, or reads what it can."""
    for path in sample_files(tmp_path).values():
        for name in traces.FORMATS:
            said = sentence(path, name)
            assert not said or str(path) in said


def test_a_trace_longer_than_memory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading stops as soon as the rest would not fit, whether a format is read in rows or as a whole."""
    samples = sample_files(tmp_path)
    for module in (base, files):
        monkeypatch.setattr(module, "available_bytes", lambda: 100)
    monkeypatch.setattr(base, "_CHECK_ROWS", 2)
    for name in ("azure-2023", "burstgpt", "mooncake", "llmservingsim"):
        with pytest.raises(traces.TraceError, match=r"does not fit in memory \(2 requests and more to come\); cut it"):
            traces.load(samples[name])
    for name in ("vllm-bench", "servegen-pool"):
        with pytest.raises(traces.TraceError, match=r"does not fit in memory \(over 0 MiB and more to come\)"):
            traces.load(samples[name])


def test_running_out_of_memory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system refuses memory in spite of that, it is the same sentence and no traceback."""
    path = sample_files(tmp_path)["vidur"]

    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(base, "make_trace", refuse)
    with pytest.raises(traces.TraceError, match="does not fit in memory"):
        traces.load(path)


def test_memory_is_told_in_bytes() -> None:
    """What the system says is available is more than this test needs and less than a mebibyte a byte."""
    assert 2**20 < files.available_bytes() < 2**50
