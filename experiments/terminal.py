"""What the user sees while a command runs: tables and sentences on standard output, progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

__all__ = ["Terminal"]


class Terminal:
    """The two streams. With `quiet_stdout` (--json) everything goes to standard error."""

    def __init__(self, quiet_stdout: bool = False) -> None:
        from rich.console import Console

        self._errors = Console(file=sys.stderr, highlight=False)
        width = None if sys.stdout.isatty() else 120  # a file or a pipe has no width of its own
        self._out = self._errors if quiet_stdout else Console(file=sys.stdout, highlight=False, width=width)
        self.interrupted = False
        """Set by a command that was interrupted and wrote what it had."""

    def muted(self) -> Terminal:
        """The same streams without results and notes: progress and warnings only."""
        return _Muted()

    def silent(self) -> Terminal:
        """The same streams without anything but faults: for a command that runs inside of another."""
        return _Silent()

    def print(self, *parts: Any) -> None:
        """A result: text or anything that rich can draw."""
        self._out.print(*parts)

    def note(self, text: str) -> None:
        """Something to know about how the command runs."""
        self._errors.print(text, markup=False, style="dim")

    def warn(self, text: str) -> None:
        """Something that makes the result less than it seems."""
        self._errors.print(f"Note: {text}", markup=False, style="yellow")

    def text(self, text: str, style: str = "") -> None:
        """Somebody's words: no markup in them is followed, and what steers a terminal is replaced."""
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        self._out.print(text, markup=False, style=style, soft_wrap=not self._out.is_terminal)

    def status(self, text: str) -> AbstractContextManager[Any]:
        """Says on standard error that something takes a while."""
        return self._errors.status(text)

    @contextmanager
    def loading(self, model: str) -> Iterator[Callable[[int, int], None]]:
        """Says on standard error which layer of a model is being loaded; gives what is to be told of each."""
        text = f"Loading {model}"
        with self._errors.status(text) as status:
            yield lambda layer, layers: status.update(f"{text}: {layer} of {layers} layers")

    def progress(self) -> Progress:
        """A progress display on standard error; plain text where that is no terminal."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._errors,
            transient=True,
            refresh_per_second=2,  # drawing takes time from what is being measured
        )

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
        """A table; the first `left` columns are text, the others numbers."""
        self.print(make_table(title, columns, rows, left))


class _Muted(Terminal):
    def print(self, *parts: Any) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _Silent(_Muted):
    def warn(self, text: str) -> None:
        pass


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
