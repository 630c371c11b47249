"""Reading and writing trace files, and what each format gets wrong by default."""

from __future__ import annotations

import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from trace_strategies import generator_specs

import traces

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51,879,55\r\n"
)
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 700, "output_length": 4, "hash_ids": [0, 3]},
    {"timestamp": 3000, "input_length": 512, "output_length": 3, "hash_ids": [4]},
    {"timestamp": 6001, "input_length": 1, "output_length": 2, "hash_ids": [5]},
]


def as_lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_azure_keeps_seven_digits_and_takes_crlf(tmp_path: Path) -> None:
    """Arrivals are exact to 100 ns from the first one, with or without a fraction; line ends leave no trace."""
    trace = traces.load(write(tmp_path, "a.csv", AZURE))
    assert trace.arrival_ns.tolist() == [0, 4_314_579_000, 4_319_410_000]
    assert trace.prompt_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]
    assert len(trace.span_ids) == 0


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    """A file that is not sorted gives a sorted trace."""
    lines = AZURE.splitlines(keepends=True)
    trace = traces.load(write(tmp_path, "a.csv", lines[0] + lines[2] + lines[1]))
    assert trace.prompt_tokens.tolist() == [374, 396]


def test_packing_and_format_are_told_by_content(tmp_path: Path) -> None:
    """gzip, xz, a byte order mark and blank lines at the end change nothing, whatever the file is called."""
    plain = traces.load(write(tmp_path, "a.csv", AZURE))
    (tmp_path / "b.bin").write_bytes(gzip.compress(AZURE.encode()))
    (tmp_path / "c.csv").write_bytes(lzma.compress(AZURE.encode()))
    marked = write(tmp_path, "d.csv", "\ufeff" + AZURE + "\r\n\r\n")
    assert traces.load(tmp_path / "b.bin") == traces.load(tmp_path / "c.csv") == traces.load(marked) == plain


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("2023-11-16 18:15:46.68,374", "has 2 columns"),
        ("2023-11-16 18:15:46.68,374,44,1", "has 4 columns"),
        ("2023-11-16 18:15:46.68,,44", "ContextTokens is ''"),
        ("2023-11-16 18:15:46.68,374,0", "GeneratedTokens is '0'; it must be a whole number of 1 or more"),
        ("2023-11-16 18:15:46.68,-4,4", "ContextTokens is '-4'"),
        ("2023-11-16 18:15:46.68,4.5,4", "ContextTokens is '4.5'"),
        ("2023-11-16 18:15:46.68,99999999999,4", "ContextTokens is '99999999999'"),
        ("16/11/2023 18:15,374,44", "TIMESTAMP is '16/11/2023 18:15'; it must look like"),
        ("2023-13-16 18:15:46,374,44", "TIMESTAMP '2023-13-16 18:15:46' is no date"),
        ("2023-11-16 18:15:46.68+00:00,374,44", "without a time zone"),
    ],
)
def test_a_wrong_azure_row_is_named(tmp_path: Path, row: str, says: str) -> None:
    """The error names the file, the line and what is wrong with it."""
    path = write(tmp_path, "a.csv", AZURE + row + "\r\n")
    with pytest.raises(traces.TraceError) as caught:
        traces.load(path)
    assert f"{path}, line 5: " in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mooncake_spans_cover_the_prompt_and_the_last_is_partial(tmp_path: Path) -> None:
    """Each id is 512 tokens but the last, which is the rest; times are ms."""
    trace = traces.load(write(tmp_path, "m.jsonl", as_lines(MOONCAKE)))
    assert trace.spans(0) == [(0, 512), (1, 512), (2, 76)]
    assert trace.spans(1) == [(0, 512), (3, 188)]
    assert trace.spans(2) == [(4, 512)]
    assert trace.spans(3) == [(5, 1)]
    assert trace.arrival_ns.tolist() == [0, 0, 3_000_000_000, 6_001_000_000]
    assert trace.span_block == 512


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hash_ids": [0, 1]}, "has 2 hash_ids for input_length 1100; at 512 tokens an id it needs 3"),
        ({"hash_ids": [0, 1, -2]}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": [0, 1, True]}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": "012"}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": [0, 4, 1]}, "hash id 1 follows another id than on line 1"),
        ({"output_length": 0}, "output_length is 0; it must be a whole number of 1 or more"),
        ({"input_length": "1100"}, 'input_length is "1100"'),
        ({"timestamp": -1}, "timestamp is -1"),
        ({"timestamp": None}, "timestamp is missing"),
        ({"output_lenght": 3}, "has a key 'output_lenght'"),
        ({"output_length": 2**31}, "beyond 32 bits"),
    ],
)
def test_a_wrong_mooncake_row_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    """The error names the file and what is wrong, on the line where it is."""
    path = write(tmp_path, "m.jsonl", as_lines([*MOONCAKE, {**MOONCAKE[0], **change}]))
    with pytest.raises(traces.TraceError) as caught:
        traces.load(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "line 5: " in str(caught.value) or "beyond" in says


@pytest.mark.parametrize("text", ["{not json}\n", "[1, 2]\n", "3\n", '{"timestamp": 0\n'])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    """Broken JSON, or JSON of another kind, is an error of its line."""
    path = write(tmp_path, "m.jsonl", as_lines(MOONCAKE) + text)
    with pytest.raises(traces.TraceError, match="line 5: "):
        traces.load(path)


def test_coarse_times_stay_as_they_are_by_default(tmp_path: Path) -> None:
    """Without dequantize, rows that share a timestamp arrive together."""
    trace = traces.load(write(tmp_path, "m.jsonl", as_lines(MOONCAKE)))
    assert trace.arrival_ns[0] == trace.arrival_ns[1]


def test_dequantize_spreads_within_the_step_and_keeps_the_order(tmp_path: Path) -> None:
    """Each row moves forward by less than the step, rows keep their order, and the seed decides where they land."""
    rows = [
        {"timestamp": 3000 * (i // 40), "input_length": 1 + i, "output_length": 1, "hash_ids": [i]} for i in range(400)
    ]
    path = write(tmp_path, "m.jsonl", as_lines(rows))
    spread = traces.load(path, dequantize=True, seed=1)
    assert spread.prompt_tokens.tolist() == list(range(1, 401))
    first = 3e9 - np.diff(spread.arrival_ns[[0, 40]])[0]  # the first row moved by this, and became time 0
    moved = spread.arrival_ns + first - 3_000_000_000 * (np.arange(400) // 40)
    assert (moved > -3e9).all()
    assert (moved < 6e9).all()
    assert len(np.unique(spread.arrival_ns)) == 400
    counts = np.bincount(spread.arrival_ns[spread.arrival_ns < 30_000_000_000] // 1_000_000_000)
    assert counts.max() < 40
    assert traces.load(path, dequantize=True, seed=1) == spread
    assert traces.load(path, dequantize=True, seed=2) != spread


def test_dequantize_refuses_fine_times(tmp_path: Path) -> None:
    """Timestamps that are not coarse are not to be spread."""
    rows = [{"timestamp": 7 * i, "input_length": 1, "output_length": 1, "hash_ids": [i]} for i in range(9)]
    with pytest.raises(traces.TraceError, match="not rounded to a coarse step"):
        traces.load(write(tmp_path, "m.jsonl", as_lines(rows)), dequantize=True)


def test_options_belong_to_a_format(tmp_path: Path) -> None:
    """An option of another format, or of none, is refused by name."""
    path = write(tmp_path, "a.csv", AZURE)
    with pytest.raises(traces.TraceError, match="format azure-2023 has no option 'dequantize'; it takes none"):
        traces.load(path, dequantize=True)
    mooncake = write(tmp_path, "m.jsonl", as_lines(MOONCAKE))
    with pytest.raises(traces.TraceError, match="no option 'colour'; it takes dequantize, seed"):
        traces.load(mooncake, colour=1)


def test_a_file_of_no_known_format_is_refused(tmp_path: Path) -> None:
    """The error shows the beginning, and lists what we read; so do a missing, an empty and a cut-off file."""
    with pytest.raises(traces.TraceError, match=r"begins with 'hello', which is none of .*azure-2023.*mooncake"):
        traces.load(write(tmp_path, "x", "hello\n"))
    with pytest.raises(traces.TraceError, match="there is no such file"):
        traces.load(tmp_path / "absent.csv")
    with pytest.raises(traces.TraceError, match="is empty"):
        traces.load(write(tmp_path, "e.csv", "\n"))
    with pytest.raises(traces.TraceError, match="has a header and no requests"):
        traces.load(write(tmp_path, "h.csv", AZURE.splitlines()[0]))
    for name, packed in (("t.gz", gzip.compress(AZURE.encode())), ("t.xz", lzma.compress(AZURE.encode()))):
        (tmp_path / name).write_bytes(packed[: len(packed) // 2])
        with pytest.raises(traces.TraceError, match="damaged or cut off"):
            traces.load(tmp_path / name)
    (tmp_path / "latin.csv").write_bytes(AZURE.encode() + b"\xff\xfe,1,2\r\n")
    with pytest.raises(traces.TraceError, match="line 5: is not UTF-8"):
        traces.load(tmp_path / "latin.csv")
    with pytest.raises(traces.TraceError, match="cannot be read"):
        traces.load(tmp_path)


def test_format_overrides_what_the_content_says(tmp_path: Path) -> None:
    """With format=, the named reader reads, and complains if it cannot."""
    path = write(tmp_path, "m.jsonl", as_lines(MOONCAKE))
    assert traces.load(path, format="mooncake") == traces.load(path)
    with pytest.raises(traces.TraceError, match="the header must be"):
        traces.load(path, format="azure-2023")
    with pytest.raises(traces.TraceError, match="unknown trace format 'pickle'; known are"):
        traces.load(path, format="pickle")


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl", "t.jsonl.gz", "t.jsonl.xz"])
@settings(max_examples=25)
@given(spec=generator_specs())
def test_our_own_format_reads_back_identical(
    tmp_path_factory: pytest.TempPathFactory, name: str, spec: dict[str, object]
) -> None:
    """What save writes, load gives back: every column, the closed loop, the name; and writing is repeatable."""
    trace = traces.generate(spec)
    folder = tmp_path_factory.mktemp("own")
    traces.save(trace, folder / name)
    again = traces.load(folder / name)
    assert again.digest() == trace.digest()
    assert again.name == trace.name
    before = (folder / name).read_bytes()
    traces.save(again, folder / name)
    assert (folder / name).read_bytes() == before


def test_rows_beyond_the_defaults_read_back_identical(tmp_path: Path) -> None:
    """Priorities, deadlines, tenants, and a head whose first arrival is not 0 survive both formats."""
    trace = traces.make_trace(
        [3, 5], [4, 6], [1, 2], priority=[-3, 1], deadline=[0, 9], tenant=[1, 0], span_block=4, name="mine"
    )
    for name in ("t.parquet", "t.jsonl"):
        traces.save(trace, tmp_path / name)
        assert traces.load(tmp_path / name) == trace
    with pytest.raises(traces.TraceError, match="name it so"):
        traces.save(trace, tmp_path / "t.csv")
    with pytest.raises(traces.TraceError, match="cannot be written"):
        traces.save(trace, tmp_path / "no" / "t.jsonl")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"arrival_ns": 0, "prompt_tokens": 4}', "output_tokens is missing"),
        ('{"arrival_ns": 0, "prompt_tokens": 4, "output_tokens": 1, "x": 2}', "unknown key 'x'"),
        ('{"arrival_ns": 0, "prompt_tokens": 4, "output_tokens": 1, "after": 1}', "after is 1"),
        ('{"arrival_ns": 0, "prompt_tokens": 4, "output_tokens": 1, "spans": [[1, 3]]}', "differ in length"),
        ('{"arrival_ns": 0, "prompt_tokens": 4, "output_tokens": 1, "spans": [1]}', "spans must be a list"),
        ('{"arrival_ns": 0.5, "prompt_tokens": 4, "output_tokens": 1}', "arrival_ns is 0.5"),
    ],
)
def test_a_wrong_row_of_our_own_is_named(tmp_path: Path, line: str, says: str) -> None:
    """Our own format is checked as strictly as others'."""
    good = '{"arrival_ns": 0, "prompt_tokens": 4, "output_tokens": 1}'
    path = write(tmp_path, "t.jsonl", '{"kvtwin_trace": 1}\n' + good + "\n" + line + "\n")
    with pytest.raises(traces.TraceError) as caught:
        traces.load(path)
    assert f"{path}, line 3: " in str(caught.value)
    assert says in str(caught.value)


def test_foreign_parquet_and_future_versions_are_refused(tmp_path: Path) -> None:
    """A Parquet file of something else, a cut one and a later version of our format say so."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(traces.TraceError, match="no kvtwin trace"):
        traces.load(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:40])
    with pytest.raises(traces.TraceError, match="damaged Parquet"):
        traces.load(tmp_path / "b.parquet")
    with pytest.raises(traces.TraceError, match="kvtwin_trace is 2; the header must say version 1"):
        traces.load(write(tmp_path, "t.jsonl", '{"kvtwin_trace": 2}\n{}\n'))


def test_reading_csv_loads_no_data_frames(tmp_path: Path) -> None:
    """The readers of text formats need numpy alone, so they start quickly."""
    path = write(tmp_path, "a.csv", AZURE)
    code = f"import sys, traces; traces.load({str(path)!r}); print({{'pandas', 'pyarrow', 'yaml'}} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_the_public_files_read_whole(shared_data: Path) -> None:
    """The published Azure and Mooncake files read without a complaint, with the number of requests they announce."""
    folder = shared_data / "traces"
    sizes = {
        "azure2023/AzureLLMInferenceTrace_conv.csv.xz": 19_366,
        "azure2023/AzureLLMInferenceTrace_code.csv.xz": 8_819,
        "mooncake/conversation_trace.jsonl.xz": 12_031,
        "mooncake/synthetic_trace.jsonl.xz": 3_993,
        "fixtures/azure2023_head.csv": 5,
    }
    for name, size in sizes.items():
        assert len(traces.load(folder / name)) == size, name


def test_dequantized_mooncake_has_no_bursts_of_3_s(shared_data: Path) -> None:
    """Spread, the conversation trace's gaps are no longer nine tenths zeros, and its reuse is what it was."""
    path = shared_data / "traces" / "mooncake" / "conversation_trace.jsonl.xz"
    coarse, spread = traces.load(path), traces.load(path, dequantize=True, seed=3)
    assert (np.diff(coarse.arrival_ns) == 0).mean() > 0.9
    assert (np.diff(spread.arrival_ns) == 0).mean() < 0.01
    assert (spread.span_ids == coarse.span_ids).all()
