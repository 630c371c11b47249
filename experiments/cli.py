"""The command line: `kvtwin COMMAND ...`.

Only the command that runs is imported, so that help is fast and a command without tensors loads no torch.
Exit codes: 0 it ran, 2 the input cannot be (one sentence on standard error), 130 interrupted (what there is was
written), 1 and a traceback: a fault of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from experiments.config import SECTIONS, Option, nearest, options, resolve
from experiments.errors import UsageError, one_sentence

__all__ = ["COMMANDS", "Command", "main", "taken_by"]


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of one command that is not an option of the configuration."""

    names: tuple[str, ...]
    help: str
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Command:
    """A command: which function runs it, and what it takes."""

    help: str
    target: str
    """`module:function`; called with (config, args, terminal), returns the summary that --json prints."""
    sections: tuple[str, ...] = ()
    """Sections of options it takes whole."""
    options: tuple[str, ...] = ()
    """Single options beside those."""
    arguments: tuple[Argument, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()
    """Options whose default differs from the configuration's."""
    required: tuple[str, ...] = ()
    details: str = ""


def _argument(*names: str, help: str, **settings: Any) -> Argument:
    return Argument(names, help, settings)


_ENGINE = ("model", "memory", "scheduler")
_SEQUENCES = ("n", "beam_width", "length_penalty", "early_stopping")

COMMANDS: dict[str, Command] = {
    "demo": Command(
        "text from the engine, then three real runs beside their simulation, and a page about it",
        "experiments.demo:execute",
        options=("model", "device", "threads", "seed", "out"),
        arguments=(_argument("--fresh", help="profile again even if a finished profile fits", action="store_true"),),
        defaults=(("out", "results/demo"),),
    ),
    "generate": Command(
        "text for prompts, from the engine",
        "experiments.generate:execute",
        sections=("model", "memory", "scheduler", "sampling"),
        options=("seed", "calibration"),
        arguments=(
            _argument(
                "prompts", help="the prompts; - reads standard input, one prompt a line", nargs="+", metavar="PROMPT"
            ),
        ),
    ),
    "profile": Command(
        "time batches of many shapes through the engine",
        "experiments.profile:execute",
        sections=("model", "memory", "profile"),
        options=("max_num_seqs", "max_num_batched_tokens", "max_model_len", "seed", "out"),
        defaults=(("out", "profile.parquet"),),
    ),
    "calibrate": Command(
        "fit the step time to a profile and say how far to trust it",
        "experiments.calibrate:execute",
        options=("seed", "out"),
        arguments=(
            _argument(
                "profile", help="what `kvtwin profile` wrote, or a CSV of steps, batches and times", metavar="PROFILE"
            ),
        ),
        defaults=(("out", "calibration.json"),),
    ),
    "plan": Command(
        "what a vLLM engine's memory goes to, how many KV blocks are left, and whether it starts",
        "experiments.plan:execute",
        options=(
            *(
                "vllm_version",
                "quantization",
                "model",
                "hardware",
                "dtype",
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "block_size",
            ),
            *("num_gpu_blocks_override", "gpu_memory_utilization", "kv_cache_dtype", "swap_space"),
            *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        ),
        arguments=(
            _argument(
                "line",
                help='a command line to read: "vllm serve MODEL ...", quoted or behind --',
                nargs="*",
                metavar="SERVE",
            ),
            _argument("--enforce-eager", help="no CUDA graphs", action="store_true", default=None),
            _argument(
                "--enable-chunked-prefill",
                help="cut long prompts (default: as the release does; --no-enable-chunked-prefill: never)",
                action=argparse.BooleanOptionalAction,
                default=None,
            ),
            _argument("--data-parallel-size", help="replicas of the attention", type=int, default=None, metavar="N"),
            _argument(
                "--enable-expert-parallel",
                help="experts are split whole over tensor- times data-parallel ranks",
                action="store_true",
                default=None,
            ),
            _argument(
                "--activations",
                help="the layers' peak: vllm (its declared liveness) or traced (our engine's own code; needs torch)",
                choices=("vllm", "traced"),
                default="vllm",
            ),
            _argument("--lengths", help="tokens of requests whose number to give, comma-separated", metavar="N,N"),
        ),
        defaults=(
            *(
                (name, None)
                for name in ("gpu_memory_utilization", "swap_space", "max_num_seqs", "max_num_batched_tokens")
            ),
            ("model", ""),
        ),
        details="Options that are not given have the defaults of --vllm-version on that hardware.",
    ),
    "simulate": Command(
        "serve a trace in the simulator",
        "experiments.simulate:execute",
        sections=(*_ENGINE, "budget", "workload", "time", "slo"),
        options=("record_blocks", "record_blocks_limit", "out", *_SEQUENCES),
        required=("trace", "out"),
    ),
    "cluster": Command(
        "serve a trace on several replicas behind a gateway and a router, of which some may die, in the simulator",
        "experiments.cluster:execute",
        sections=(*_ENGINE, "budget", "workload", "time", "cluster", "slo"),
        options=("out",),
        required=("trace", "out"),
        details="docs/cluster.md has the details.",
    ),
    "sweep": Command(
        "simulate many configurations, on all cores or a Ray cluster, into one table and pictures",
        "experiments.sweep:execute",
        options=("out",),
        arguments=(
            _argument("file", help="what to vary (YAML; docs/sweeps.md)", metavar="SWEEP.yaml"),
            _argument("--jobs", help="processes (default: as many as there are cores)", type=int, metavar="N"),
            _argument("--backend", help="where they run (default local)", choices=("local", "ray"), default="local"),
            _argument("--address", help="of the Ray cluster; default: one started here", metavar="ADDRESS"),
            _argument("--fresh", help="compute every configuration again", action="store_true"),
        ),
        required=("out",),
        details="A rerun with the same --out computes only what is missing.",
    ),
    "capacity": Command(
        "the highest rate of requests at which objectives are met, in the simulator",
        "experiments.capacitysearch:execute",
        sections=(*_ENGINE, "budget", "workload", "time", "slo"),
        options=("out",),
        arguments=(
            _argument(
                "--objective",
                help="what must hold, such as 'ttft_s.p99<=1' or 'good_share>=0.99' (repeatable; default: good_share>="
                "0.99 with --slo-ttft-s and the like)",
                action="append",
                default=[],
                metavar="METRIC<=X",
            ),
            _argument("--tolerance", help="relative width to which a rate is searched", type=float, default=0.01),
            _argument(
                "--replications",
                help="traces of different seeds, where the trace is generated (default 3)",
                type=int,
                metavar="N",
            ),
            _argument("--jobs", help="processes (default: as many as there are cores)", type=int, metavar="N"),
        ),
        required=("trace", "out"),
        details="The trace's arrival times are stretched and shrunk; docs/sweeps.md has the details.",
    ),
    "run": Command(
        "serve a trace with the real engine, in real time",
        "experiments.run:execute",
        sections=(*_ENGINE, "workload", "slo"),
        options=("record_blocks", "record_blocks_limit", "out", "calibration", *_SEQUENCES),
        required=("trace", "out"),
    ),
    "compare": Command(
        "lay a real run and a simulated one side by side",
        "experiments.compare:execute",
        options=("out",),
        arguments=(
            _argument("real", help="results of `kvtwin run`", metavar="REAL_DIR"),
            _argument("simulated", help="results of `kvtwin simulate`", metavar="SIM_DIR"),
            _argument(
                "--again",
                help="a further real run of the same (repeatable); three in all make a verdict with a range",
                action="append",
                nargs="+",
                default=[],
                metavar="REAL_DIR",
            ),
            _argument(
                "--decisions",
                help="replay what the engine recorded and count the steps that differ",
                action="store_true",
            ),
        ),
        required=("out",),
    ),
    "validate": Command(
        "simulate a real serving run from its log, and say how far off that is",
        "experiments.validate:execute",
        options=(
            "hardware",
            "calibration",
            "bands",
            "num_gpu_blocks_override",
            "out",
        ),
        arguments=(
            _argument(
                "run", help="the folder of a run, or what `vllm bench serve --save-detailed` saved", metavar="RUN_DIR"
            ),
            _argument("--predict-blocks", help="KV blocks by the memory model, not as recorded", action="store_true"),
            _argument("--model", help="a preset or config.json, where engine.json names none", metavar="NAME"),
            _argument(
                "--step-time",
                help="auto: the run's kernel tables; six-terms: the formula, fitted to a sweep of those tables",
                choices=("auto", "six-terms"),
                default="auto",
            ),
        ),
    ),
    "ab": Command(
        "two policies, presets or options on one trace, in the simulator and on the engine",
        "experiments.ab:execute",
        sections=(*_ENGINE, "workload", "time"),
        options=("out",),
        arguments=(
            _argument(
                "--a",
                help="side A: default, a preset, a policy's name, path/file.py:Class, or key=value,key=value",
                metavar="SIDE",
            ),
            _argument("--b", help="side B, likewise", metavar="SIDE"),
            _argument("--pairs", help="a YAML file with several pairs, instead of --a and --b", metavar="FILE"),
            _argument("--where", help="sim, engine or both (default both)", default="sim,engine", metavar="PLACES"),
            _argument(
                "--repeat", help="real runs of each side, interleaved (default 3, or the file's)", type=int, metavar="N"
            ),
            _argument("--metric", help="what the pair is judged by (default e2e_s.mean)", metavar="NAME"),
        ),
        required=("out",),
    ),
    "plot memory": Command(
        "where every byte of KV memory is: over time, and with --record-blocks block by block",
        "experiments.plotmemory:execute",
        options=("out",),
        arguments=(
            _argument("results", help="results of `kvtwin simulate` or `kvtwin run`", metavar="DIR"),
            _argument("--at", help="moments of the block map, comma-separated, such as 1.5s,800ms", metavar="TIMES"),
            _argument("--panels", help="as many evenly spaced moments instead (default 4)", metavar="N"),
            _argument("--frames", help="most moments of the animation (default 1500)", metavar="N"),
        ),
        details="Writes memory.png and, where blocks were recorded, blocks.png and blocks.html to --out "
        "(default: the folder itself).",
    ),
    "decisions": Command(
        "replay recorded decisions of a real scheduler through the core",
        "experiments.decide:execute",
        options=("preset",),
        arguments=(_argument("file", help="a file of recorded decisions (JSON, also .xz)", metavar="FILE"),),
        defaults=(("preset", "vllm-0.19"),),
    ),
    "experiment": Command(
        "answer one question by its runs, and settle its rows of the claims ledger; without a name: list them",
        "experiments.experimentcmd:execute",
        options=("seed", "num_requests", "out"),
        arguments=(
            _argument("name", help="which experiment", nargs="?", metavar="NAME"),
            _argument("--shared", help="the folder of shared data; default: KVTWIN_SHARED or ../shared", metavar="DIR"),
            _argument("--claims", help="where rows of the ledger go", metavar="DIR", default="results/claims"),
            _argument("--fresh", help="compute every part again", action="store_true"),
        ),
    ),
    "claims": Command(
        "the claims ledger: what is claimed, what our runs say, as a table and as docs/claims.md",
        "experiments.claims:execute",
        options=("out",),
        arguments=(
            _argument("--claims", help="where rows of the ledger are", metavar="DIR", default="results/claims"),
            _argument(
                "--check", help="only say whether the page is up to date (exit code 2 if not)", action="store_true"
            ),
        ),
        defaults=(("out", "docs/claims.md"),),
    ),
    "trace stats": Command(
        "lengths, rate, burstiness and prefix reuse of a trace",
        "experiments.tracecmd:stats",
        options=("format", "trace_option", "num_requests", "dequantize", "seed", "block_size", "out"),
        arguments=(
            _argument("file", help="a trace or a generator's YAML", metavar="FILE"),
            _argument("--lru-tokens", help="cache sizes for LRU hit shares, comma-separated", metavar="N,N"),
        ),
    ),
    "trace generate": Command(
        "make a trace from a generator's YAML",
        "experiments.tracecmd:generate",
        options=("num_requests", "seed", "out"),
        arguments=(_argument("file", help="the generator's YAML", metavar="FILE"),),
        required=("out",),
    ),
    "trace convert": Command(
        "read a trace in any known format and write it in ours, or in another tool's",
        "experiments.tracecmd:convert",
        options=("format", "trace_option", "num_requests", "dequantize", "seed", "out"),
        arguments=(
            _argument("file", help="a trace", metavar="FILE"),
            _argument(
                "--to",
                help="the format to write (kvtwin trace --help); default: ours, as --out ends (.parquet, .jsonl)",
                metavar="NAME",
            ),
        ),
        required=("out",),
    ),
}

_GROUPS = {"plot": "pictures of results", "trace": "look at, make and convert traces"}
"""Commands that only lead to further ones."""


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(_reworded(message, self.prog))


def _reworded(message: str, prog: str) -> str:
    if message.startswith("the following arguments are required: "):
        return f"`{prog}` needs {message.removeprefix('the following arguments are required: ')}."
    if message.startswith("argument "):
        name, _, what = message.removeprefix("argument ").partition(": ")
        return f"{name}: {what}."
    return message[:1].upper() + message[1:] + "."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        sentence = one_sentence(error)
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        return 2


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"kvtwin {version('kvtwin')}")
        return 0
    name, rest = words[0], words[1:]
    if name in _GROUPS:
        inner = [key.split()[1] for key in COMMANDS if key.startswith(name + " ")]
        if not rest or rest[0] in ("-h", "--help"):
            print(_overview(name))
            return 0
        if rest[0] not in inner:
            raise UsageError(
                f"`kvtwin {name}` knows {', '.join(inner)}, but not {rest[0]}{nearest(rest[0], inner) or '.'}"
            )
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        valid = sorted({key.split()[0] for key in COMMANDS})
        close = nearest(name, valid) or f"; there are {', '.join(valid)}."
        raise UsageError(f"There is no command {name}{close}")
    return _run(name, COMMANDS[name], rest)


