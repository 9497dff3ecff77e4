"""What happened to the demo's stream: the kills, what the client saw of them, and the verdict."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from lockstep_tools.endpoint import Piece
from lockstep_tools.history import History, violations

KILLS = 2

_SETTLED_PIECES = 12  # after a kill: the longest silence among them is the kill's
_WRAP_MARGIN = 12  # columns: a word may come in several pieces


@dataclass(frozen=True)
class Kill:
    """A process that was killed under the stream."""

    victim: str
    at_s: float
    at_piece: int
    """Pieces of text that the client had by then."""


@dataclass
class Story:
    """The disturbed run: what was done to it and what its client saw."""

    history: History
    kills: list[Kill] = field(default_factory=list)
    failovers: int = 0
    """How often the router moved the stream, by its own count."""

    def add_kill(self, victim: str) -> Kill:
        """Note that `victim` has just been killed."""
        kill = Kill(victim, time.monotonic(), len(self.history.spoken))
        self.kills.append(kill)
        return kill

    def gap_ms(self, kill: Kill) -> float:
        """The longest silence that the client saw soon after a kill."""
        around = self.history.spoken[max(0, kill.at_piece - 1) : kill.at_piece + _SETTLED_PIECES]
        return max((after.at_s - before.at_s for before, after in pairwise(around)), default=0.0) * 1e3

    def is_settled(self, kill: Kill) -> bool:
        """The stream has gone on for so long that the gap is known."""
        return len(self.history.spoken) >= kill.at_piece + _SETTLED_PIECES


class Narrator:
    """Prints the stream as it comes, and remarks on lines of their own between."""

    def __init__(self, story: Story, out: Console) -> None:
        self._story = story
        self._out = out
        self._column = 0
        self._told = 0

    def begin(self, prompt: str) -> None:
        """The text that the stream continues."""
        self._out.print(prompt, style="bold", end="", markup=False)
        self._column = len(prompt.rpartition("\n")[2])

    def hear(self, piece: Piece) -> None:
        """Print a piece; soon after a kill also how long its gap was."""
        self._write(piece.text)
        kills = self._story.kills
        if self._told < len(kills) and self._story.is_settled(kills[self._told]):
            gap_ms = self._story.gap_ms(kills[self._told])
            self._told += 1
            self.remark(f"↻ went on; the client saw a gap of {gap_ms:.0f} ms", "bold green")

    def remark(self, text: str, style: str) -> None:
        """A line of its own."""
        self.end_line()
        self._out.print(f"  {text}", style=style, markup=False)

    def end_line(self) -> None:
        """The next thing begins a line."""
        if self._column:
            self._out.print()
        self._column = 0

    def _write(self, text: str) -> None:
        if self._out.is_terminal and text.startswith(" ") and self._column + len(text) > self._out.width - _WRAP_MARGIN:
            text = "\n" + text[1:]
        self._out.file.write(text)
        self._out.file.flush()
        _, newline, tail = text.rpartition("\n")
        self._column = len(tail) if newline else self._column + len(tail)


def verdict(peace: History, story: Story, out: Console) -> bool:
    """Compare the runs, print the table, and say whether all is well.

    Args:
        peace: the undisturbed run.
        story: the disturbed one.
        out: where the table goes.
    """
    told = story.history
    wanted = peace.request.body["max_tokens"]
    calm_problems = violations(peace, require_ids=True)
    problems = violations(told, reference=peace.text(), require_ids=True)
    checks = {
        "text": (told.text() == peace.text(), f"{len(peace.text())} characters", f"{len(told.text())} characters"),
        "tokens, by usage": _same(wanted, peace, told, lambda history: (history.usage or {}).get("completion_tokens")),
        "tokens, by SSE id": _same(wanted, peace, told, History.position),
        "tokens shown": _same(wanted, peace, told, lambda history: sum(piece.tokens or 0 for piece in history.pieces)),
        "lost, doubled, out of order": (not calm_problems + problems, str(len(calm_problems)), str(len(problems))),
        "processes killed": (len(story.kills) == KILLS, "0", f"{len(story.kills)} of {KILLS}"),
        "stream moved, by the router": (story.failovers == KILLS, "0", f"{story.failovers} times"),
    }
    well = all(holds for holds, _, _ in checks.values())
    out.print()
    out.print(_table(checks, peace, story))
    for problem in calm_problems + problems:
        out.print(f"  {problem}", style="red", markup=False)
    sentence = "The client lost nothing: same text, same tokens." if well else "The demo failed."
    out.print(sentence, style="bold green" if well else "bold red")
    return well


def _same(wanted: int, peace: History, told: History, count: Callable[[History], int | None]) -> tuple[bool, str, str]:
    return count(peace) == count(told) == wanted, str(count(peace)), str(count(told))


def _table(checks: Mapping[str, tuple[bool, str, str]], peace: History, story: Story) -> Table:
    table = Table(title="verdict", title_justify="left", title_style="bold")
    for name in ("", "in peace", "disturbed", ""):
        table.add_column(name)
    for name, (holds, calm, disturbed) in checks.items():
        table.add_row(name, calm, disturbed, "[green]✓[/green]" if holds else "[red]✗[/red]")
    for number, kill in enumerate(story.kills, start=1):
        table.add_row(f"gap of kill {number}", "", f"{story.gap_ms(kill):.0f} ms", "")
    silences = [f"{history.longest_gap_s() * 1e3:.0f} ms" for history in (peace, story.history)]
    table.add_row("longest silence", *silences, "")
    return table
