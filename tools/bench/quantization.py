"""Each scheme of `lockstep quantize` on a model: perplexity of texts as the engine runs it, and bytes of weights.

python tools/bench/quantization.py --texts books-valid.txt wikitext2-test.txt --calibration books-train.txt --save
python tools/bench/quantization.py --texts ... --calibration ... --schemes int8 "int8 with head" --tokens 2049
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import measure
from lockstep_engine import Engine, EngineConfig
from lockstep_engine.model_config import inspect_model
from lockstep_tools.model.accuracy import measure as perplexity
from lockstep_tools.model.accuracy import windows
from lockstep_tools.quantization.layers import LayeredModel
from lockstep_tools.quantization.production import SCHEMES, Recipe, produce, samples
from tokenizers import Tokenizer

ROWS = {scheme: Recipe(scheme) for scheme in SCHEMES}
ROWS |= {f"{scheme} with head": Recipe(scheme, head="int8") for scheme in ("int8", "gptq")}
GOALS = {"int8": 0.01, "w8a8": 0.01, "fp8": 0.01, "gptq": 0.02, "awq": 0.02}
GOALS |= {"int8 with head": 0.01, "gptq with head": 0.02}
_CALIBRATION_CHARACTERS = 400_000
_SCORED = 64


def weight_bytes(model: Path) -> int:
    """Bytes of a checkpoint's safetensors files."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def measured(model: Path, texts: list[Path], window: int, tokens: int, threads: int | None) -> list[float]:
    """Perplexity of each text, in windows that do not overlap."""
    limits = {"max_context": window + 2, "max_seqs": _SCORED, "max_batch_tokens": _SCORED}
    found = []
    with Engine(model, threads=threads, prefix_cache=False, kv_compression="none", **limits) as engine:
        for text in texts:
            ids = engine.encode(text.read_text(encoding="utf-8"))[:tokens]
            found.append(perplexity(engine, ids, windows(len(ids), window, window))[0].value)
    return found


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=measure.ROOT / "models/reference")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--schemes", choices=ROWS, nargs="+", default=list(ROWS), help="besides none")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16384, help="of each text")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--save", action="store_true", help="write docs/bench/quantization.{json,md}")
    given = parser.parse_args()
    machine = measure.machine()
    info = inspect_model(EngineConfig(model=str(given.model)))
    text = given.calibration.read_text(encoding="utf-8")[:_CALIBRATION_CHARACTERS]
    ids = Tokenizer.from_file(str(given.model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    calibration = samples(ids, given.samples, 512)
    base = measured(given.model, given.texts, given.window, given.tokens, given.threads)
    rows: list[dict[str, Any]] = [{"scheme": "none", "bytes": weight_bytes(given.model), "perplexity": base}]
    print(rows[-1], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for scheme in given.schemes:
            made = Path(folder) / scheme
            made.mkdir()
            produce(LayeredModel(info), made, ROWS[scheme], calibration)
            values = measured(made, given.texts, given.window, given.tokens, given.threads)
            changes = [value / before - 1 for value, before in zip(values, base, strict=True)]
            row = {"scheme": scheme, "bytes": weight_bytes(made), "perplexity": values, "change": changes}
            rows.append(row)
            print(row, flush=True)
    report = {"machine": machine, "command": measure.command(), "window": given.window, "tokens": given.tokens}
    report |= {"model": given.model.name, "texts": [each.name for each in given.texts], "schemes": rows}
    page = _page(report)
    print(page)
    if given.save:
        (measure.RESULTS / "quantization.json").write_text(json.dumps(report, indent=2) + "\n")
        (measure.RESULTS / "quantization.md").write_text(page)


def _page(report: dict[str, Any]) -> str:
    lines = [
        "# Quantized weights",
        "",
        f"Model `{report['model']}`, computed in float32 without KV compression: perplexity of the first",
        f"{report['tokens']} tokens of each text, in windows of {report['window']} that do not overlap. Bytes are",
        "those of the safetensors files. Embeddings and norms keep their type. So does the head, but for rows with it:",
        "there it has 8 bits, in a tensor of its own if it was the embedding.",
        "",
        "| scheme | bytes | of float16 |" + "".join(f" {text} | change |" for text in report["texts"]) + " goal |",
        "| --- | --- | --- |" + " --- | --- |" * len(report["texts"]) + " --- |",
    ]
    full = report["schemes"][0]["bytes"]
    for row in report["schemes"]:
        changes = row.get("change") or [None] * len(report["texts"])
        cells = "".join(
            f" {value:.3f} | {'' if change is None else f'{change:+.2%}'} |"
            for value, change in zip(row["perplexity"], changes, strict=True)
        )
        goal = GOALS.get(row["scheme"])
        lines.append(
            f"| {row['scheme']} | {row['bytes']:,} | {row['bytes'] / full:.0%} |{cells} "
            f"{'' if goal is None else f'+{goal:.0%}'} |"
        )
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    return "\n".join([*lines, "", f"Made by `{report['command']}` on: {machine}.", ""])


if __name__ == "__main__":
    main()
