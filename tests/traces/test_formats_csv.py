"""Azure 2024, BurstGPT and Vidur: what each file gets wrong by default, on small files of the published layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import traces
from traces.files import TraceFile
from traces.readers.azure import _Clock

AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:00.004102+00:00,2162,5
2024-05-12 00:00:20+00:00,300,30
2024-05-12 00:00:09.5+00:00,400,40
2024-05-12 00:00:30Z,7,0
"""
BURSTGPT_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
45,GPT-4,417,276,693,API log
118,GPT-4,500,0,500,Conversation log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
100.0,aa,43,GPT-4,906,446,1352,Conversation log
161.0,bb,2,ChatGPT,36,29,65,Conversation log
192.0,aa,8,GPT-4,1779,123,1902,Conversation log
193.0,aa,0,GPT-4,1779,0,1779,Conversation log
195.0,aa,9,GPT-4,20,3,23,Conversation log
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def complaint(path: Path, **options: object) -> str:
    """The one sentence with which a file is refused."""
    with pytest.raises(traces.TraceError) as caught:
        traces.load(path, **options)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_azure_2024_takes_zones_and_missing_fractions(tmp_path: Path) -> None:
    """`+00:00`, `Z` and a missing fraction are read, rows are sorted, and one that generated nothing is left out."""
    trace = traces.load(write(tmp_path, "a.csv", AZURE_2024))
    assert trace.arrival_ns.tolist() == [0, 9_495_898_000, 19_995_898_000]
    assert trace.prompt_tokens.tolist() == [2162, 400, 300]
    assert trace.dropped == 1


def test_azure_2024_other_zones_are_moved_to_utc(tmp_path: Path) -> None:
    """A time with another zone is the same moment in UTC, whether the zone has a colon or not."""
    rows = "2024-05-12 02:00:00+02:00,1,1\n2024-05-11 19:00:01-0500,2,2\n"
    trace = traces.load(write(tmp_path, "a.csv", AZURE_2024.splitlines()[0] + "\n" + rows))
    assert trace.arrival_ns.tolist() == [0, 1_000_000_000]


@given(
    st.lists(
        st.builds(
            "2024-05-{:02d} 11:5{}:0{}{}{}".format,
            st.integers(1, 2),
            st.integers(0, 1),
            st.integers(0, 2),
            st.sampled_from(["", ".5", ".000000001", ".1234567", ".", ".12345678901", ".1.2"]),
            st.sampled_from(["", "Z", "+00:00", "-0130", "+0"]),
        ),
        max_size=12,
    )
)
def test_times_of_one_second_are_what_each_is_by_itself(times: list[str]) -> None:
    """A time is read the same, or refused the same, after any others and alone."""

    def read(clock: _Clock, when: str) -> int | str:
        try:
            return clock.ns(2, when)
        except traces.TraceError as error:
            return str(error)

    file = TraceFile(Path(__file__))
    together = _Clock(file, "x", zone=True)
    assert [read(together, when) for when in times] == [read(_Clock(file, "x", zone=True), when) for when in times]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("2024-05-12 24:00:00+00:00,1,1", "is no date and time that exists"),
        ("2024-02-30 00:00:00+00:00,1,1", "is no date and time that exists"),
        ("12.05.2024 00:00,1,1", "it must look like 2024-05-12 00:00:00.004102+00:00"),
        ("2024-05-12 00:00:00+00:00,1", "has 2 columns"),
        ("2024-05-12 00:00:00+00:00,1,x", "GeneratedTokens is 'x'"),
    ],
)
def test_a_wrong_azure_2024_row_is_named(tmp_path: Path, row: str, says: str) -> None:
    """The error names the file, the line and what is wrong with it."""
    path = write(tmp_path, "a.csv", AZURE_2024 + row + "\n")
    assert f"{path}, line 6: " in complaint(path)
    assert says in complaint(path)


def test_both_burstgpt_layouts_are_read_by_name(tmp_path: Path) -> None:
    """Version 3 puts two columns in front of the model, which shifts nothing; rows without tokens are left out."""
    first = traces.load(write(tmp_path, "1.csv", BURSTGPT_1))
    assert first.arrival_ns.tolist() == [0, 40_000_000_000, 40_000_000_000]
    assert first.prompt_tokens.tolist() == [472, 1087, 417]
    assert first.output_tokens.tolist() == [18, 230, 276]
    assert first.dropped == 1
    third = traces.load(write(tmp_path, "3.csv", BURSTGPT_3))
    assert third.prompt_tokens.tolist() == [906, 36, 1779, 20]
    assert third.output_tokens.tolist() == [446, 29, 123, 3]
    assert third.dropped == 1
    assert (third.after == traces.NO_ROW).all()
    shuffled = "\n".join(",".join(reversed(line.split(","))) for line in BURSTGPT_3.splitlines())
    assert traces.load(write(tmp_path, "r.csv", shuffled)) == third


def test_burstgpt_turns_can_wait(tmp_path: Path) -> None:
    """With turns_wait a row follows the one before it in its session, after the gap less the elapsed time."""
    trace = traces.load(write(tmp_path, "3.csv", BURSTGPT_3), turns_wait=True)
    assert trace.after.tolist() == [-1, -1, 0, 2]
    assert trace.think_ns.tolist() == [0, 0, 49_000_000_000, 0]  # 92 - 43; 3 - 8 is none
    assert "no columns Session ID and Elapsed time" in complaint(write(tmp_path, "1.csv", BURSTGPT_1), turns_wait=True)


