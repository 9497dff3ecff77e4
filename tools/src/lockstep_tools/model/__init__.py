"""Work on checkpoints: GGUF conversion, accuracy measurements, training. Its modules import torch or numpy."""
