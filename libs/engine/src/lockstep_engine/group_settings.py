"""What a rank group needs to start its ranks: threads, sizes of shared memory, the environment of their processes."""

import os
from dataclasses import dataclass

from lockstep_common.cpu_limit import usable_cpus

from lockstep_engine.config import EngineConfig
from lockstep_engine.control import RankSpec
from lockstep_engine.model_config import ModelInfo
from lockstep_engine.plan import message_sizes
from lockstep_engine.sizes import collectives_segment_bytes

RUN_ZYGOTE = "from lockstep_engine.zygote import main; main()"
"""Code for `python -c` that runs a zygote."""


@dataclass(frozen=True)
class GroupSettings:
    """What a supervisor needs to start ranks."""

    spec: RankSpec
    """The specification of rank 0; those of the others differ only in `rank`. Each start sets the epoch."""
    plan_bytes: int
    result_bytes: int
    collectives_bytes: int
    """Size of the shared segment for collectives; 0: the ranks use torch.distributed."""
    environment: dict[str, str]
    """Variables that the ranks have before any library is loaded."""
    host_bytes: int = 0
    """Size of each rank's tier in host memory if the driver reads and writes it too; 0: it does not."""
    zygote: str = RUN_ZYGOTE
    """Code for `python -c` that runs the zygote. Tests run scripted ranks with it."""

    @property
    def has_flight_records(self) -> bool:
        """Whether the ranks may use torch.distributed: they do on GPUs."""
        config = self.spec.config
        return config.tp > 1 and (config.device != "cpu" or not self.collectives_bytes)


def rank_threads(cpus: float, tp: int) -> int:
    """CPU threads of each of `tp` ranks that share `cpus`. Rounded down: with more threads than its limit a container
    is stopped for a part of every period, and each step waits for the slowest thread.
    """
    return max(1, int(cpus / tp))


def group_settings(config: EngineConfig, model: ModelInfo, zygote: str = RUN_ZYGOTE) -> GroupSettings:
    """The settings of a rank group that serves a model; the model has been inspected."""
    threads = config.threads or rank_threads(usable_cpus(), config.tp)
    spec = RankSpec(rank=0, epoch=0, config=config, model=model, threads=threads)
    plan_bytes, result_bytes = message_sizes(spec)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        # libgomp's threads otherwise wait for the next step in a loop that keeps their cores from the driver. This ends
        # after some ten microseconds; the threads of a step meet sooner than that.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "3000"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
        # Its stderr is a pipe that drops what does not fit; a buffered one would raise an error then.
        "PYTHONUNBUFFERED": "1",
        # As NVML orders them, by which the worker watches the ranks' GPUs. CUDA's own order begins with the fastest.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # By default torch keeps 2,000 collectives: more than flight_record.MAX_RECORD_BYTES.
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "256"),
        # Asking the CUDA runtime would initialise it in the zygote, and a forked child could not use it.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    return GroupSettings(
        spec=spec,
        plan_bytes=plan_bytes,
        result_bytes=result_bytes,
        collectives_bytes=collectives_segment_bytes(spec),
        environment=environment,
        zygote=zygote,
    )
