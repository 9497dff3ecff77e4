"""A request's timeline: lines for a terminal, and one HTML page without scripts."""

from collections.abc import Sequence
from html import escape

from rich.text import Text

from lockstep_tools.escaping import harmless
from lockstep_tools.trace.causes import causes
from lockstep_tools.trace.spans import Span, duration, headline, tree

_MIN_BAR_WIDTH = 20
_MAX_LABEL_WIDTH = 48
_GAP = 2

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --back: #fff; --text: #1b1f24; --soft: #eef1f4; --bar: #2f6fde; --bad: #c62828; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --back: #14171b; --text: #e4e7eb; --soft: #22272e; --bar: #6ea0ff; --bad: #ff7b72; }}
}}
body {{ background: var(--back); color: var(--text); font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem; }}
summary {{ display: grid; grid-template-columns: minmax(12rem, 26rem) 1fr 6rem; gap: .75rem; cursor: pointer; }}
summary:hover {{ background: var(--soft); }}
.name {{ overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }}
.name small {{ opacity: .7; }}
.track {{ position: relative; background: var(--soft); }}
.bar {{ position: absolute; top: .2rem; bottom: .2rem; min-width: 2px; background: var(--bar); border-radius: 2px; }}
.bad .bar {{ background: var(--bad); }}
.bad .name {{ color: var(--bad); }}
.time {{ text-align: right; font-variant-numeric: tabular-nums; }}
table {{ margin: .25rem 0 .75rem 2rem; border-spacing: .75rem 0; }}
td {{ overflow-wrap: anywhere; vertical-align: top; }}
</style>
<h1>{title}</h1>
<p>{headline}<br>{causes}</p>
{rows}
</html>
"""


def lines(spans: Sequence[Span], width: int) -> list[Text]:
    """The timeline in a terminal of so many columns."""
    placed = tree(spans)
    labels = [harmless(f"{'  ' * depth}{span.label}  ({span.process})") for depth, span in placed]
    times = [duration(span.end_ns - span.begin_ns) for _, span in placed]
    time_width = max(map(len, times))
    label_width = min(_MAX_LABEL_WIDTH, max(map(len, labels)), max(8, width - time_width - _MIN_BAR_WIDTH - 2 * _GAP))
    bar_width = max(_MIN_BAR_WIDTH, width - label_width - time_width - 2 * _GAP)
    window = _window(spans)
    drawn = [Text(harmless(line)) for line in (headline(spans), causes(spans)) if line]
    for (_, span), label, time in zip(placed, labels, times, strict=True):
        first, last = _columns(window, span, bar_width)
        bar = " " * first + "█" * (last - first) + " " * (bar_width - last)
        shown = label if len(label) <= label_width else label[: label_width - 1] + "…"
        colour = "red" if span.error else "cyan"
        drawn.append(
            Text.assemble(
                (shown.ljust(label_width + _GAP), "red" if span.error else ""),
                (bar, colour),
                time.rjust(time_width + _GAP),
                (harmless(f"  ✗ {span.error}") if span.error else "", "red"),
            )
        )
    return drawn


def page(spans: Sequence[Span], title: str) -> str:
    """The timeline as one HTML page, with each span's attributes below it when it is opened."""
    window = _window(spans)
    rows = "\n".join(_row(window, depth, span) for depth, span in tree(spans))
    return _PAGE.format(
        title=escape(f"Request {title}"), headline=escape(headline(spans)), causes=escape(causes(spans)), rows=rows
    )


def _row(window: tuple[int, int], depth: int, span: Span) -> str:
    begin, end = window
    whole = max(1, end - begin)
    left, length = 100 * (span.begin_ns - begin) / whole, 100 * (span.end_ns - span.begin_ns) / whole
    details = [("span", span.span_id), ("error", span.error), *sorted(span.attributes.items())]
    details += [(duration(max(0, at_ns - begin)), name) for name, at_ns in span.events]
    facts = "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in details if value)
    return (
        f"<details{' class=bad' if span.error else ''}><summary>"
        f'<span class="name" style="padding-left:{depth * 1.1:.1f}rem">{escape(span.label)}'
        f" <small>{escape(span.process)}</small></span>"
        f'<span class="track"><span class="bar" style="left:{left:.3f}%;width:{length:.3f}%"></span></span>'
        f'<span class="time">{duration(span.end_ns - span.begin_ns)}</span></summary>'
        f"<table>{facts}</table></details>"
    )


def _window(spans: Sequence[Span]) -> tuple[int, int]:
    return min(each.begin_ns for each in spans), max(each.end_ns for each in spans)


def _columns(window: tuple[int, int], span: Span, width: int) -> tuple[int, int]:
    """First and last column of a bar; it has one at least."""
    begin, end = window
    whole = max(1, end - begin)
    first = min(width - 1, (span.begin_ns - begin) * width // whole)
    return first, min(width, max(first + 1, round((span.end_ns - begin) * width / whole)))
