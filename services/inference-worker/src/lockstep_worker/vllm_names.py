"""The metrics by which autoscalers and the Gateway API's inference extension know vLLM, with this worker's values.

They are shown only if the setting `vllm_metric_names` is on.
"""

from collections.abc import Iterator

from lockstep_common.prefix_keys import BLOCK_TOKENS
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

LABELS = ("model_name",)
CACHE_INFO = "vllm:cache_config_info"
"""The extension reads its labels, of which vLLM has more."""
CACHE_LABELS = (*LABELS, "block_size", "num_gpu_blocks")
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
        self._blocks = 0
        registry.register(self)

    def observe(self, running: int, queued: int, kv_usage: float, blocks: int) -> None:
        """Take the present numbers of requests, the share of the KV blocks that is in use, and the number of all; 0:
        it is not known yet.
        """
        self._values = dict(zip(_GAUGES, (float(running), float(queued), kv_usage, kv_usage), strict=True))
        self._blocks = blocks

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
        meaning = "1 for the tokens of a KV block, and the number of blocks as lockstep_worker_total_blocks"
        info = GaugeMetricFamily(CACHE_INFO, meaning, labels=CACHE_LABELS)
        if self._blocks:
            info.add_metric((self.model, str(BLOCK_TOKENS), str(self._blocks)), 1.0)
        yield info
