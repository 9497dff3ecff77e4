"""The router's Prometheus metrics. Labels are few and bounded: no ids, no sessions, no text."""

from lockstep_common.telemetry import REGISTRY
from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)

REQUESTS = Counter(
    "lockstep_router_requests", "Answered requests; 499: the client left.", ["endpoint", "code"], registry=REGISTRY
)
REQUEST_SECONDS = Histogram(
    "lockstep_router_request_duration_seconds",
    "From a request's arrival to the end of its answer.",
    ["endpoint"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
FIRST_TOKEN_SECONDS = Histogram(
    "lockstep_router_time_to_first_token_seconds",
    "From submitting a stream to its first token.",
    buckets=_SECONDS,
    registry=REGISTRY,
)
INTER_TOKEN_SECONDS = Histogram(
    "lockstep_router_inter_token_latency_seconds",
    "Between two deliveries of tokens to one stream, failovers included.",
    buckets=_SECONDS,
    registry=REGISTRY,
)
PROMPT_TOKENS = Counter("lockstep_router_prompt_tokens", "Tokens of accepted prompts.", registry=REGISTRY)
GENERATED_TOKENS = Counter("lockstep_router_generated_tokens", "Tokens taken from workers.", registry=REGISTRY)
STREAMS = Gauge("lockstep_router_streams", "Streams now under way.", registry=REGISTRY)
FAILOVERS = Counter(
    "lockstep_router_failovers", "Streams that left their worker and went on, by reason.", ["reason"], registry=REGISTRY
)
FAILOVER_GAP_SECONDS = Histogram(
    "lockstep_router_failover_gap_seconds",
    "Between the last token before a failover and the first after it.",
    buckets=_GAP_SECONDS,
    registry=REGISTRY,
)
DROPPED_FRAMES = Counter(
    "lockstep_router_dropped_frames", "Frames of workers that were not taken, by reason.", ["reason"], registry=REGISTRY
)
WORKERS = Gauge("lockstep_router_workers", "Workers by state as this router sees them.", ["state"], registry=REGISTRY)
DISCOVERED = Gauge("lockstep_router_discovered_workers", "Workers as discovery last found them.", registry=REGISTRY)
DISCOVERY_ERRORS = Counter(
    "lockstep_router_discovery_errors", "Times that the workers could not be looked for.", registry=REGISTRY
)
DISCOVERY_AGE_SECONDS = Gauge(
    "lockstep_router_discovery_age_seconds",
    "Since discovery last found the workers; 0 for a static list.",
    registry=REGISTRY,
)
