"""`kvtwin plot memory`: what is drawn is what was recorded, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_results import write_toy

from engine.core.blockmap import BlockMap, BlockRecorder
from engine.core.presets import SchedulerConfig
from engine.core.scheduler import Scheduler
from experiments import blockplot, metrics, results
from experiments.blocks import BlockHistory, read_blocks, write_blocks
from experiments.cli import main
from experiments.memoryplot import Unit, columns_of, memory_figure, unit_of
from experiments.plotmemory import parse_times

WORKLOAD = """
kind: synthetic
num_requests: 60
seed: 3
arrival: {process: poisson, rate_per_s: 90}
prompt_tokens: {dist: uniform, low: 20, high: 200}
output_tokens: {dist: uniform, low: 10, high: 120}
prefix: {num_prefixes: 3, tokens: 64, share: 0.7}
"""
SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded simulation under memory pressure, `sim`; the same without blocks, `plain`."""
    path = tmp_path_factory.mktemp("memory")
    (path / "w.yaml").write_text(WORKLOAD)
    common = ["simulate", "--trace", str(path / "w.yaml"), "--hardware", "h100", "--num-gpu-blocks-override", "90"]
    assert main([*common, "--out", str(path / "sim"), "--record-blocks"]) == 0
    assert main([*common, "--out", str(path / "plain")]) == 0
    return path


