"""The metrics by which autoscalers and the Gateway API's inference extension know vLLM, with this worker's values.

They are shown only if the setting `vllm_metric_names` is on.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

LABELS = ("model_name",)
_GAUGES = {
    "vllm:num_requests_running": "Requests in the batch, as lockstep_worker_running",
    "vllm:num_requests_waiting": "Requests waiting, as lockstep_worker_queued",
    "vllm:kv_cache_usage_perc": "As lockstep_worker_kv_usage_ratio; not a percentage",
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

    def observe(self, running: int, queued: int, kv_usage: float) -> None:
        """Take the present numbers of requests and the share of the KV blocks that is in use."""
        self._values = dict(zip(_GAUGES, (float(running), float(queued), kv_usage, kv_usage), strict=True))

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
