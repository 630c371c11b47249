"""A device that is not there, the budget of one that is, and steps that do not fit its memory."""

from __future__ import annotations

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from engine.exec.device import check_device, measure_budget  # noqa: E402
from engine.exec.engine import Engine, EngineArgs, EngineRequest, ListSource  # noqa: E402
from engine.exec.runner import ModelRunner, Row  # noqa: E402
from engine.exec.sampler import SampleRow, SamplingParams, _draw  # noqa: E402
from engine.exec.splitting import run_split  # noqa: E402
from engine.exec.tiny import TINY  # noqa: E402
from engine.exec.weights import dummy_weights  # noqa: E402
from engine.models.errors import OptionError, OutOfMemoryError  # noqa: E402
from engine.models.llama import Decoder  # noqa: E402
from experiments.cli import main  # noqa: E402
from kernels.cache import PagedKVCache  # noqa: E402

GIB = 1 << 30


class FakeMemory:
    """80 GiB of which other programs hold `taken`; takes what it is told to, and 1/2 GiB of context with the first."""

    def __init__(self, taken=0):
        self.taken, self.tensors, self.highest, self.graphs = taken, 0, 0, 0

    def info(self):
        context = GIB // 2 if self.tensors else 0
        return 80 * GIB - self.taken - self.tensors - self.graphs - context, 80 * GIB

    def allocated(self):
        return self.tensors

    def peak(self):
        return self.highest

    def reset_peak(self):
        self.highest = self.tensors

    def release_unused(self):
        pass

    def load(self, size):
        self.tensors += size

    def step(self, size):
        self.highest = max(self.highest, self.tensors + size)

    def capture(self, size):
        self.graphs += size


def budget(memory, utilization=0.9, weights=16 * GIB):
    return measure_budget(
        memory,
        utilization,
        2 << 20,
        lambda: memory.load(weights),
        lambda: memory.step(2 * GIB),
        lambda: memory.capture(GIB),
    )


def test_the_budget_is_the_asked_share_less_weights_peak_context_and_graphs():
    """Of 0.9 x 80 GiB, 16 of weights, 2 of a step, 1/2 of context and 1 of graphs leave 52.5 GiB: 26,880 blocks."""
    found = budget(FakeMemory(taken=3 * GIB))
    assert (found.weights, found.peak, found.other, found.graphs) == (16 * GIB, 2 * GIB, GIB // 2, GIB)
    assert found.num_blocks == 26880
    lines = found.lines()
    assert any("weights" in line and "16.000 GiB" in line for line in lines)
    assert "26,880 of 2,097,152 bytes" in lines[-1]


def test_utilization_too_low_for_one_block_is_one_sentence_with_the_least_that_works():
    """Below one block the error says what is left and the least share; with that share there is a block."""
    with pytest.raises(OptionError, match=r"gpu_memory_utilization 0\.2 leaves -3\.500 GiB .* at least 0\.244"):
        budget(FakeMemory(), 0.2)
    assert budget(FakeMemory(), 0.244).num_blocks >= 1


def test_memory_that_others_hold_is_not_promised():
    """Where less is free than is asked for, the error says how much, and what to give."""
    with pytest.raises(OptionError, match=r"asks for 72\.00 of 80\.00 GiB, and 50\.00 are free; give at most 0\.62"):
        budget(FakeMemory(taken=30 * GIB))


def test_a_device_that_is_not_there_is_one_sentence(capsys):
    """--device cuda without a CUDA GPU ends with exit code 2 and one line on standard error."""
    with pytest.raises(OptionError, match="no CUDA GPU"):
        check_device("cuda", lambda: False)
    assert check_device("cuda", lambda: True).type == "cuda"
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU here")
    assert main(["generate", "--model", "tiny", "--device", "cuda", "hello"]) == 2
    error = capsys.readouterr().err.strip()
    assert "no CUDA GPU" in error
    assert len(error.splitlines()) == 1


def test_every_tensor_of_a_step_is_on_the_device():
    """A forward pass and sampling with tensors that only know their device mix no devices (such tensors refuse to)."""
    decoder = Decoder(TINY, dummy_weights(TINY), torch.bfloat16, device="meta")
    table = np.arange(8)
    rows = [Row(0, 9, 1, True, table), Row(1, 0, 5, True, table), Row(2, 4, 3, True, table)]

    def run(device):
        cache = PagedKVCache(TINY.num_layers, 8, 4, TINY.num_kv_heads, TINY.head_dim, torch.bfloat16, device)
        return ModelRunner(decoder, cache).run(rows, np.zeros(9, dtype=np.int64))

    logits = run("meta")
    assert logits.device.type == "meta"
    assert tuple(logits.shape) == (3, TINY.vocab_size)
    with pytest.raises(RuntimeError, match="device"):
        run("cpu")


def test_a_pool_that_the_device_has_no_room_for_is_one_sentence(monkeypatch):
    """Blocks that were named and do not fit end with their size and what to do."""

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("engine.exec.engine.PagedKVCache", full)
    with pytest.raises(OptionError, match=r"64 KV blocks take .* GiB, more than the device has left"):
        Engine(EngineArgs(model="tiny", num_gpu_blocks_override=64))


class Tight:
    """A runner that has memory for steps of `limit` tokens, and every so often for less."""

    def __init__(self, runner, limit, every=0):
        self._runner, self.limit, self.every, self.calls, self.refused = runner, limit, every, 0, 0

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def run(self, rows, tokens):
        self.calls += 1
        small = self.every and self.calls % self.every == 0
        if len(tokens) > (1 if small else self.limit):
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._runner.run(rows, tokens)


def serve(limit=None, every=0, two=False, caching=True, refuse=None):
    """Twelve requests, half of them with one prefix, in a pool that preempts; their outputs, and the runner."""
    engine = Engine(
        EngineArgs(
            model="tiny",
            dtype="float64",
            num_gpu_blocks_override=40,
            block_size=4,
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            async_scheduling=two,
            enable_prefix_caching=caching,
            threads=1,
        )
    )
    if limit is not None:
        engine.runner = Tight(engine.runner, limit, every)
    if refuse is not None:
        engine.runner = refuse(engine.runner)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, 13).tolist()
    prompts = [(shared if i % 2 else []) + rng.integers(0, 256, 9 + i).tolist() for i in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, detokenize=False)
    source = ListSource(EngineRequest(i, prompt, params) for i, prompt in enumerate(prompts))
    served = engine.serve(source, check=True)
    ends = {row: [(s.output_tokens, f.reason) for s, f in found] for row, found in source.finishes.items()}
    return ends, engine.runner, served


