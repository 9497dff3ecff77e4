"""Where the tests of Triton kernels run: on a GPU if there is one, else in Triton's interpreter, which can float32 and
float16. Without Triton they are skipped, loudly.
"""

import dataclasses
import functools
import warnings

import pytest
import torch

try:
    import triton
    from triton import language
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

    # A fourth of it goes into replacing the functions of the language again, at each call of a function by a kernel.
    # Those that the launch has replaced stay so until it ends.
    replace_and_call = interpreter.InterpretedFunction.__call__

    @functools.cache
    def languages(function):
        """As a kernel's module sees the language, and as functions of the language itself see it."""
        seen = {id(value) for value in function.__globals__.values()}
        return [module for module in (language, language.core) if id(module) in seen]

    def call(function, *args, **kwargs):
        if any(language.core.is_builtin(module.load) for module in languages(function.fn)):
            return replace_and_call(function, *args, **kwargs)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
