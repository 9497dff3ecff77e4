"""What an error says has failed: memory, a kernel for good, or the device. CUDA's answers are the runtime's words."""

import pytest
import torch
from lockstep_common.errors import LockstepError
from lockstep_engine.device_failures import is_of_device, is_of_kernel

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call\nFor debugging ..."
OF_A_DEVICE = [
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "an illegal memory access was encountered",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "unknown error",
]
OF_A_KERNEL = [
    "device kernel image is invalid",
    "no kernel image is available for execution on the device",
    "a PTX JIT compilation failed",
    "the provided PTX was compiled with an unsupported toolchain.",
    "too many resources requested for launch",
    "invalid argument",
    "invalid device function",
    "named symbol not found",
]
OF_A_RECORDING = [
    "operation not permitted when stream is capturing",
    "operation failed due to a previous error during capture",
    "operation would result in a merge of separate capture sequences",
    "dependency created on uncaptured work in another stream",
]


def by_triton(said):
    return RuntimeError(f"Triton Error [CUDA]: {said}")


def by_torch(said):
    return torch.AcceleratorError(f"CUDA error: {said}{ADVICE}")


@pytest.mark.parametrize("raised", [by_triton, by_torch])
def test_an_answer_of_cuda_is_of_the_device_unless_it_is_of_a_kernel_or_of_a_recording(raised):
    for said in OF_A_DEVICE:
        assert is_of_device(raised(said)), said
        assert not is_of_kernel(raised(said)), said
    for said in OF_A_KERNEL:
        assert not is_of_device(raised(said)), said
        assert is_of_kernel(raised(said)) == (raised is by_triton), said  # torch's kernels are not ours
    for said in OF_A_RECORDING:
        assert not is_of_device(raised(said)), said
        assert not is_of_kernel(raised(said)), said


def test_want_of_memory_that_triton_has_wrapped_is_of_no_kernel():
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise SyntaxError("at 3:4:") from None  # as Triton's CompilationError: no RuntimeError
    except SyntaxError as error:
        wrapped = error
    assert is_of_device(wrapped)
    assert not is_of_kernel(wrapped)
    assert is_of_kernel(SyntaxError("at 3:4:"))


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), by_triton("out of memory")],
    ids=["the host's", "torch's", "Triton's"],
)
def test_memory_that_ran_out_is_a_failure_that_may_pass(error):
    assert is_of_device(error)
    assert not is_of_kernel(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("aten.nonzero needs the host"), AssertionError(), LockstepError("INVALID_REQUEST", "no")]
)
def test_other_errors_are_not_of_the_device(error):
    assert not is_of_device(error)


def test_the_error_that_broke_a_recording_off_counts():
    """Ending a recording after an error fails, too, and hides it."""

    def raised_after(first):
        try:
            try:
                raise first
            finally:
                raise by_torch("operation failed due to a previous error during capture")
        except RuntimeError as error:
            return error

    assert is_of_device(raised_after(torch.OutOfMemoryError("CUDA out of memory")))
    assert not is_of_device(raised_after(RuntimeError("aten.nonzero needs the host")))