def _overview(group: str = "") -> str:
    """The list of commands."""
    rows = [(key, command.help) for key, command in COMMANDS.items() if key.startswith(group)]
    width = max(len(key) for key, _ in rows) + 2
    lines = [f"usage: kvtwin {group + ' ' if group else ''}COMMAND ... (kvtwin COMMAND --help says more)", ""]
    lines += [f"  {key.ljust(width)}{text}" for key, text in rows]
    if group == "trace":
        lines += _formats()
    return "\n".join(lines)


def _formats() -> list[str]:
    """What trace files can be read and written."""
    from traces import FORMATS, WRITERS

    width = max(len(name) for name in (*FORMATS, *WRITERS)) + 2
    lines = ["", "read (the format is told from the content; --format NAME overrides; .gz and .xz are unpacked):"]
    for entry in FORMATS.values():
        lines.append(f"  {entry.name.ljust(width)}{entry.about}")
        if entry.options:
            told = ", ".join(f"{key} ({_shown(value)})" for key, value in entry.options.items())
            lines.append(f"  {'':{width}}--trace-option: {told}")
    lines += ["", "written (trace convert --to NAME), besides kvtwin-parquet and kvtwin-jsonl:"]
    lines += [f"  {entry.name.ljust(width)}{entry.about}" for entry in WRITERS.values()]
    return lines


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _parser(name: str, command: Command) -> _Parser:
    parser = _Parser(
        prog=f"kvtwin {name}",
        description=" ".join([command.help[:1].upper() + command.help[1:] + ".", command.details]).rstrip(),
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=116),
    )
    for argument in command.arguments:
        parser.add_argument(*argument.names, help=argument.help, **argument.settings)
    common = parser.add_argument_group("common")
    common.add_argument("--config", metavar="FILE", help="YAML with `option: value` lines")
    common.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="sets one of the options below; repeatable"
    )
    common.add_argument("--json", action="store_true", help="print the summary to standard output, and nothing else")
    defaults = dict(command.defaults)
    groups: dict[str, Any] = {}
    for section in sorted({option.section for option in _taken(command)}, key=list(SECTIONS).index):
        groups[section] = parser.add_argument_group(SECTIONS[section])
    for option in _taken(command):
        _add_flag(
            groups[option.section], option, defaults.get(option.name, option.default), option.name in command.required
        )
    return parser


