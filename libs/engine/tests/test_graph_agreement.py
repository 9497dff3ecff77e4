"""Ranks record decode steps together or not at all. Ranks are threads that meet in shared memory, or processes
that meet over gloo.
"""

import pytest
import torch
import torch.multiprocessing as mp
from lockstep_engine.distributed import Alone, gather_reasons
from recording_ranks import over_gloo, recorded
from test_distributed import run_ranks


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError, AssertionError, OSError])
def test_one_rank_that_cannot_record_makes_all_go_without(rank, number, error):
    fails = {f"rank_{rank}": {"record": number, "error": error}}
    results, _ = run_ranks(3, lambda group: recorded(group, **fails))
    assert results == [(f"without: rank {rank}: {error.__name__}: no record here", False)] * 3


def test_ranks_that_all_can_record_do():
    results, _ = run_ranks(3, recorded)
    assert results == [("", True)] * 3


def test_a_step_that_no_rank_can_record_is_no_failure():
    fails = {f"rank_{rank}": {"prepare": 1} for rank in range(2)}
    results, _ = run_ranks(2, lambda group: recorded(group, **fails))
    assert results == [("without: rank 0: RuntimeError: no prepare here", False)] * 2


def test_a_step_that_some_ranks_leave_fails_on_all_at_once():
    results, _ = run_ranks(2, lambda group: recorded(group, rank_1={"prepare": 2}))
    said = "failed: a decode step of 4 sequences fails on some ranks: rank 1: RuntimeError: no prepare here"
    assert results == [(said, False)] * 2


OF_DEVICE = [torch.OutOfMemoryError, torch.AcceleratorError]


@pytest.mark.parametrize("step", ["record", "prepare"])
@pytest.mark.parametrize("error", OF_DEVICE)
def test_ranks_do_not_go_without_because_memory_or_a_device_failed(error, step):
    """All end with an error after which they are started again, and none waits for another."""
    results, _ = run_ranks(3, lambda group: recorded(group, rank_1={step: 2, "error": error}))
    said = f"failed: rank 1: memory or device failed: {error.__name__}: no {step} here"
    itself = f"failed: no {step} here\nmore about it"
    assert results == [(said, False), (itself, False), (said, False)]


@pytest.mark.parametrize("error", OF_DEVICE)
def test_ranks_that_all_run_out_of_memory_do_not_go_without(error):
    fails = {f"rank_{rank}": {"prepare": 1, "error": error} for rank in range(2)}
    results, _ = run_ranks(2, lambda group: recorded(group, **fails))
    assert results == [("failed: no prepare here\nmore about it", False)] * 2


def test_the_failure_of_a_device_counts_beside_another_reason():
    fails = {"rank_0": {"record": 1}, "rank_1": {"record": 1, "error": torch.OutOfMemoryError}}
    results, _ = run_ranks(2, lambda group: recorded(group, **fails))
    said = "failed: rank 1: memory or device failed: OutOfMemoryError: no record here"
    assert results == [(said, False), ("failed: no record here\nmore about it", False)]


def test_long_reasons_are_cut_and_one_rank_agrees_with_itself():
    assert gather_reasons(Alone(), "x" * 10_000) == ["x" * 512]
    assert gather_reasons(Alone(), "") == [""]


@pytest.mark.slow
def test_processes_agree_over_gloo(tmp_path):
    store = tmp_path / "store"
    store.touch()
    mp.spawn(over_gloo, (str(store),), nprocs=2)
