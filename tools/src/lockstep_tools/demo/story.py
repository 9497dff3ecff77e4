"""The events of the demo's stream: the kills, the gaps that the client saw, the comparison of both runs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep_tools.console import generated
from lockstep_tools.load.endpoint import Piece
from lockstep_tools.load.history import History, violations

KILLS = 2

_SETTLED_PIECES = 12  # after a kill: the longest silence among them is the kill's
_WRAP_MARGIN = 12  # columns: a word may come in several pieces


@dataclass(frozen=True)
class Kill:
    """A process that was killed under the stream."""

    victim: str
    at_s: float
    at_piece: int
    """The number of pieces of text that the client had at the kill."""


@dataclass
class Story:
    """The disturbed run: its kills, and what its client received."""

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
        """Enough pieces have arrived since the kill for the gap to be known."""
        return len(self.history.spoken) >= kill.at_piece + _SETTLED_PIECES


class Narrator:
    """Prints the stream as it arrives, and remarks on separate lines."""

    def __init__(self, story: Story, out: Console) -> None:
        self._story = story
        self._out = out
        self._column = 0
        self._announced = 0

    def begin(self, prompt: str) -> None:
        """Print the prompt, which the stream continues."""
        self._out.print(prompt, style="bold", end="", markup=False)
        self._column = len(prompt.rpartition("\n")[2])

    def hear(self, piece: Piece) -> None:
        """Print a piece; soon after a kill also how long its gap was."""
        self._write(piece.text)
        kills = self._story.kills
        if self._announced < len(kills) and self._story.is_settled(kills[self._announced]):
            gap_ms = self._story.gap_ms(kills[self._announced])
            self._announced += 1
            self.remark(f"↻ went on; the client saw a gap of {gap_ms:.0f} ms", "bold green")

    def remark(self, text: str, style: str) -> None:
        """Print a remark on a separate line."""
        self.end_line()
        self._out.print(f"  {text}", style=style, markup=False)

    def end_line(self) -> None:
        """End the current line, if one has begun."""
        if self._column:
            self._out.print()
        self._column = 0

    def _write(self, text: str) -> None:
        if self._out.is_terminal and text.startswith(" ") and self._column + len(text) > self._out.width - _WRAP_MARGIN:
            text = "\n" + text[1:]
        self._out.file.write(generated(text, self._out.file))
        self._out.file.flush()
        _, newline, tail = text.rpartition("\n")
        self._column = len(tail) if newline else self._column + len(tail)


def show_comparison(undisturbed: History, story: Story, out: Console) -> bool:
    """Compare the runs, print the table, and return whether the demo passed.

    Args:
        undisturbed: the undisturbed run.
        story: the disturbed one.
        out: where the table goes.
    """
    disturbed = story.history
    wanted = undisturbed.request.body["max_tokens"]
    before = violations(undisturbed, require_ids=True)
    problems = violations(disturbed, reference=undisturbed.text(), require_ids=True)
    checks = {
        "text": _equal(undisturbed, disturbed, History.text, show=lambda text: f"{len(text)} characters"),
        "tokens, by usage": _equal(undisturbed, disturbed, _reported_tokens, wanted),
        "tokens, by SSE id": _equal(undisturbed, disturbed, History.position, wanted),
        "tokens shown": _equal(undisturbed, disturbed, _shown_tokens, wanted),
        "lost, doubled, out of order": (not before + problems, str(len(before)), str(len(problems))),
        "processes killed": (len(story.kills) == KILLS, "0", f"{len(story.kills)} of {KILLS}"),
        "stream moved, by the router": (story.failovers == KILLS, "0", f"{story.failovers} times"),
    }
    well = all(holds for holds, _, _ in checks.values())
    out.print()
    out.print(_table(checks, undisturbed, story))
    for problem in before + problems:
        out.print(f"  {problem}", style="red", markup=False)
    sentence = "The client lost nothing: same text, same tokens." if well else "The demo failed."
    out.print(sentence, style="bold green" if well else "bold red")
    return well


def _equal(
    undisturbed: History,
    disturbed: History,
    measure: Callable[[History], Any],
    wanted: int | None = None,
    show: Callable[[Any], str] = str,
) -> tuple[bool, str, str]:
    """Whether both runs measure the same (and what is `wanted`, if given), and both measurements in words."""
    before, after = measure(undisturbed), measure(disturbed)
    return before == after and wanted in (None, before), show(before), show(after)


def _reported_tokens(history: History) -> int | None:
    return (history.usage or {}).get("completion_tokens")


def _shown_tokens(history: History) -> int:
    return sum(piece.tokens or 0 for piece in history.pieces)


def _table(checks: Mapping[str, tuple[bool, str, str]], undisturbed: History, story: Story) -> Table:
    table = Table(title="comparison", title_justify="left", title_style="bold")
    for name in ("", "undisturbed", "disturbed", ""):
        table.add_column(name)
    for name, (holds, *cells) in checks.items():
        table.add_row(name, *cells, "[green]✓[/green]" if holds else "[red]✗[/red]")
    for number, kill in enumerate(story.kills, start=1):
        table.add_row(f"gap of kill {number}", "", f"{story.gap_ms(kill):.0f} ms", "")
    silences = [f"{history.longest_gap_s() * 1e3:.0f} ms" for history in (undisturbed, story.history)]
    table.add_row("longest silence", *silences, "")
    return table
