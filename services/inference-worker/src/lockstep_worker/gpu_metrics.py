"""Prometheus metrics of the ranks' GPUs, as NVML gives them. Only workers with `device: cuda` have values."""

from lockstep_common.telemetry import REGISTRY
from prometheus_client import Counter, Gauge

AVAILABLE = Gauge(
    "lockstep_worker_gpu_health_available",
    "1 while NVML reports on the rank's GPU; 0: the other metrics of this GPU are missing or old, and the log says why",
    ["rank"],
    registry=REGISTRY,
)
UTILIZATION = Gauge(
    "lockstep_worker_gpu_utilization_ratio",
    "Share of the last second in which the GPU ran any kernel, of whatever process",
    ["rank"],
    registry=REGISTRY,
)
MEMORY = Gauge(
    "lockstep_worker_gpu_memory_bytes",
    "Memory of the GPU or of its MIG instance: `used` by all processes, and `total`",
    ["rank", "kind"],
    registry=REGISTRY,
)
POWER = Gauge("lockstep_worker_gpu_power_watts", "Power that the GPU draws", ["rank"], registry=REGISTRY)
TEMPERATURE = Gauge("lockstep_worker_gpu_temperature_celsius", "Temperature of the GPU", ["rank"], registry=REGISTRY)
THROTTLED = Gauge(
    "lockstep_worker_gpu_throttled",
    "1 while the GPU's clock is lowered, by reason: `thermal`, `power`, or `hardware` for both and for a power brake",
    ["rank", "reason"],
    registry=REGISTRY,
)
ECC_ERRORS = Counter(
    "lockstep_worker_gpu_ecc_errors_total",
    "Errors of the GPU's memory since the worker started: `corrected`, or `uncorrected` and data was lost",
    ["rank", "kind"],
    registry=REGISTRY,
)
XID_ERRORS = Counter(
    "lockstep_worker_gpu_xid_errors_total",
    "Critical errors that the driver has reported of the GPU, by NVIDIA's number",
    ["rank", "xid"],
    registry=REGISTRY,
)
NVLINKS = Gauge(
    "lockstep_worker_gpu_nvlinks",
    "NVLinks of the GPU that are `up` or `down`",
    ["rank", "state"],
    registry=REGISTRY,
)
NVLINK_ERRORS = Counter(
    "lockstep_worker_gpu_nvlink_errors_total",
    "Replays, recoveries and checksum errors of the GPU's NVLinks since the worker started",
    ["rank"],
    registry=REGISTRY,
)
