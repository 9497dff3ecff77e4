"""Kernels for the CPU (`cpu`) and for GPUs (`triton_*`).

Where no kernel can run, `rowwise` and `attention_torch` compute with torch instead. The tests compare each Triton
kernel with a twin in plain torch (`tests/twins.py`).
"""
