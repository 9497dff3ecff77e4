"""Triton's interpreter with products that are summed in the order of their terms.

Its own are numpy's, whose order depends on the shapes: decoding and prefill, which multiply tiles of the same shape on
a GPU, would agree or differ by accident. With these, equal bits show that the algorithm is the same for both.
"""

import numpy as np
import triton_device
from triton.runtime import interpreter


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    left, right, total = a.data.astype(np.float32), b.data.astype(np.float32), d.data.astype(np.float32)
    for k in range(left.shape[1]):
        total = total + left[:, k : k + 1] * right[k : k + 1, :]
    return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


def install(monkeypatch):
    """On a GPU the products are its own."""
    if not triton_device.GPU:
        monkeypatch.setattr(type(interpreter.interpreter_builder), "create_dot", create_dot)
