"""Checkpoints whose weights are quantized: what config.json says about them (`schemes`, read without torch), and each
format's tensors as float values (`opening`; one file a format).

Weights are widened to the model's dtype while they are loaded, one tensor at a time, and a rank reads only its part.
"""

from lockstep_engine.quantized.schemes import Scheme, read_scheme

__all__ = ["Scheme", "read_scheme"]
