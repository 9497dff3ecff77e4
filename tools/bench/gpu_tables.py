"""The page for people of the GPU's benchmark: a table for each section."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_run import Row
from measure import table

_FIRST = ("what", "model", "tp", "batch", "context", "kv", "exact")
"""Columns of which a section has some, in this order; further ones follow, the figures last."""
_FIGURES = ("value", "unit", "step_ms", "tokens_per_s", "share")
_MEANINGS = """\
`share`: of the bandwidth of a copy in the same run, for the bytes that the work has to move. `exact`: by the kernels of
the exact mode. `kv`: hot in the model's type; fp8: all but the newest blocks and the first in eight bits. Weights are
random. The first engine of a run compiles its kernels, later ones find them in Triton's cache; weights come from the
page cache."""


def page(report: Mapping[str, Any]) -> str:
    """All rows of a report."""
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    parts = [f"# GPU\n\nMeasured, by `{report['command']}` on: {machine}.\n\n{_MEANINGS}"]
    for section in dict.fromkeys(row["section"] for row in report["rows"]):
        rows = [{**row} for row in report["rows"] if row["section"] == section]
        for row in rows:
            del row["section"]
        parts.append(f"## {section}\n\n{_table(rows)}")
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    names = {name for row in rows for name in row}
    others = sorted(names - {*_FIRST, *_FIGURES})
    columns = [name for name in (*_FIRST, *others, *_FIGURES) if name in names]
    return table(columns, [[_cell(row.get(name, "")) for name in columns] for row in rows])


def _cell(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