def history_of(path: Path) -> BlockHistory:
    found = read_blocks(path)
    assert found is not None
    return found


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which a command line is refused."""
    capsys.readouterr()
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_recorded_blocks_agree_with_recorded_usage(folder: Path) -> None:
    """At every step, the blocks in use, cached and free are those that the table of steps counts."""
    run, history = results.read_results(folder / "sim"), history_of(folder / "sim")
    steps = metrics.expand_steps(run.tables)
    assert steps["preempted"].sum() > 0
    assert steps["shared"].max() > 0
    moments = blockplot.Moments.of(run, history)
    assert moments.steps.tolist() == steps["step"].tolist()
    for place, state in enumerate(history.states(moments.steps.tolist())):
        what, owner = blockplot.states_of(state)
        count = np.bincount(what, minlength=len(blockplot.STATES)) * SIZE
        assert count[blockplot.FREE] == steps["free"][place]
        assert count[blockplot.CACHED] == steps["cached"][place]
        assert count[blockplot.OWNED] + count[blockplot.SHARED] == steps["held"][place] + steps["tail"][place]
        assert ((owner >= 0) == (state.owners > 0)).all()


def test_recording_changes_no_result(folder: Path) -> None:
    """Requests and metrics are the same with --record-blocks and without."""
    plain, recorded = (results.read_results(folder / name) for name in ("plain", "sim"))
    assert plain.summary == recorded.summary
    assert (folder / "plain" / "requests.parquet").read_bytes() == (folder / "sim" / "requests.parquet").read_bytes()
    assert not (folder / "plain" / "blocks.parquet").exists()


def test_everything_is_drawn_twice_the_same(folder: Path, tmp_path: Path) -> None:
    """The command writes the three pictures, and the same bytes again."""
    for name in ("a", "b"):
        assert main(["plot", "memory", str(folder / "sim"), "--out", str(tmp_path / name)]) == 0
    for name in ("memory.png", "blocks.png", "blocks.html"):
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes()
        assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<!doctype html>")


def test_without_blocks_there_is_still_the_memory_over_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plain run is drawn over time; asking for its block map is refused with the fix."""
    assert main(["plot", "memory", str(folder / "plain"), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["memory"]
    assert "--record-blocks" in refused(["plot", "memory", str(folder / "plain"), "--at", "1s"], capsys)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--at", "soon"], "'soon' is none"),
        (["--at", "1s,"], "an empty one"),
        (["--at", "900h"], "after the end"),
        (["--at", "1ms", "--panels", "2"], "one of the two"),
        (["--panels", "0"], "--panels must be a whole number from 1 to 16"),
        (["--frames", "x"], "--frames must be"),
    ],
)
def test_bad_moments_are_refused(
    folder: Path, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence that names the option and what it takes."""
    assert named in refused(["plot", "memory", str(folder / "sim"), *words], capsys)


def test_times_have_units() -> None:
    """Seconds where none is named; given back in order, each once."""
    assert parse_times("2, 1.5s,800ms,.5s,2s,1m") == [0.5, 0.8, 1.5, 2.0, 60.0]


def test_a_moment_is_the_step_decided_last() -> None:
    """At a time, the state after the newest plan up to then; before all plans, the first."""
    times = np.array([1.0, 2.0, 2.0, 4.0])
    zeros = np.zeros(4, dtype=np.int64)
    moments = blockplot.Moments(np.arange(1, 5), times, zeros, zeros, zeros, 5.0)
    assert moments.at([0.5, 1.0, 1.9, 2.0, 3.9, 4.9]) == [0, 0, 0, 2, 2, 3]
    assert moments.evenly(3) == [2, 3]


def test_reduced_columns_keep_every_peak(tmp_path: Path) -> None:
    """A pool that is full for a single step among thousands, and a queue that is long for one, are in the picture."""
    num = 30_000
    flat = np.zeros(num, dtype=np.int64)
    steps = {name: flat.copy() for name in (*metrics.USAGE, "shared", "num_waiting", "num_running", "preempted")}
    steps["start_ns"] = np.arange(num) * 1_000_000
    steps["end_ns"] = steps["start_ns"] + 1_000_000
    steps["held"] += 10
    steps["held"][17_777] = 100
    steps["num_waiting"][23] = 7
    steps["transfer"][777] = 5
    steps["free"] = 100 - steps["held"] - steps["transfer"]
    steps["held"][778], steps["free"][778] = 20, 80
    shown = columns_of(steps, 0)
    assert shown.reduced
    assert len(shown.begin_s) <= 1100
    assert shown.values["held"].max() == 100
    assert shown.values["num_waiting"].max() == 7
    assert shown.values["transfer"].max() == 5
    assert (shown.begin_s[1:] >= shown.end_s[:-1]).all()
    assert (shown.end_s > shown.begin_s).all()
    assert shown.begin_s[0] == 0
    assert shown.end_s[-1] == num / 1000
    assert set(sum(shown.values[name] for name in metrics.USAGE).tolist()) == {100}
    peak = int(shown.values["held"].argmax())
    assert shown.begin_s[peak] <= 17.777 <= shown.end_s[peak]


def test_few_steps_are_drawn_each_and_idle_time_is_left_empty() -> None:
    """Each step lasts until the next is decided, but for a pause in which nothing runs."""
    names = (*metrics.USAGE, "shared", "num_waiting", "num_running", "preempted")
    steps = {name: np.zeros(3, dtype=np.int64) for name in names}
    steps["start_ns"] = np.array([0, 10_000_000, 500_000_000])
    steps["end_ns"] = np.array([9_999_000, 20_000_000, 510_000_000])
    shown = columns_of(steps, 0)
    assert not shown.reduced
    assert shown.begin_s.tolist() == [0, 0.01, 0.5]
    assert shown.end_s.tolist() == [0.01, 0.02, 0.51]


def test_memory_is_shown_in_bytes_where_the_model_is_known(folder: Path, tmp_path: Path) -> None:
    """SmolLM2 takes 2 x 30 layers x 3 heads x 64 x 2 bytes a token; a model that nobody knows is shown in slots."""
    run = results.read_results(folder / "plain")
    assert unit_of(run, 90 * SIZE) == Unit("MiB", 2 * 30 * 3 * 64 * 2 / (1 << 20))
    assert unit_of(run, 1 << 30).name == "GiB"
    toy = results.read_results(write_toy(tmp_path / "toy", "simulated"))
    assert unit_of(toy, 100) == Unit("slots", 1.0)
    axes = memory_figure(toy).axes
    assert "toy" in axes[0].get_title(loc="left")
    assert axes[0].get_ylabel() == "KV memory (slots)"


def test_requests_keep_their_colour_and_differ_from_those_beside_them(folder: Path) -> None:
    """With fewer running than there are colours, and but for requests that come back, no two have the same."""
    history = history_of(folder / "sim")
    colours = blockplot.colours_of_requests(history)
    steps = np.unique(history.changes["step"]).tolist()
    clashes = together = 0
    for state in history.states(steps):
        holders = [colours[request] for request in state.tables]
        together += 1
        clashes += len(holders) <= len(blockplot.PALETTE) and len(set(holders)) < len(holders)
    assert clashes < 0.2 * together


def test_states_are_told_apart() -> None:
    """Free, cached, owned, reserved, shared and held by a transfer: each from tables and references."""
    state = BlockMap(7)
    kept = np.array([0, 1, 1, 1, 0, 0, 0], dtype=np.uint8)
    state.follow([(3, [2, 4, 5], 2), (8, [2], 1)], {6: 1}, kept)
    what, owner = blockplot.states_of(state)
    names = [blockplot.STATES[code] for code in what]
    assert names == ["free", "cached", "shared", "cached", "owned", "reserved", "transfer"]
    assert owner[4] == owner[5] == 3
    rgb = blockplot.colours(state, {3: 0, 8: 1})
    assert len(np.unique(rgb, axis=0)) == 6


def test_the_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    """No address, no script or style from another file."""
    run, history = results.read_results(folder / "sim"), history_of(folder / "sim")
    page = blockplot.animation(run, history, blockplot.Moments.of(run, history), 300)
    assert not re.search(r"https?:|<link|\bsrc=|@import|url\(|fetch\(|import\(", page)
    assert "@DATA@" not in page


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


@pytest.mark.parametrize("frames", [50, 5000])
def test_the_page_expands_to_the_recorded_states(folder: Path, tmp_path: Path, frames: int) -> None:
    """The page's own script, run by node, has the tables and states of the record in every frame, also backwards."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node on this machine to run the page's script")
    run, history = results.read_results(folder / "sim"), history_of(folder / "sim")
    page = blockplot.animation(run, history, blockplot.Moments.of(run, history), frames)
    data = page_data(page)
    assert len(data["step"]) <= frames
    model = re.search(r'<script id="model">(.*?)</script>', page, re.DOTALL)
    assert model is not None
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / "check.js").write_text(
        model.group(1)
        + """
const data = JSON.parse(require("fs").readFileSync(process.argv[2], "utf8"));
const map = new BlockMap(data);
const seen = [];
const order = [...data.step.keys()];
for (const frame of [...order, ...order.slice().reverse()]) {
  map.goTo(frame);
  const blocks = [...Array(map.numBlocks).keys()];
  const tables = [...map.tables].map(([request, table]) => [request, [...table]]).sort((a, b) => a[0] - b[0]);
  seen.push([tables, blocks.map(b => map.state(b)), blocks.map(b => map.references(b))]);
}
console.log(JSON.stringify(seen));
"""
    )
    done = subprocess.run(
        [node, str(tmp_path / "check.js"), str(tmp_path / "data.json")], capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    count = len(data["step"])
    assert seen[:count] == seen[count:][::-1]
    for found, state in zip(seen, history.states(data["step"]), strict=False):
        assert found[0] == [[request, table] for request, table in sorted(state.tables.items())]
        what, _ = blockplot.states_of(state)
        assert found[1] == [blockplot.STATES[code] for code in what]
        assert found[2] == [state.refs(block) for block in range(state.num_blocks)]


def test_a_record_that_reached_its_limit_says_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run notes where its record ends, and the pictures show no more than that."""
    common = ["simulate", "--trace", str(folder / "w.yaml"), "--hardware", "h100", "--num-gpu-blocks-override", "90"]
    limit = ["--record-blocks", "--record-blocks-limit", "200"]
    assert main([*common, *limit, "--out", str(tmp_path / "sim")]) == 0
    assert "--record-blocks-limit" in capsys.readouterr().err
    history = history_of(tmp_path / "sim")
    assert history.truncated
    assert len(history.changes["step"]) <= 200
    moments = blockplot.Moments.of(results.read_results(tmp_path / "sim"), history)
    assert moments.steps[-1] == history.last_step
    assert main(["plot", "memory", str(tmp_path / "sim"), "--panels", "1"]) == 0


def test_a_pool_too_large_to_draw_is_refused(folder: Path) -> None:
    """The sentence says how many blocks can be shown."""
    run, history = results.read_results(folder / "sim"), history_of(folder / "sim")
    large = BlockHistory(1 << 20, SIZE, history.last_step, False, history.changes)
    with pytest.raises(Exception, match="262,144 at most"):
        blockplot.Moments.of(run, large)


def test_a_run_without_steps_has_pictures_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was served: the picture over time says so, and there is no block map."""
    path = write_toy(tmp_path / "toy", "simulated", num_requests=1)
    tables = results.read_results(path).tables
    empty = {name: column[:0] for name, column in tables.steps.items()}
    results.write_table(path / "steps.parquet", empty)
    options = SchedulerConfig(num_blocks=8, max_model_len=16)
    write_blocks(path, BlockRecorder(Scheduler(options)), options)
    assert main(["plot", "memory", str(path)]) == 0
    assert "no step was recorded" in capsys.readouterr().err


def test_a_damaged_record_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of that name that is not one of ours is named."""
    path = write_toy(tmp_path / "toy", "simulated")
    results.write_table(path / "blocks.parquet", {"step": np.arange(3)})
    assert "blocks.parquet is damaged" in refused(["plot", "memory", str(path)], capsys)
