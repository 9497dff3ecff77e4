"""Kernels compiled ahead, for GPUs that are not there, and found again where there is no compiler."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import triton_device  # noqa: F401  # without Triton it skips this module
from fast_cases import further
from lockstep_engine.kernels import gpu, model_list, prebuilt
from lockstep_engine.kernels.tiles import LIMITS

DEADLINE_S = 1500
CONFIG = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
CONFIG |= {"vocab_size": 512}


@pytest.fixture(autouse=True)
def forget():
    gpu.build_problem.cache_clear()
    yield
    gpu.build_problem.cache_clear()


def precompile(*arguments, path=os.environ["PATH"]):
    environment = {key: value for key, value in os.environ.items() if key not in {"CC", "TRITON_INTERPRET"}}
    return subprocess.run(
        [sys.executable, "-m", "lockstep_engine.precompile", *map(str, arguments)],
        env=environment | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, *(further(each) for each in (80, 86, 89, 100))])
def test_code_is_compiled_and_found_without_any_program_on_the_path(arch, tmp_path):
    model, folder, nowhere = tmp_path / "model", tmp_path / "kernels", str(tmp_path / "no")
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    what = folder, "--model", model, "--arch", arch, "--tp", 1, "--jobs", 1
    built = precompile("build", *what, path=nowhere)
    assert "19 calls" in built.stdout, built.stderr[-2000:]
    moved = shutil.move(folder, tmp_path / "elsewhere")
    for path in [moved, *moved.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(moved.rglob("*"))
    found = precompile("check", moved, *what[1:], "--code-only", path=nowhere)
    assert found.stdout == "19 calls, none was compiled\n", found.stderr[-2000:]
    assert sorted(moved.rglob("*")) == before
    for path in [moved, *moved.rglob("*")]:
        path.chmod(0o755)
    victim = next(moved.rglob("_silu_mul.json")).parent
    shutil.rmtree(victim)
    lacking = precompile("check", moved, *what[1:], "--code-only", path=nowhere)
    assert lacking.returncode == 1
    assert lacking.stderr.strip().endswith("lacks machine code of _silu_mul")


def test_the_prebuilt_module_stands_in_for_a_compiler_if_it_is_this_tritons(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv(prebuilt.FOLDER_VARIABLE, raising=False)
    assert "no C compiler" in gpu.build_problem.__wrapped__()
    monkeypatch.setenv(prebuilt.FOLDER_VARIABLE, str(tmp_path))
    assert "manifest.json cannot be read" in gpu.build_problem.__wrapped__()
    manifest = tmp_path / prebuilt.MANIFEST
    manifest.write_text(json.dumps({"driver_sha256": "0"}))
    assert "is missing" in gpu.build_problem.__wrapped__()
    prebuilt.module_path(tmp_path).touch()
    assert "another version of Triton" in gpu.build_problem.__wrapped__()
    manifest.write_text(json.dumps({"driver_sha256": prebuilt.source_digest()}))
    assert gpu.build_problem.__wrapped__() is None


def test_a_compiler_does_where_the_prebuilt_module_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv(prebuilt.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("CC", "cc")
    assert gpu.build_problem.__wrapped__() is None


def test_without_a_compiler_the_module_is_not_built_and_says_why(tmp_path):
    done = precompile("module", tmp_path / "out", path=str(tmp_path))
    assert done.returncode == 1
    assert "a C compiler is needed" in done.stderr


def test_a_model_that_is_not_in_the_list_names_the_missing_field(tmp_path):
    with pytest.raises(ValueError, match="intermediate_size"):
        model_list.from_config(CONFIG | {"intermediate_size": None})


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (False,)),
        ({"model_type": "phi3", "sliding_window": 2047}, (False, True)),
        ({"model_type": "mistral", "sliding_window": 4096}, (False, True)),
        ({"model_type": "mistral", "sliding_window": None}, (False,)),
        ({"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False}, (False,)),
    ],
)
def test_windows_of_a_model_that_is_not_in_the_list(fields, windows):
    assert model_list.from_config(CONFIG | fields).windows == windows


def test_a_latent_is_one_head_of_every_rank():
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
    widths = model_list.from_config(CONFIG | latent)
    assert (widths.kv_heads, widths.head_dim, widths.latent, widths.plain) == (1, 576, 512, False)
    assert {kv_heads for _, kv_heads, _ in model_list.splits(widths)} == {1}


def test_a_model_is_split_like_the_engine_splits_it():
    assert list(model_list.splits(model_list.MODELS["llama-3.1-8b"])) == [
        (32, 8, 14336), (16, 4, 7168), (8, 2, 3584), (4, 1, 1792),
    ]  # fmt: skip
    assert model_list.MODELS["qwen2.5-0.5b"].split(4) is None  # 14 heads


def test_programs_on_a_multiprocessor():
    assert LIMITS[90].programs(122, 33152, 4) == 4  # by registers
    assert LIMITS[86].programs(112, 33152, 4) == 2  # by shared memory
    assert LIMITS[89].programs(16, 0, 16) == 3  # by warps
