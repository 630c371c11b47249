"""Text for a batch of prompts: the engine as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.core.records import Recorder
from engine.exec.engine import Engine, EngineArgs, EngineRequest, ListSource
from engine.exec.executor import RequestState
from engine.exec.sampler import Logprob, SamplingParams
from engine.exec.tokenizer import ChatMessage
from engine.exec.weights import LoadedModel
from engine.models.errors import OptionError

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated text."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    """One table a token, where the request asked for them."""
    finish_reason: str | None
    """`stop`, `length` or `abort`; None where the request was rejected."""
    stop_reason: int | str | None
    """The stop string or stop token id that ended it; None for an end-of-sequence token or the length."""
    score: float | None = None
    """Of a beam search: summed log-probability over length ** length_penalty. With `best_of`: the mean a token."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt."""

    request_id: str
    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """`n` entries, of a beam search and of `best_of` the best first; none where the request was rejected."""
    error: str | None = None
    """Why the request was rejected."""


class LLM:
    """A model that answers prompts. Options are those of `EngineArgs`, by name."""

    def __init__(
        self,
        model: Any = "smollm2",
        loaded: LoadedModel | None = None,
        on_layer: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> None:
        try:
            args = EngineArgs(model=model, **options)
        except TypeError as error:
            raise OptionError(f"the engine does not know an option: {error}") from None
        self.engine = Engine(args, loaded, on_layer)
        self.recorder: Recorder | None = None
        """Of the last call of `generate`."""

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        check: bool = False,
    ) -> list[RequestOutput]:
        """Outputs in the order of `prompts`: a text, a list of token ids, or a list of either.

        A request that can never fit is rejected alone, with the reason in its `error`.
        """
        listed = _listed(prompts)
        params = self._params(sampling_params, len(listed))
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        ids = [
            self._encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt] for prompt in listed
        ]
        source = ListSource(
            EngineRequest(row, prompt, param) for row, (prompt, param) in enumerate(zip(ids, params, strict=True))
        )
        self.recorder = self.engine.serve(source, check=check).recorder
        return [self._output(row, texts[row], ids[row], params[row], source) for row in range(len(ids))]

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several, through the model's chat template."""
        if self.engine.tokenizer is None:
            raise OptionError(f"the model {self.engine.model.name} has no tokenizer, so it cannot chat")
        conversations: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        return self.generate([self.engine.tokenizer.chat(turns) for turns in conversations], sampling_params)

    def close(self) -> None:
        self.engine.close()

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = SamplingParams()
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise OptionError(f"there are {count} prompts and {len(given)} sampling_params; give one, or one a prompt")
        return list(given)

    def _encode(self, text: str) -> list[int]:
        if self.engine.tokenizer is None:
            raise OptionError(f"the model {self.engine.model.name} has no tokenizer; give prompts as token ids")
        return self.engine.tokenizer.encode(text)

    def _output(
        self, row: int, text: str | None, prompt: list[int], param: SamplingParams, source: ListSource
    ) -> RequestOutput:
        if row in source.reasons:
            return RequestOutput(str(row), text, prompt, [], source.reasons[row])
        ended = source.finishes[row]
        outputs = [self._completion(param, state, finish.reason) for state, finish in ended]
        if param.best_of is not None:
            outputs.sort(key=lambda output: -(output.score or 0.0))
            outputs = [replace(output, index=index) for index, output in enumerate(outputs[: param.n])]
        return RequestOutput(str(row), text, prompt, outputs)

    def _completion(self, params: SamplingParams, state: RequestState, reason: str) -> CompletionOutput:
        text, score = state.text, None
        tokens = state.output_tokens
        if state.result is not None:
            score = state.result.score
            if params.detokenize and self.engine.tokenizer is not None:
                shown = tokens[:-1] if state.result.stopped and not params.include_stop_str_in_output else tokens
                text = self.engine.tokenizer.decode(shown)
        elif params.best_of is not None:
            pairs = zip(tokens, state.logprobs, strict=True)
            score = sum(table[token].logprob for token, table in pairs) / max(1, len(tokens))
        return CompletionOutput(
            state.index,
            text,
            tokens,
            state.logprobs if params.logprobs is not None else None,
            reason,
            state.stop_reason,
            score,
        )


def _listed(prompts: Any) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    return (
        [listed]
        if listed and not isinstance(listed[0], str | list | tuple) and not hasattr(listed[0], "__len__")
        else listed
    )
