"""The command line: what it refuses, how, and how fast it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from experiments import cli
from experiments.cli import COMMANDS, main


def refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """The one sentence with which a command line is refused."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    assert lines[0].endswith((".", "?"))
    return lines[0]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("simulte", "did you mean simulate"),
        ("nonsense", "There is no command nonsense; there are"),
        ("simulate --blok-size 16", "did you mean --block-size"),
        ("simulate --trace t --out o --enable-prefix-cachin", "--enable-prefix-caching"),
        ("simulate --trace t --out o --block-size 0", "--block-size must be at least 1"),
        ("simulate --trace t --out o --block-size", "--block-size"),
        ("simulate --trace t --out o --gpu-memory-utilization 1.01", "at most 1"),
        ("simulate --trace t --out o --swap-space -4", "at least 0"),
        ("simulate --out o", "needs --trace"),
        ("run --trace t", "needs --out"),
        ("run --trace t --out o --max-tokens 3", "does not take --max-tokens"),
        ("run --trace t --out o --preset vllm-9", "vllm-9"),
        ("run --trace t --out o --set bloc_size=2", "did you mean block_size"),
        ("run --trace t --out o --set max_tokens=3", "`kvtwin run` does not take max_tokens (--set)"),
        ("generate hello --set trace=t", "`kvtwin generate` does not take trace (--set)"),
        ("plot heap d", "`kvtwin plot` knows memory"),
        ("plot memory a", "manifest.json"),
        ("run --trace t --out o --config no/such.yaml", "no/such.yaml"),
        ("compare a b --out c", "manifest.json"),
        ("compare a", "SIM_DIR"),
        ("trace statistics f", "did you mean stats"),
        ("decisions no/such/file", "no/such/file"),
        ("calibrate no/such/file", "no/such/file"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line on standard error that names the thing, no traceback."""
    assert named in refused(capsys, words.split())


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The overview names all commands, and each command has help of its own."""
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in overview
        assert main([*name.split(), "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: kvtwin {name}")
        assert "--json" in text


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is nobody's input is not dressed up as one."""
    monkeypatch.setattr(cli, "_dispatch", lambda words: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


def test_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C is no traceback."""

    def interrupt(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_help_loads_nothing_heavy() -> None:
    """`kvtwin COMMAND --help` imports no numpy, matplotlib, pyarrow, rich or torch."""
    code = (
        "import sys; from experiments.cli import main; main(['simulate', '--help']); "
        "heavy = {'numpy', 'matplotlib', 'pyarrow', 'pandas', 'rich', 'torch', 'simpy'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
