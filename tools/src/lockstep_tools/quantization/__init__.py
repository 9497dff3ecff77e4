"""Makes quantized checkpoints: `rounding`, `gptq` and `awq` turn a matrix into codes and scales, `folds` finds what
takes the scales of a matrix's inputs, `layers` walks a model one decoder layer at a time, `files` writes the
compressed-tensors format, `production` and `automatic` put them together.
"""
