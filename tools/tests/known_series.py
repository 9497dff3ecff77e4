"""The names of all series of the metrics, as queries use them."""

from lockstep_tools.repository.metric_docs import MetricFacts, services


def series() -> set[str]:
    return {name for facts in services().values() for each in facts for name in _series_of(each)}


def _series_of(metric: MetricFacts) -> tuple[str, ...]:
    if metric.kind == "histogram":
        return tuple(metric.name + end for end in ("_bucket", "_sum", "_count"))
    return (metric.name,)
