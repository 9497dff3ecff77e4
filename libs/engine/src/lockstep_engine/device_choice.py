"""Which device a rank computes on, and in which type."""

import torch
from lockstep_common.errors import invalid

from lockstep_engine.config import EngineConfig


def pick_device(config: EngineConfig, rank: int) -> torch.device:
    """The rank's device. auto: a GPU if there is one for each rank, else the CPU."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and available < config.tp:
        raise invalid("device", f"cuda with tp = {config.tp} needs {config.tp} GPUs; this machine has {available}")
    if config.device == "cuda" or (config.device == "auto" and available >= config.tp):
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def pick_dtype(wanted: str, stored: str, device: torch.device) -> torch.dtype:
    """The type of weights and activations. auto: float32 on the CPU, else the type that is stored."""
    name = wanted
    if wanted == "auto":
        name = "float32" if device.type == "cpu" else stored
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
