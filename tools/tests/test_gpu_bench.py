"""The GPU benchmark runs from end to end on tiny shapes wherever the tests run. Its speeds mean nothing then, but its
figures have to agree with each other.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools/bench/gpu.py"
GPU = Path("/dev/nvidiactl").exists()

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ if GPU else os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )


@pytest.mark.slow
def test_every_section_runs_and_is_in_the_table_and_in_the_file(tmp_path):
    out = tmp_path / "gpu.json"
    result = run("--tiny", "--out", str(out))
    assert result.returncode == 0, result.stderr
    report = json.loads(out.read_text())
    assert report["command"] == f"python tools/bench/gpu.py --tiny --out {out}"
    assert {"device", "torch", "triton", "commit"} <= report["machine"].keys()
    rows = report["rows"]
    assert [*dict.fromkeys(row["section"] for row in rows)] == [
        "machine", "kernels", "decode", "prefill", "graphs", "shards", "peer", "engine", "arrivals",
    ]  # fmt: skip
    for row in rows:
        assert row["what"] in result.stdout
        assert row["value"] > 0 or row["unit"] in ("", "MiB", "s")  # what a CPU does not have or do
    page = out.with_suffix(".md").read_text()
    assert all(f"## {section}\n" in page for section in {row["section"] for row in rows})
    assert page.count("\n| ") == len(rows) + 2 * page.count("\n## ")
    decode = [row for row in rows if row["section"] == "decode" and row["what"] == "tokens"]
    assert [row["kv"] for row in decode] == ["hot", "fp8"]
    assert all(0 < row["share"] < 1 for row in decode)
    for row in decode:
        assert row["value"] == pytest.approx(row["batch"] / row["step_ms"] * 1e3, rel=0.01)
    (ratio,) = [row for row in rows if row["what"] == "fp8 over hot"]
    hot, fp8 = (row["value"] for row in decode)
    assert ratio["value"] == pytest.approx(fp8 / hot, rel=0.01)
    assert all(row["exact"] is False for row in rows if row["section"] not in ("machine", "peer") and "model" in row)
    engines = [row for row in rows if row["section"] == "engine"]
    ways = list(dict.fromkeys((row["tp"], row["overlap"]) for row in engines))
    assert ways[:2] == [(1, True), (1, False)]
    assert GPU or ways[2:] == [(2, True)]
    for way in ways:
        starts = [row for row in engines if (row["tp"], row["overlap"]) == way]
        assert [row["choice"] for row in starts if row["what"] == "tokens"] == ["greedy", "sampled"]
        whole = next(row["value"] for row in starts if row["what"] == "start-up")
        phases = [row["value"] for row in starts if row["what"].startswith("start-up: ")]
        rounding = 0.0005 * (len(phases) + 1)  # each is rounded to a millisecond
        assert 0 < sum(phases) <= whole + rounding
    if GPU:  # an interpreter builds nothing
        built = {row["what"]: row["value"] for row in rows if row["what"].startswith("kernels built")}
        assert built["kernels built until then"] > 0
        assert built["kernels built after that"] == 0


@pytest.mark.slow
def test_modes_are_compared_in_one_run(tmp_path):
    out = tmp_path / "gpu.json"
    result = run(
        "--tiny", "--models", "tiny-moe", "--exact", "both", "--only", "kernels", "prefill", "shards", "--out", str(out)
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(out.read_text())["rows"]
    ratios = [row for row in rows if row["what"].endswith(": exact over not")]
    assert [(row["section"], row["what"]) for row in ratios] == [
        *[("kernels", "attention, decode: exact over not")] * 2,
        *[("prefill", "chunk: exact over not")] * 3,
        ("shards", "step of one rank: exact over not"),
    ]
    for ratio in ratios:
        same = ratio.keys() - {"what", "value", "unit"}
        sides = {
            row["exact"]: row["value"] if row["unit"] != "ms" else 1 / row["value"]
            for row in rows
            if "exact" in row and all(row.get(name) == ratio[name] for name in same)
        }
        assert ratio["value"] == pytest.approx(sides[True] / sides[False], rel=0.01)


@pytest.mark.slow
def test_a_model_is_built_in_the_mode_of_its_rows():
    script = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import gpu
for exact in (False, True):
    bench = gpu.Bench(gpu.TINY)
    bench.exact = exact
    print(bench.build("tiny").exact)
"""
    environment = os.environ if GPU else os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert result.stdout.split() == ["False", "True"], result.stderr


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_without_a_gpu_only_tiny_shapes_run():
    result = run("--only", "kernels")
    assert result.returncode == 2
    assert "there is no CUDA device here; --tiny runs on the CPU" in result.stderr
