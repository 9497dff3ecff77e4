"""The metrics by which autoscalers and the Gateway API's inference extension know vLLM, with this worker's values.

They are shown only if the setting `vllm_metric_names` is on.
"""

from collections.abc import Iterator

from lockstep_engine import EngineStatus
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

LABELS = ("model_name",)
_GAUGES = {
    "vllm:num_requests_running": "Requests in the batch, as lockstep_worker_running",
    "vllm:num_requests_waiting": "Requests waiting, as lockstep_worker_queued",
    "vllm:kv_cache_usage_perc": "Share of the KV blocks that running requests use; not a percentage",
    "vllm:gpu_cache_usage_perc": "The same by its former name",
}


class VllmNames(Collector):
    """The gauges of one model.

    Args:
        registry: shows them, once `model` is set.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.model = ""
        """The value of the label; empty: nothing is shown."""
        self._values = dict.fromkeys(_GAUGES, 0.0)
        registry.register(self)

    def observe(self, status: EngineStatus) -> None:
        """Take the values of a status."""
        used = 1 - status.free_blocks / status.total_blocks if status.total_blocks else 0.0
        self._values = dict(zip(_GAUGES, (float(status.running), float(status.queued), used, used), strict=True))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The present values."""
        if self.model:
            yield from self.families()

    def families(self) -> Iterator[GaugeMetricFamily]:
        """The same, whether or not they are shown."""
        for (name, meaning), value in zip(_GAUGES.items(), self._values.values(), strict=True):
            family = GaugeMetricFamily(name, meaning, labels=LABELS)
            family.add_metric((self.model,), value)
            yield family
