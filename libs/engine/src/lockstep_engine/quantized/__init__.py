"""Checkpoints whose weights are quantized: what config.json says about them (`schemes`, read without torch), and each
format's tensors as float values (`opening`; one file a format).

On the CPU linears may keep integers in 8 bits, which the kernels widen. All other weights are widened to the model's
dtype while they are loaded, one tensor at a time. A rank reads only its part.
"""

from lockstep_engine.quantized.schemes import Scheme, read_scheme

__all__ = ["Scheme", "read_scheme"]
