"""`lockstep status`: what the router reports of its workers, as a table or JSON, once or repeatedly."""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import httpx
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lockstep_tools import console
from lockstep_tools.arguments import DEFAULT_MANAGEMENT_URL, add_tls
from lockstep_tools.escaping import harmless, harmless_lines
from lockstep_tools.failure import FAILED, CommandError
from lockstep_tools.load.endpoint import checked_url, root_url, tls_context
from lockstep_tools.serving.status import READY, fetch, is_ready, state_of

DESCRIPTION = """\
Show the workers that a router knows, their ranks, process ids, epochs, states, queues and blocks.
Exit code 1 when no worker is ready, 2 when no router answers."""

EXAMPLES = """\
  lockstep status
  lockstep status --watch
  lockstep status --json | jq '.workers[].ranks[].pid'"""

_WATCH_INTERVAL_S = 0.5
_TIMEOUT_S = 5.0
_FINGERPRINT_CHARS = 8  # enough to see which workers differ; --json has all
_COLUMNS = (
    "NAME",
    "STATE",
    "PID",
    "EPOCH",
    "QUEUED",
    "RUNNING",
    "BLOCKS FREE",
    "TOKENS/S",
    "STEPS",
    "SEEN",
    "NUMERICS",
)
_LEFT = ("NAME", "STATE", "NUMERICS", "REASON")
_DISPENSABLE = ("NUMERICS", "SEEN", "EPOCH", "STEPS", "TOKENS/S", "BLOCKS FREE", "RUNNING", "QUEUED")
"""What a narrow terminal does not show, the least important first; --json has all."""
_FOLDED = {"REASON": 24, "NAME": 28, "STATE": 12}
"""The columns whose cells are folded to these widths before others are left out."""
_NARROWEST = {"NAME": 10, "REASON": 16, "STATE": 10}
"""The same once no other can be left out."""
_COLOURS = {READY: "green", "dead": "red", "failed": "red", "lost": "red", "unreachable": "red"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--url", default=DEFAULT_MANAGEMENT_URL, help="address of the router's management port (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the router's answer unchanged")
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C")
    add_tls(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the status once, or until Ctrl-C."""
    root = root_url(checked_url(arguments.url))
    with httpx.Client(verify=tls_context(arguments) or True, timeout=_TIMEOUT_S, trust_env=False) as client:
        if arguments.watch:
            return _watch(client, root, as_json=arguments.json)
        status = fetch(client, root)
    _show(status, as_json=arguments.json)
    return 0 if is_ready(status) else FAILED


def render(status: Mapping[str, Any]) -> RenderableType:
    """The status as a line about the router and a table of workers with their ranks."""
    router = status.get("router") or {}
    head = (
        f"router {router.get('id', '?')} (pid {router.get('pid', '?')}), up {_duration(router.get('uptime_s'))}: "
        f"{router.get('streams', '?')} streams, {router.get('failovers', '?')} failovers; "
        f"models: {', '.join(map(_model_name, status.get('models') or [])) or 'none'}"
    )
    rows: list[Sequence[str | Text]] = []
    for worker in status["workers"]:
        rows.append(_worker_row(worker))
        ranks = worker.get("ranks") or []
        for rank in ranks:
            is_slow = worker.get("slow_rank") is not None and worker.get("slow_rank") == rank.get("rank")
            rows.append(_rank_row(rank, last=rank is ranks[-1], is_slow=is_slow))
    title = _literal(head)
    if not rows:
        return Text.assemble(title, "\nno workers")
    return Group(title, Text(), _Workers([[_literal(cell) for cell in row] for row in rows]))


class _Workers:
    """A table that fits the console: a narrow one has fewer columns, and folds the reason rather than cut it off."""

    def __init__(self, rows: Sequence[Sequence[Text]]) -> None:
        self._columns = {name: [row[number] for row in rows] for number, name in enumerate((*_COLUMNS, "REASON"))}

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        widths, gap = self._fitted(options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for name, width in widths.items():
            justify: JustifyMethod = "left" if name in _LEFT else "right"
            table.add_column(name, justify=justify, width=width, overflow="fold", no_wrap=name not in _FOLDED)
        for row in zip(*(self._columns[name] for name in widths), strict=True):
            table.add_row(*row)
        yield table

    def _fitted(self, width: int) -> tuple[dict[str, int], int]:
        """The width of each column that is shown, and of the gap between two."""
        widths = {
            name: max(map(cell_len, (name, *(cell.plain for cell in cells)))) for name, cells in self._columns.items()
        }
        for gap in (2, 1):
            missing = sum(widths.values()) + gap * (len(widths) - 1) - width
            if missing <= 0:
                return widths, gap
        spare = sum(max(0, widths[name] - least) for name, least in _FOLDED.items())
        for name in _DISPENSABLE:
            if missing > spare:
                missing -= widths.pop(name) + gap
        for name, least in (*_FOLDED.items(), *_NARROWEST.items()):
            less = max(0, min(missing, widths[name] - least))
            widths[name] -= less
            missing -= less
        return widths, gap


def _literal(cell: str | Text) -> Text:
    """A cell as the router says it: without markup, and with what a terminal would act on escaped."""
    return Text(harmless(cell)) if isinstance(cell, str) else Text(harmless(cell.plain), style=cell.style)


def _worker_row(worker: Mapping[str, Any]) -> Sequence[str | Text]:
    seen = worker.get("last_seen_s")
    return [
        str(worker.get("id") or worker.get("target") or "?"),
        _state(worker),
        _number(worker.get("pid")),
        _number(worker.get("epoch")),
        _number(worker.get("queued")),
        _number(worker.get("running")),
        f"{_number(worker.get('free_blocks'))}/{_number(worker.get('total_blocks'))}",
        _number(worker.get("tokens_per_s")),
        "",
        "never" if seen is None else f"{_duration(seen)} ago",
        str(worker.get("fingerprint") or "unknown")[:_FINGERPRINT_CHARS],
        str(worker.get("reason") or ""),
    ]


def _rank_row(rank: Mapping[str, Any], *, last: bool, is_slow: bool) -> Sequence[str | Text]:
    branch = "└" if last else "├"
    state = Text("ready (slow)", style="yellow") if is_slow and state_of(rank) == READY else _state(rank)
    cells: list[str | Text] = [f"{branch} rank {rank.get('rank', '?')}", state, _number(rank.get("pid"))]
    return [*cells, "", "", "", "", "", _number(rank.get("steps")), "", "", _pace(rank, is_slow=is_slow)]


def _pace(rank: Mapping[str, Any], *, is_slow: bool) -> str:
    """What a step of a rank took over the last seconds; empty: none was run, or the router is older."""
    compute_s, collective_s = rank.get("compute_s"), rank.get("collective_s")
    if not isinstance(compute_s, int | float) or not isinstance(collective_s, int | float) or not compute_s:
        return ""
    figures = f"a step: computes {1000 * compute_s:.1f} ms, {1000 * collective_s:.1f} ms in collectives"
    return f"{figures}; the others wait for it" if is_slow else figures


def _state(entry: Mapping[str, Any]) -> Text:
    """The state and, in parentheses, why new streams avoid a worker: `ready (slow)`."""
    state = state_of(entry)
    problems = ", ".join(map(str, (entry.get("health") or {}).get("problems") or []))
    if not problems:
        return Text(state, style=_COLOURS.get(state, "yellow"))
    return Text(f"{state} ({problems})", style="yellow" if state == READY else _COLOURS.get(state, "yellow"))


def _model_name(model: object) -> str:
    return str(model.get("name") or model.get("id")) if isinstance(model, Mapping) else str(model)


def _number(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{minutes} min" if minutes < 60 else f"{hours} h {minutes % 60} min"


def _show(status: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status, indent=2), flush=True)
    else:
        console.output().print(render(status))


def _watch(client: httpx.Client, root: str, *, as_json: bool) -> int:
    """Show the status until Ctrl-C: in place on a terminal, else one after the other."""
    out = console.output()
    status = fetch(client, root)
    try:
        if out.is_terminal and not as_json:
            _watch_in_place(client, root, out, status)
        while True:
            _show(status, as_json=as_json)
            time.sleep(_WATCH_INTERVAL_S)
            status = fetch(client, root)
    except KeyboardInterrupt:
        return 0


def _watch_in_place(client: httpx.Client, root: str, out: Console, status: Mapping[str, Any]) -> NoReturn:
    """Use the alternate screen; a router that stops answering is waited for."""
    with Live(render(status), console=out, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_WATCH_INTERVAL_S)
            try:
                live.update(render(fetch(client, root)), refresh=True)
            except CommandError as error:
                live.update(Text(harmless_lines(error.message), style="red"), refresh=True)