def _taken(command: Command) -> list[Option]:
    return [
        option for option in options().values() if option.section in command.sections or option.name in command.options
    ]


def taken_by(command: Command) -> set[str]:
    """Names of the options that a command takes."""
    return {option.name for option in _taken(command)}


def _add_flag(group: Any, option: Option, default: Any, required: bool) -> None:
    text = option.help
    if option.choices:
        text += f"; one of {', '.join(option.choices)}"
    notes = [option.limits] if option.limits and len(option.limits) < 36 else []
    negative = "--no-" + option.flag.removeprefix("--")
    if required:
        notes.append("required")
    elif option.kind is bool:
        notes.append(f"default yes; {negative} turns it off" if default else "default no")
    elif default not in (None, (), ""):
        notes.append(f"default {default}")
    if notes:
        text += f" ({', '.join(notes)})"
    text = text.replace("%", "%%")
    dest = f"option_{option.name}"
    if option.kind is bool:
        group.add_argument(option.flag, dest=dest, action="store_true", default=argparse.SUPPRESS, help=text)
        group.add_argument(negative, dest=dest, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    else:
        metavar = option.metavar or (option.unit.upper() if option.unit else _METAVARS[option.kind])
        action = "append" if option.repeated else "store"
        group.add_argument(
            option.flag, dest=dest, action=action, default=argparse.SUPPRESS, metavar=metavar, help=text, type=str
        )


_METAVARS = {int: "N", float: "X", str: "NAME"}


def _run(name: str, command: Command, words: list[str]) -> int:
    parser = _parser(name, command)
    if "-h" in words or "--help" in words:
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise UsageError(_unknown(name, command, unknown[0]))
    flags = {key.removeprefix("option_"): value for key, value in vars(args).items() if key.startswith("option_")}
    taken = taken_by(command)
    config = resolve(flags, args.set, args.config, dict(command.defaults), f"kvtwin {name}", taken)
    for key in command.required:
        if getattr(config, key) is None:
            raise UsageError(f"`kvtwin {name}` needs {options()[key].flag}.")
    if config.out == "":
        raise UsageError("--out is empty; name a folder or file.")

    from experiments.terminal import Terminal

    module, _, function = command.target.partition(":")
    try:
        execute = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "tokenizers", "safetensors"):
            raise UsageError(f"`kvtwin {name}` needs {error.name}: pip install 'kvtwin[engine]'.") from error
        raise
    terminal = Terminal(quiet_stdout=args.json)
    # With --json, standard output is for the summary alone, whatever a user's policy prints.
    stdout = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
    try:
        with stdout:
            summary = execute(config, args, terminal)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "tokenizers", "safetensors"):
            raise UsageError(f"`kvtwin {name}` needs {error.name}: pip install 'kvtwin[engine]'.") from error
        raise
    if args.json:
        print(json.dumps(summary, indent=2, ensure_ascii=False))
    return 130 if terminal.interrupted else 0


def _unknown(name: str, command: Command, word: str) -> str:
    """The complaint about an option or argument that the command does not take."""
    if not word.startswith("-"):
        return f"`kvtwin {name}` does not know what to do with {word}."
    flag = word.partition("=")[0]
    valid = [option.flag for option in _taken(command)] + ["--config", "--set", "--json"]
    valid += ["--no-" + option.flag[2:] for option in _taken(command) if option.kind is bool]
    valid += [flag for argument in command.arguments for flag in argument.names if flag.startswith("-")]
    if flag in {option.flag for option in options().values()}:
        return f"`kvtwin {name}` does not take {flag}; see kvtwin {name} --help."
    close = nearest(flag, valid)
    return f"`kvtwin {name}` has no option {flag}{close or f'; see kvtwin {name} --help.'}"


if __name__ == "__main__":
    sys.exit(main())
