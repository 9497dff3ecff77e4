"""`lockstep bench state`: measures and prints."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.table import Table
from rich.text import Text

from lockstep_tools import console
from lockstep_tools.arguments import model_directory
from lockstep_tools.serving.stack import StackSettings, check_model
from lockstep_tools.state_bench import figures, measure, model


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    directory = model_directory(arguments.model_directory)
    check_model(StackSettings(directory, tp=arguments.tp))  # before anything is measured, which takes long
    backends = asyncio.run(measure.measure_backends(arguments.target, arguments.blocks, arguments.rounds))
    here = _model(arguments, directory)
    if arguments.json:
        print(json.dumps(_as_json(backends, here), indent=2))
        return 0
    out = console.output()
    out.print(_table("Blocks of 1 MiB", ("state server", "put, MB/s", "get, MB/s", "round trip, ms"), _rows(backends)))
    networks = [each.network for each in backends]
    for title, models, ways in (
        ("Break-even of the model at hand, in tokens", [here], networks),
        ("Break-even of others' figures, in tokens", figures.QUOTED_MODELS, [*figures.QUOTED_NETWORKS, *networks]),
    ):
        header = ("model", "needs more than", *(each.name for each in ways))
        out.print(_table(title, header, figures.table(models, ways)))
    out.print(f"Prefill here: {here.prefill_tokens_per_s:,.0f} tokens/s, KV {here.kv_bytes_per_token:,} bytes a token.")
    out.print(
        "A cell: blocks in the model's precision / in eight bits but for the hot window, as `lazy` has them. A fetch "
        "has to take less than 0.8 of computing."
    )
    for source in figures.SOURCES:
        out.print(f"- {source}", markup=False, highlight=False)
    return 0


def _model(arguments: argparse.Namespace, directory: str) -> figures.Model:
    if arguments.prefill is not None:
        dtype = "bfloat16" if arguments.dtype == "auto" else arguments.dtype
        size = model.kv_bytes_per_token(directory, dtype)
        return figures.Model("as given", size, arguments.prefill)
    threads, tp = arguments.threads, arguments.tp
    found = model.measure(directory, tp=tp, device=arguments.device, dtype=arguments.dtype, threads=threads)
    return found if tp == 1 else replace(found, name=f"{found.name}, tp {tp}")


def _rows(backends: Sequence[measure.Measured]) -> list[list[str]]:
    return [
        [
            each.backend,
            f"{each.put_bytes_per_s / 1e6:,.0f}",
            f"{each.get_bytes_per_s / 1e6:,.0f}",
            f"{each.round_trip_s * 1e3:.2f}",
        ]
        for each in backends
    ]


def _as_json(backends: Sequence[measure.Measured], here: figures.Model) -> dict[str, object]:
    break_even = {each.backend: figures.break_even_tokens(here, each.network) for each in backends}
    return {"backends": [asdict(each) for each in backends], "model": asdict(here), "break_even_tokens": break_even}


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(header):
        table.add_column(Text(name), justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # an address such as [fd00::1]:7000 is no markup
    return table