@functools.cache
def expected():
    return serve()[0]


@pytest.mark.parametrize("two", [False, True], ids=["one step in flight", "two steps in flight"])
@pytest.mark.parametrize(("limit", "every"), [(24, 0), (1, 0), (40, 3)])
def test_steps_that_do_not_fit_are_run_in_parts_and_outputs_stay(two, limit, every):
    """Whatever memory a step finds, down to one token, requests end with the same tokens and no block is lost."""
    ends, runner, served = serve(limit, every, two)
    assert runner.refused > 0
    assert ends == expected()
    served.scheduler.check()
    assert not served.scheduler.has_unfinished


class Refusing:
    """A runner that never has memory for anything that holds a token of one position or beyond."""

    def __init__(self, runner, position):
        self._runner, self.position = runner, position

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def run(self, rows, tokens):
        if any(row.start + row.num > self.position for row in rows):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._runner.run(rows, tokens)


@pytest.mark.parametrize("two", [False, True], ids=["one step in flight", "two steps in flight"])
def test_a_request_that_finds_no_memory_fails_alone(two):
    """Requests that reach a length for which there is no memory end with what they had; the others are untouched."""
    ends, _, served = serve(two=two, caching=False, refuse=lambda runner: Refusing(runner, 26))
    failed = [row for row, ((_, reason),) in ends.items() if reason == "no-memory"]
    assert failed
    assert len(failed) < len(ends)
    for row, ((tokens, _),) in ends.items():
        whole = expected()[row][0][0]
        assert tokens == (whole[: len(tokens)] if row in failed else whole)
    served.scheduler.check()
    assert not served.scheduler.has_unfinished


def test_a_block_that_others_may_read_is_never_left_unwritten():
    """With prefix caching a token that fills a block and finds no memory ends the run, with one sentence."""
    with pytest.raises(OutOfMemoryError, match="lower gpu_memory_utilization"):
        serve(refuse=lambda runner: Refusing(runner, 27))


def test_rows_that_read_what_others_write_come_after_them():
    """Parts run in an order in which every block is written before another row reads it, chunks and decodes alike."""
    seen = []

    def run(rows, tokens):
        if len(rows) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        seen.append(rows[0].request)
        return torch.zeros(sum(row.samples for row in rows), 3)

    rows = [
        Row(7, 8, 1, True, np.array([4, 5, 9])),  # reads 4 and 5
        Row(8, 4, 4, True, np.array([4, 5])),  # writes 5, reads 4
        Row(9, 0, 4, False, np.array([4])),  # writes 4
    ]
    done = run_split(run, list, rows, np.zeros(9, dtype=np.int64), 4)
    assert seen == [2, 1, 0]
    assert sorted(done.logits) == [0, 1]
    assert done.parts == 3


def test_sampling_keeps_to_the_device_of_its_logits():
    """Temperature, top-k and min-p mix no devices, up to where the drawn tokens are read."""
    params = SamplingParams(temperature=0.7, top_k=5, min_p=0.1)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        _draw(torch.zeros(2, 16, device="meta"), [SampleRow(params, 0, 0, ())] * 2)