def test_burstgpt_seconds_can_be_spread(tmp_path: Path) -> None:
    """dequantize moves each row forward by less than its own second, and keeps the order."""
    header = BURSTGPT_1.splitlines()[0]
    rows = [f"{7 * (i // 20)},ChatGPT,{i + 1},1,{i + 2},API log" for i in range(200)]
    path = write(tmp_path, "1.csv", "\n".join([header, *rows]))
    spread = traces.load(path, dequantize=True, seed=4)
    assert spread.prompt_tokens.tolist() == list(range(1, 201))
    first = traces.load(path).arrival_ns - spread.arrival_ns  # all moved by the first row's own jitter
    assert np.ptp(first) < 1e9
    assert len(np.unique(spread.arrival_ns)) == 200


def test_a_made_up_burstgpt_is_refused(tmp_path: Path) -> None:
    """A file whose timestamps just count its rows is not BurstGPT, whatever its name; naming the format reads it."""
    rows = [f"{i},{('ChatGPT', 'GPT-4')[i % 2]},{10 + i},{i % 7},{10 + i + i % 7},API log" for i in range(250)]
    path = write(tmp_path, "BurstGPT_1.csv", "\n".join([BURSTGPT_1.splitlines()[0], *rows]))
    assert "timestamps just count the rows" in complaint(path)
    trace = traces.load(path, format="burstgpt")
    assert (len(trace), trace.dropped) == (214, 36)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("soon,GPT-4,1,1,2,API log", "Timestamp is 'soon'"),
        ("nan,GPT-4,1,1,2,API log", "Timestamp is 'nan'"),
        ("119,GPT-4,1,1.5,2,API log", "Response tokens is '1.5'"),
        ("119,GPT-4,-1,1,2,API log", "Request tokens is '-1'"),
        ("119,GPT-4,1,1,2", "has 5 columns; it needs the 6"),
    ],
)
def test_a_wrong_burstgpt_row_is_named(tmp_path: Path, row: str, says: str) -> None:
    """The error names the file, the line and what is wrong with it; so does a missing column."""
    path = write(tmp_path, "b.csv", BURSTGPT_1 + row + "\n")
    assert f"{path}, line 6: " in complaint(path)
    assert says in complaint(path)
    renamed = write(tmp_path, "c.csv", BURSTGPT_1.replace("Response tokens", "Answer tokens"))
    assert "Response tokens is missing" in complaint(renamed)


def test_quoted_cells_may_hold_commas(tmp_path: Path) -> None:
    """A cell in quotes is one cell."""
    quoted = BURSTGPT_1.replace("API log", '"API log, v1"')
    assert traces.load(write(tmp_path, "q.csv", quoted)) == traces.load(write(tmp_path, "p.csv", BURSTGPT_1))


def test_the_published_heads_read(shared_data: Path) -> None:
    """The first rows of the published files give the lengths that stand in them."""
    fixtures = shared_data / "traces" / "fixtures"
    assert traces.load(fixtures / "burstgpt1_head3.csv").output_tokens.tolist() == [18, 230, 276]
    third = traces.load(fixtures / "burstgpt3_head4.csv")
    assert third.prompt_tokens.tolist() == [906, 36, 1779, 935]
    assert third.arrival_ns.tolist() == [0, 51 * 10**9, 82 * 10**9, 144 * 10**9]
    azure = traces.load(fixtures / "azure2024_SYNTHETIC.csv")
    assert azure.arrival_ns.tolist() == [0, 5_082_000, 19_995_898_000, 29_995_898_000]


def test_vidur_lengths_have_no_arrivals_of_their_own(tmp_path: Path) -> None:
    """Lengths alone arrive all at once, or at a seeded rate; other columns and their order change nothing."""
    path = write(
        tmp_path, "v.csv", "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n30,5,35,6\n7,2,9,3.5\n"
    )
    trace = traces.load(path)
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([30, 7], [5, 2])
    assert trace.arrival_ns.tolist() == [0, 0]
    turned = write(tmp_path, "t.csv", ",pd_ratio,num_decode_tokens,num_prefill_tokens\n0,6,5,30.0\n1,3.5,2,7.0\n")
    assert traces.load(turned) == trace
    paced = traces.load(path, rate_per_s=2.0, seed=3)
    assert paced == traces.load(path, rate_per_s=2.0, seed=3)
    assert paced != traces.load(path, rate_per_s=2.0, seed=4)
    assert "rate_per_s is 0; it must be a number above 0" in complaint(path, rate_per_s=0)


def test_vidur_arrivals_are_seconds(tmp_path: Path) -> None:
    """arrived_at is seconds, kept to the ns, also where the file shows binary rounding."""
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n5.8926549999999995,91,16\n"
    path = write(tmp_path, "v.csv", text)
    assert traces.load(path).arrival_ns.tolist() == [0, 4_314_579_000, 5_892_655_000]
    assert "rate_per_s has no effect" in complaint(path, rate_per_s=1)
    assert "line 5: num_decode_tokens is '0'" in complaint(write(tmp_path, "w.csv", text + "6,4,0\n"))
    assert "line 5: arrived_at is 'x'" in complaint(write(tmp_path, "x.csv", text + "x,4,1\n"))
    assert "num_decode_tokens is missing" in complaint(write(tmp_path, "y.csv", text.replace("_decode_", "_output_")))


def test_the_published_vidur_files_read(shared_data: Path) -> None:
    """28,257 summaries with lengths alone; 200 Splitwise rows that are Azure's of 2023."""
    folder = shared_data / "traces"
    assert len(traces.load(folder / "vidur" / "arxiv_summarization_lengths.csv.xz")) == 28_257
    splitwise = traces.load(folder / "vidur" / "splitwise_conv.head200.csv")
    azure = traces.load(folder / "azure2023" / "AzureLLMInferenceTrace_conv.csv.xz").head(200)
    assert splitwise.prompt_tokens.tolist() == azure.prompt_tokens.tolist()
    assert abs(splitwise.arrival_ns - azure.arrival_ns).max() <= 1000
