"""Makes quantized checkpoints: `rounding` and `gptq` turn a matrix into codes and scales, `layers` walks a model one
decoder layer at a time, `files` writes the compressed-tensors format, `production` and `automatic` put them together.
"""
