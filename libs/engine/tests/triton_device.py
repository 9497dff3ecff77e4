"""Where the tests of Triton kernels run: on a GPU if there is one, else in Triton's interpreter, which can float32 and
float16. Without Triton they are skipped, loudly.
"""

import dataclasses
import warnings

import pytest
import torch

try:
    import triton
except ImportError:
    warnings.warn("Triton is not installed: the GPU kernels are NOT tested", stacklevel=1)
    pytest.skip("Triton is not installed", allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]

if not GPU:
    assert triton.knobs.runtime.interpret, "triton was loaded before conftest.py could set TRITON_INTERPRET"
    from triton.runtime import interpreter

    # A third of the time goes into looking for overflows of integers.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
