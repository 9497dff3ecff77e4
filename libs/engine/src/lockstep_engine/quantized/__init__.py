"""Checkpoints whose weights are quantized: what config.json says about them (`schemes`, read without torch), and each
format's tensors as float values (`opening`; one file a format).

Linears may keep codes of 8 or 4 bits, which the kernels of the CPU and of GPUs widen; on the CPU they multiply integers
where the checkpoint's scheme does. All other weights are widened to the model's dtype while they are loaded, one tensor
at a time. A rank reads only its part.
"""

from lockstep_engine.quantized.schemes import Scheme, read_scheme

__all__ = ["Scheme", "read_scheme"]
