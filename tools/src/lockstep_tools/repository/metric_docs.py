"""Write the generated parts of `docs/metrics.md`: all metrics of the services, as the code defines them.

`--check` fails when they differ.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import lockstep_router.metrics
import lockstep_state.metrics
import lockstep_worker.gpu_metrics
import lockstep_worker.metrics
from lockstep_common import tls
from lockstep_common.distributions import Distribution, Distributions
from lockstep_common.tallies import Tallies, Tally
from lockstep_common.tracing import metrics as tracing_metrics
from lockstep_router.processes.answers import process_metrics
from lockstep_router.top_tallies import TopTallies
from lockstep_worker import vllm_names
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from lockstep_tools.repository.generated_parts import fill, write_or_check

DOCUMENT = Path(__file__).resolve().parents[4] / "docs/metrics.md"

LABELS = {
    "block_size": "one: the tokens of a KV block",
    "bound": "two values: `least`, `most`",
    "calls": "two values: `requests`, `mirror`",
    "certificate": "the certificates that a service's settings name",
    "code": "HTTP or gRPC statuses, and the codes of errors (docs/api.md)",
    "decision": "why a trace was kept, named in the description, or `dropped`",
    "direction": "two values: `in`, `out`",
    "endpoint": "the routes of the API; what is none of them counts as one",
    "face": "three values: `http`, `websocket`, `grpc`",
    "fingerprint": "one at a time: that of the current ranks",
    "kind": "the kinds of entries of the store in memory; of a rank's memory two: `resident`, `device`; of a "
    "GPU's memory two: `used`, `total`; of its errors two: `corrected`, `uncorrected`",
    "limit": "the limits that a tenant can have",
    "method": "the methods of the state server's API",
    "model_name": "the worker's model",
    "model": "models of the workers that discovery finds, never a name of a request",
    "num_gpu_blocks": "one at a time: the KV blocks of the current ranks",
    "operation": "the operations of the store",
    "outcome": "a fixed set, named in the description or by the protocol",
    "policy": "the policies of routing that the settings name",
    "problem": "four values: `suspected`, `ejected`, `slow`, `hotspot`",
    "process": "the processes of a router (setting `processes`), and `parent`",
    "rank": "the ranks of a worker (setting `tp`)",
    "reason": "a fixed set, named in the description or by the code",
    "served_model": "one: the name of the worker's model in the API, which routers have as `model`",
    "state": "the states of a worker; of NVLinks two: `up`, `down`",
    "status": "gRPC statuses in lower case",
    "tenant": "the 20 tenants that had most in the last minutes; the rest as `other`",
    "tier": "two values: `hot`, `cold`",
    "use": "two values: `used`, `free`",
    "way": "three values: `in`, `out`, `dropped`",
    "xid": "NVIDIA's numbers of errors, about 170",
}
"""Every label of the services' own metrics, and what bounds its values. No label has a value that a client chooses."""

_Metric = MetricWrapperBase | Tally | Tallies | TopTallies | Distribution | Distributions

_SUFFIXES = {
    "_timestamp_seconds": "seconds since 1970",
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_ratio": "0 to 1",
    "_watts": "watts",
    "_celsius": "degrees Celsius",
    "_tokens": "tokens",
    "_blocks": "blocks",
    "_info": "always 1",
}
_UNITS = {
    "lockstep_router_load_imbalance": "ratio, 1 or more",
    "lockstep_worker_remote_cache_bytes_per_second": "bytes/s",
    "vllm:kv_cache_usage_perc": "0 to 1",
    "vllm:gpu_cache_usage_perc": "0 to 1",
    "vllm:cache_config_info": "always 1",
}
_ABBREVIATED = re.compile(r"_(ms|us|ns|s|kb|mb|gb|kib|mib|gib|percent|pct)$")


@dataclass(frozen=True)
class MetricFacts:
    """A metric as the code defines it."""

    name: str
    """As Prometheus stores it: a counter's ends in `_total`; a histogram's series are NAME_bucket, _sum and _count."""
    kind: str
    """`counter`, `gauge` or `histogram`."""
    labels: tuple[str, ...]
    unit: str
    meaning: str


def services() -> dict[str, list[MetricFacts]]:
    """All metrics, by the service that has them; `all services` for those that each has."""
    supervised = process_metrics(CollectorRegistry())
    return {
        "router": [*_facts_of(lockstep_router.metrics), *map(_facts, supervised)],
        "worker": [*_facts_of(lockstep_worker.metrics), *_facts_of(lockstep_worker.gpu_metrics)],
        "worker, with `vllm_metric_names`": _vllm_facts(),
        "state server": list(_facts_of(lockstep_state.metrics)),
        "all services, with TLS": list(_facts_of(tls)),
        "all services, with traces": list(_facts_of(tracing_metrics)),
    }


def tables() -> str:
    """A section with a table for each service."""
    lines = []
    for service, facts in services().items():
        lines += [f"### {service[0].upper()}{service[1:]}", ""]
        lines += ["| name | type | labels | unit | meaning |", "| --- | --- | --- | --- | --- |"]
        for each in sorted(facts, key=lambda facts: facts.name):
            labels = ", ".join(f"`{label}`" for label in each.labels)
            lines.append(f"| `{each.name}` | {each.kind} | {labels} | {each.unit} | {each.meaning} |")
        lines.append("")
    return "\n".join(lines)


def labels() -> str:
    """The table of all labels."""
    used = {label for facts in services().values() for each in facts for label in each.labels}
    lines = ["| label | its values |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{label}` | {LABELS[label]} |" for label in sorted(used)), ""])


def complete(text: str) -> str:
    """The document with its generated parts up to date."""
    return fill(text, {"tables": tables(), "labels": labels()})


def _facts_of(module: ModuleType) -> Iterator[MetricFacts]:
    for value in vars(module).values():
        if isinstance(value, _Metric):
            yield _facts(value)


def _vllm_facts() -> list[MetricFacts]:
    return [
        MetricFacts(
            name=family.name,
            kind=family.type,
            labels=vllm_names.CACHE_LABELS if family.name == vllm_names.CACHE_INFO else vllm_names.LABELS,
            unit=_UNITS.get(family.name, "count"),
            meaning=family.documentation,
        )
        for family in lockstep_worker.metrics.VLLM_NAMES.families()
    ]


def _facts(metric: _Metric) -> MetricFacts:
    (family,) = metric.collect()
    names = metric._labelnames if isinstance(metric, MetricWrapperBase) else getattr(metric, "names", ())
    meaning = " ".join(family.documentation.split())
    return MetricFacts(
        name=f"{family.name}_total" if family.type == "counter" else family.name,
        kind=family.type,
        labels=tuple(names),
        unit=_unit(family.name, meaning),
        meaning=meaning if meaning.endswith(".") else f"{meaning}.",
    )


def _unit(name: str, meaning: str) -> str:
    """A metric's unit.

    Raises:
        ValueError: the name ends in a unit that is not a base unit, or in an abbreviation.
    """
    if _ABBREVIATED.search(name):
        raise ValueError(f"{name}: use a base unit, in full: {', '.join(_SUFFIXES)}")
    if name in _UNITS:
        return _UNITS[name]
    for suffix, unit in _SUFFIXES.items():
        if name.endswith(suffix):
            return unit
    return "0 or 1" if meaning.startswith(("1 while", "1 for")) else "count"


if __name__ == "__main__":
    write_or_check(DOCUMENT, complete, "lockstep_tools.repository.metric_docs")
