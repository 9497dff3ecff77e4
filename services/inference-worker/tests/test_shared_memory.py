import pytest
from lockstep_common.errors import LockstepError
from lockstep_worker.settings import WorkerSettings
from lockstep_worker.shared_memory import NCCL_BYTES_PER_RANK, check_shared_memory, shared_memory_bytes


def check(**settings):
    check_shared_memory(WorkerSettings(model="m", **settings))


def test_ranks_on_the_cpu_need_none():
    check(device="cpu", tp=64)
    check(device="cuda", tp=1)


def test_less_than_asked_for_is_refused_with_both_numbers():
    given = f"{shared_memory_bytes() / 2**20:.4g} MiB"
    with pytest.raises(LockstepError) as caught:
        check(min_shm="64Ti", tp=4)
    assert caught.value.message == (
        f"/dev/shm has {given} and 4 ranks need 6.711e+07 MiB (min_shm): give the pod a larger one"
    )
    assert caught.value.field == "min_shm"


def test_as_much_as_asked_for_is_enough():
    check(min_shm=shared_memory_bytes())


def test_nccl_needs_some_for_each_rank():
    ranks = shared_memory_bytes() // NCCL_BYTES_PER_RANK
    if ranks > 1:
        check(device="cuda", tp=ranks)
    with pytest.raises(LockstepError, match=f"{ranks + 2} ranks need"):
        check(device="cuda", tp=ranks + 2)
    check(device="cuda", tp=ranks + 2, min_shm=1)
