"""Kernels compiled to machine code for GPUs that are not there: that they build in bfloat16, fit, use the matrix units,
move 16 bytes at a time, and are not built anew for every size of a step.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton_device  # noqa: F401  # without Triton it skips this module
from fast_cases import further

FOLDER = Path(__file__).parent
SPILLED_BYTES = 64
"""A thread's at most: some of the largest tiles put a few words aside before their loops."""


def build(script, *arguments):
    result = subprocess.run(
        [sys.executable, str(FOLDER / script), *map(str, arguments)],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def count(usage, *prefixes):
    return sum(number for name, number in usage["instructions"].items() if name.startswith(prefixes))


def check(used):
    for usage in used:
        assert usage["spilled_bytes"] <= SPILLED_BYTES, usage
        if usage["kernel"] == "_attend":
            assert usage["shared_bytes"] <= 160 * 1024


@pytest.mark.slow
def test_kernels_build_for_hopper_use_what_it_has_and_serve_steps_of_any_size():
    report = build("build_kernels.py", 90, "common")
    assert report["steps"]["ready"] <= 21
    assert report["steps"]["later"] == 0
    used = report["used"]
    assert {usage["kernel"] for usage in used} == {
        "_add_rms_norm", "_attend", "_compress", "_keep", "_peaks", "_pick", "_reduce", "_rotate_store", "_search",
        "_silu_mul", "_store", "_weigh",
    }  # fmt: skip
    check(used)
    attend = [usage for usage in used if usage["kernel"] == "_attend"]
    prefill = [usage for usage in attend if count(usage, "HGMMA")]
    decode = [usage for usage in attend if count(usage, "HMMA.16816")]
    assert (len(prefill), len(decode)) == (1, 2)
    for usage in attend:
        # fp8 becomes half precision two numbers at a time, on its way from registers, and nothing moves byte by byte.
        assert count(usage, "F2FP.F16.E4M3") >= 32
        assert count(usage, "LDGSTS.E.BYPASS.128")
        assert count(usage, "LDS.U8", "LDG.E.U8", "F2F.") < 10  # a mask at the end
    (compress,) = (usage for usage in used if usage["kernel"] == "_compress")
    assert count(compress, "F2FP.SATFINITE.E4M3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "llama codes",  # products on them have a form for each tile
        further("gemma2"),  # by its modules; windows in some layers, soft caps
        further("falcon"),  # one key/value head
        further("mixtral"),  # grouped experts
        further("deepseek_v3"),  # latents
    ],
)
def test_a_rank_that_is_ready_builds_nothing_more(name):
    report = build("build_rank.py", *name.split())
    assert (report["coded"] > 0) == name.endswith("codes")
    assert report["ready"] >= 6
    assert report["later"] == 0
    assert report["recorded"]
    assert report["moves"]
    assert report["most_sequences"] > 32  # of which keys are not split


@pytest.mark.slow
@pytest.mark.parametrize("arch", [86, *(further(each) for each in (80, 89, 90, 100))])
def test_latent_attention_builds_and_spills_little(arch):
    """That it fits shared memory is shown by its loading."""
    report = build("build_latent.py", arch)
    attend = [usage for usage in report["used"] if usage["kernel"] == "_attend_latent"]
    # Whole results and partial ones; on large GPUs also a tile of its own for prefill, and both of 128 heads.
    assert len(attend) == 2 * 4 + (3 if arch in (90, 100) else 0)
    for usage in attend:
        # Around the loops over keys, not in them, as their machine code for sm_80, 90 and 100 shows.
        assert usage["spilled_bytes"] <= (448 if arch == 80 and usage["exact"] else 192), usage
        assert count(usage, "LDGSTS.E.BYPASS.128")
        assert usage["shared_bytes"] <= (232_448 if arch in (90, 100) else 99 * 1024)
        wide = count(usage, "HGMMA", "UTCHMMA")
        assert (wide > 0) == (usage["shared_bytes"] > 99 * 1024)
        assert not (wide and usage["exact"])  # whose products are all made by one instruction


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_all_shapes_build(arch):
    report = build("build_kernels.py", arch, "all")
    check(report["used"])
    assert report["steps"]["later"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", [86, *(further(each) for each in (80, 89, 90, 100))])
def test_the_exact_modes_kernels_build_and_products_are_built_for_few_numbers_of_rows(arch):
    """That they fit shared memory is shown by their loading: a kernel that does not is an error."""
    report = build("build_exact.py", arch)
    # Of 16 bits three tiles for few rows with segments split over programs and with one segment, and one for many rows
    # in each form, of which GPUs with little memory have one already; of 32 bits one tile in three forms.
    assert report["products"] == 2 * (7 if arch in (86, 89) else 8) + 3
    assert {usage["kernel"] for usage in report["used"]} == {
        "_attend_exact", "_coded", "_fold_segments", "_grouped", "_linear", "_softmax", "_sum_rows",
    }  # fmt: skip
    assert report["coded"] == 3 * (3 + 4)  # tiles in one segment, and in several
    for usage in report["used"]:
        counters = 0
        if usage["kernel"] == "_coded":
            assert usage["spilled_bytes"] <= 32
            assert usage["shared_bytes"] <= 99 * 1024
            assert count(usage, "STS.U8", "LDG.E.U8", "LDG.E.S8") <= 1  # nothing moves byte by byte; sm_100 has a flag
        if usage["kernel"] in ("_linear", "_grouped"):
            assert usage["spilled_bytes"] <= (16 if arch == 100 else 0)  # of one tile, with 72 registers
        if usage["kernel"] in ("_coded", "_linear", "_grouped"):
            counters = count(usage, "ATOMG.E.ADD.STRONG.GPU")  # of integers: how many segments are there
            assert counters <= 1
        assert count(usage, "ATOMG", "RED.") == counters, usage["kernel"]
