"""The self-test at a rank's start: what it says of the rank's numerics, and what changes their name."""

import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make
from in_process import InProcessGroup
from lockstep_engine.canary import pace_of
from lockstep_engine.config import HotWindow
from lockstep_engine.kernels import cpu
from lockstep_engine.sampling import Sampler
from test_rowwise import builds_here
from test_sampler_rows import random_logits, row_sampling

pytestmark = pytest.mark.bits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("models"))[0]


def measure(path, tp=1, **options):
    numerics = InProcessGroup(path, tp, **options).measure()
    assert numerics.deterministic
    assert len(bytes.fromhex(numerics.fingerprint)) == 16
    return numerics.fingerprint


def test_same_numerics_have_the_same_fingerprint(checkpoint):
    assert measure(checkpoint) == measure(checkpoint)


def test_the_pace_of_steps_is_measured(checkpoint):
    pace = InProcessGroup(checkpoint, 1).measure().pace
    assert 0 < pace.step_s + pace.token_s < 60
    assert 0 <= pace.token_s <= pace.step_s + pace.token_s


@pytest.mark.parametrize(
    ("one_s", "all_s", "step_s", "token_s"),
    [(1.0, 11.0, 0.9, 0.1), (1.0, 0.5, 1.0, 0.0), (0.1, 1000.0, 0.0, 0.1)],
)
def test_the_pace_explains_both_steps(one_s, all_s, step_s, token_s):
    """Of one token and of 101."""
    pace = pace_of(one_s, all_s, 101)
    assert (pace.step_s, pace.token_s) == (pytest.approx(step_s), pytest.approx(token_s))


def test_weights_dtype_split_and_compression_are_told_apart(checkpoint, tmp_path):
    fingerprints = [
        measure(checkpoint),
        measure(checkpoint, tp=2),
        measure(checkpoint, dtype=torch.bfloat16),
        measure(checkpoint, dtype=torch.float16),
        measure(checkpoint, hot_window=HotWindow(1, 1)),
        measure(make("llama-eight-heads", tmp_path)[0]),
    ]
    assert len(set(fingerprints)) == len(fingerprints)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=f"{name}-{kind}", marks=() if is_fast else pytest.mark.slow)
        for name in ("llama", "mixtral", "gemma2", "bloom", "deepseek_v2")
        for kind, options, is_fast in (
            ("float32", {}, name in ("llama", "deepseek_v2")),
            ("bfloat16", {"dtype": torch.bfloat16}, name == "mixtral"),
            ("float16", {"dtype": torch.float16}, False),
            ("compressed", {"hot_window": HotWindow(1, 1)}, name == "llama"),
        )
    ],
)
def test_neither_the_build_of_the_kernels_nor_threads_change_it(tmp_path, name, options):
    """So that all x86-64 machines continue each other's streams."""
    path, before = make(name, tmp_path)[0], (cpu.build or "off", torch.get_num_threads())
    try:
        fingerprints = set()
        for build in builds_here():
            for threads in (1, 2):
                cpu.use(build)
                torch.set_num_threads(threads)
                fingerprints.add(measure(path, **options))
    finally:
        cpu.use(before[0])
        torch.set_num_threads(before[1])
    assert len(fingerprints) == (1 if builds_here() else 0)


def draws() -> str:
    """Hash of tokens drawn from random logits, and of their log probabilities."""
    logits = torch.from_numpy(np.stack([random_logits(row, 1000) for row in range(64)]))
    sampler, rows = Sampler(64, 1000, torch.device("cpu")), np.arange(64, dtype=np.int32)
    for row in range(64):
        sampler.add(row_sampling(row, temperature=0.7, top_p=0.9, min_p=0.01, logprobs=5))
    sampled = sampler.sample(logits, rows, np.zeros(64, np.int32), rows / 64)
    return blake2b(repr(sampled.read()).encode(), digest_size=8).hexdigest()


@pytest.mark.slow
def test_what_torch_takes_of_the_cpu_does_not_change_it(checkpoint):
    """The tables of rotary positions are ours, too."""
    if cpu.build is None:
        pytest.skip("products are torch's, in shapes that are stable on one machine")
    measured = {
        capability: subprocess.run(
            [sys.executable, __file__, str(checkpoint)],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "MKL_CBWR": mode},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for capability, mode in (("default", "COMPATIBLE"), ("avx2", "AVX2"), ("avx512", "AUTO,STRICT"))
        if capability in ("default", *builds_here())  # torch does not look whether the CPU has what the variable names
    }
    assert set(measured.values()) == {f"{measure(checkpoint)} {draws()}\n"}


def test_a_rank_whose_rows_depend_on_their_neighbours_has_none(checkpoint):
    group = InProcessGroup(checkpoint, 1)
    exact = group.forward
    group.forward = lambda rank, ids, layout, rows: exact(rank, ids, layout, rows) + len(ids) * 1e-3 * (len(ids) == 3)
    numerics = group.measure()
    assert not numerics.deterministic
    assert numerics.fingerprint == ""


def test_logits_of_many_rows_are_compared_where_that_is_asked_for(checkpoint):
    group = InProcessGroup(checkpoint, 1)
    assert group.measure(together=[17, 40]) == group.measure()
    exact = group.forward
    group.forward = lambda rank, ids, layout, rows: exact(rank, ids, layout, rows) + 1e-3 * (len(rows) == 40)
    assert group.measure(together=[17]).deterministic
    assert not group.measure(together=[17, 40]).deterministic


if __name__ == "__main__":
    print(measure(Path(sys.argv[1])), draws())
