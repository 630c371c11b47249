"""`kvtwin generate`: text for prompts."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from engine.exec.llm import LLM, RequestOutput
from engine.exec.sampler import SamplingParams
from experiments.config import Config
from experiments.engine_options import engine_args
from experiments.errors import UsageError

if TYPE_CHECKING:
    from experiments.terminal import Terminal

__all__ = ["EARLY", "answers", "execute"]

EARLY: dict[str, bool | str] = {"false": False, "true": True, "never": "never"}
"""What --early-stopping means."""


def execute(config: Config, args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    """Generates, prints the texts; returns `{model, outputs: [...]}`."""
    prompts: list[str] = []
    for prompt in args.prompts:
        prompts += [line.rstrip("\n") for line in sys.stdin if line.strip()] if prompt == "-" else [prompt]
    if not prompts:
        raise UsageError("There is no prompt: standard input was empty.")
    options = vars_of(engine_args(config))
    with terminal.loading(str(config.model)) as on_layer:
        llm = LLM(**options, on_layer=on_layer)
    try:
        outputs = answers(llm, prompts, sampling(config), config.chat)
        name = llm.engine.model.name
    finally:
        llm.close()
    if all(not output.outputs for output in outputs):
        raise UsageError(f"No prompt can be answered; the first was rejected: {outputs[0].error}.")
    for prompt, output in zip(prompts, outputs, strict=True):
        terminal.text(prompt, "dim")
        if not output.outputs:
            terminal.text(f"Rejected: {output.error}.")
        for one in output.outputs:
            score = "" if one.score is None else f"[{one.score:.3f}] "
            number = f"{one.index + 1}. " if len(output.outputs) > 1 else ""
            terminal.text(f"{number}{score}{one.text.strip()}")
        terminal.text("")
    return {"model": name, "outputs": [_entry(*pair) for pair in zip(prompts, outputs, strict=True)]}


def vars_of(args: Any) -> dict[str, Any]:
    """The fields of the engine's options by name."""
    return {name: getattr(args, name) for name in args.__dataclass_fields__}


def sampling(config: Config) -> SamplingParams:
    """How to sample, from the options."""
    return SamplingParams(
        n=config.n,
        best_of=config.best_of,
        beam_width=config.beam_width,
        length_penalty=config.length_penalty,
        early_stopping=EARLY[config.early_stopping],
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        min_tokens=config.min_tokens,
        stop=list(config.stop) or None,
        ignore_eos=config.ignore_eos,
        logprobs=config.logprobs,
    )


def answers(llm: LLM, prompts: list[str], params: SamplingParams, chat: bool) -> list[RequestOutput]:
    """One output a prompt, through the model's chat template if `chat`."""
    if chat and llm.engine.tokenizer is not None:
        return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    return llm.generate(prompts, params)


def _entry(prompt: str, output: RequestOutput) -> dict[str, Any]:
    if not output.outputs:
        return {"prompt": prompt, "error": output.error}
    entries = []
    for one in output.outputs:
        entry: dict[str, Any] = {
            "text": one.text,
            "token_ids": one.token_ids,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if one.score is not None:
            entry["score"] = one.score
        if one.logprobs is not None:
            entry["logprobs"] = [
                {str(token): value.logprob for token, value in table.items()} for table in one.logprobs
            ]
        entries.append(entry)
    if len(entries) == 1:
        return {"prompt": prompt, **entries[0]}
    return {"prompt": prompt, "outputs": entries}
