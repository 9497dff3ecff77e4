"""The router's Prometheus metrics. Labels are few and bounded: no ids, no sessions, no text.

Modules that count by reason name their reasons to the counter when they are loaded, so that each is there from 0: of a
series that begins at 1, Prometheus sees no increase.
"""

from lockstep_common.distributions import Distribution, Distributions
from lockstep_common.tallies import Tallies, Tally
from lockstep_common.telemetry import REGISTRY
from prometheus_client import Counter, Gauge

from lockstep_router.top_tallies import TopTallies

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TENANTS = 20
_GAP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)

REQUESTS = Tallies(
    "lockstep_router_requests",
    "Answered requests, by face (`http`, `websocket`, `grpc`) and the REST endpoint that does the same; 499: the "
    "client disconnected.",
    ["face", "endpoint", "code"],
    registry=REGISTRY,
)
REQUEST_SECONDS = Distributions(
    "lockstep_router_request_duration_seconds",
    "From a request's arrival to the end of its answer.",
    ["face", "endpoint"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
REFUSED_CONNECTIONS = Counter(
    "lockstep_router_refused_connections",
    "Connections closed before a request was accepted, by the HTTP status of the response.",
    ["code"],
    registry=REGISTRY,
)
KEYS_RELOADS = Counter(
    "lockstep_router_keys_reloads",
    "Times that the changed file of API keys was read, by outcome: `loaded`, or `failed` and the old keys were kept.",
    ["outcome"],
    registry=REGISTRY,
)
LIMITED = Counter(
    "lockstep_router_limited",
    "Requests refused because of a limit of their tenant, by limit.",
    ["limit"],
    registry=REGISTRY,
)
LIMITS_FALLBACK = Gauge(
    "lockstep_router_limits_fallback",
    "1 while the storage of limits does not answer and this router counts in its own memory.",
    registry=REGISTRY,
)
LIMITS_STORAGE_FAILURES = Counter(
    "lockstep_router_limits_storage_failures",
    "Operations of the storage of limits that failed or took too long.",
    registry=REGISTRY,
)
FIRST_TOKEN_SECONDS = Distribution(
    "lockstep_router_time_to_first_token_seconds",
    "From a request's arrival to the first token of each of its streams.",
    buckets=_SECONDS,
    registry=REGISTRY,
)
INTER_TOKEN_SECONDS = Distribution(
    "lockstep_router_inter_token_latency_seconds",
    "Between two deliveries of tokens to one stream, failovers included.",
    buckets=_SECONDS,
    registry=REGISTRY,
)
PROMPT_TOKENS = Tally("lockstep_router_prompt_tokens", "Tokens of accepted prompts.", registry=REGISTRY)
GENERATED_TOKENS = Tally("lockstep_router_generated_tokens", "Tokens accepted from workers.", registry=REGISTRY)
STREAMS_ENDED = Tallies(
    "lockstep_router_streams_ended",
    "Streams that have ended, by outcome: `finished`, also at a stop string, `cancelled` because the client left, or "
    "the code of the error.",
    ["outcome"],
    registry=REGISTRY,
)
TENANT_REQUESTS = TopTallies(
    "lockstep_router_tenant_requests",
    "Answered requests with a valid API key, by tenant and status; the tenants with most, the rest as `other`.",
    ["tenant", "code"],
    places=_TENANTS,
    registry=REGISTRY,
)
TENANT_TOKENS = TopTallies(
    "lockstep_router_tenant_tokens",
    "Tokens of these requests, of prompts (`in`) or delivered (`out`).",
    ["tenant", "direction"],
    places=_TENANTS,
    registry=REGISTRY,
)
STREAMS = Tally("lockstep_router_streams", "Streams in progress.", registry=REGISTRY, is_gauge=True)
FAILOVERS = Counter(
    "lockstep_router_failovers",
    "Times that a stream left its worker to continue on another one, by reason; `overloaded`: the worker refused it, "
    "because it was full; `slow_client`: it waits without a worker until its client has read more.",
    ["reason"],
    registry=REGISTRY,
)
INEXACT_CONTINUATIONS = Counter(
    "lockstep_router_inexact_continuations",
    "Times that a stream continued on a worker whose numerics fingerprint differs or is unknown.",
    registry=REGISTRY,
)
QUARANTINED = Counter(
    "lockstep_router_quarantined",
    "Streams ended because several workers in a row died while running them.",
    registry=REGISTRY,
)
RETRIES_DELAYED = Counter(
    "lockstep_router_retries_delayed", "Retries that had to wait for the retry budget.", registry=REGISTRY
)
QUEUE_REFUSALS = Counter(
    "lockstep_router_queue_refusals",
    "Requests refused at once because their estimated wait was longer than their limit.",
    registry=REGISTRY,
)
PICKS = Tallies(
    "lockstep_router_picks",
    "Attempts of streams sent to a worker, by the policy that chose it.",
    ["policy"],
    registry=REGISTRY,
)
PREFIX_INDEX_BLOCKS = Gauge(
    "lockstep_router_prefix_index_blocks",
    "Cached blocks of a model's workers that this router knows or guesses, for its policy.",
    ["model"],
    registry=REGISTRY,
)
PREFIX_REPORTS = Counter(
    "lockstep_router_prefix_reports", "Reports of workers about their cached blocks.", registry=REGISTRY
)
PREFIX_SNAPSHOTS = Counter(
    "lockstep_router_prefix_snapshots",
    "Times that a worker was asked for all of its cached blocks: at the `start` of a connection, after a `gap` in its "
    "reports, or because its room in the index was `full`.",
    ["reason"],
    registry=REGISTRY,
)
PREFIX_PREDICTED_TOKENS = Counter(
    "lockstep_router_prefix_predicted_tokens",
    "Tokens of prompts that were expected to be cached on the worker that was chosen.",
    registry=REGISTRY,
)
PREFIX_CACHED_TOKENS = Counter(
    "lockstep_router_prefix_cached_tokens", "Tokens of the same prompts that were cached there.", registry=REGISTRY
)
PREFIX_WRONG_TOKENS = Counter(
    "lockstep_router_prefix_wrong_tokens",
    "Difference of the two for each prompt, whichever was larger.",
    registry=REGISTRY,
)
POLICY_FAILURES = Counter(
    "lockstep_router_policy_failures",
    "Times that a policy of another package raised or named an unknown worker.",
    registry=REGISTRY,
)
LOAD_IMBALANCE = Gauge(
    "lockstep_router_load_imbalance",
    "Requests on the most loaded ready worker of a model over the average; 1 if they have fewer than one each.",
    ["model"],
    registry=REGISTRY,
)
IMPAIRED_WORKERS = Gauge(
    "lockstep_router_impaired_workers",
    "Workers of a model that are `suspected`, `ejected`, `slow` or a `hotspot`, as this router sees them.",
    ["model", "problem"],
    registry=REGISTRY,
)
IMPAIRMENTS = Counter(
    "lockstep_router_impairments",
    "Times that a worker became suspected, ejected, slow or a hotspot.",
    ["problem"],
    registry=REGISTRY,
)
HEDGED_CONNECTS = Counter(
    "lockstep_router_hedged_connects",
    "Further attempts to connect to a worker because the first one took long or failed.",
    registry=REGISTRY,
)
WAIT_SECONDS = Distribution(
    "lockstep_router_wait_seconds",
    "From a stream's arrival to its start on a worker.",
    buckets=_SECONDS,
    registry=REGISTRY,
)
FAILOVER_GAP_SECONDS = Distribution(
    "lockstep_router_failover_gap_seconds",
    "Between the last token before a failover and the first after it.",
    buckets=_GAP_SECONDS,
    registry=REGISTRY,
)
RESUMES = Counter(
    "lockstep_router_resumes",
    "Requests to resume a stream: it was `running` or `finished`, there was none (`not_found`), the position was "
    "`invalid`, or the router `refused`.",
    ["outcome"],
    registry=REGISTRY,
)
IDEMPOTENT_JOINS = Counter(
    "lockstep_router_idempotent_joins",
    "Requests that got the answer of an earlier one with the same idempotency key.",
    registry=REGISTRY,
)
TAKEOVERS = Counter(
    "lockstep_router_takeovers",
    "Streams of other routers that were asked for here: they were `continued`, were `finished` and are given again, "
    "there was none (`not_found`), the state server did not answer (`away`), or the router `refused`.",
    ["outcome"],
    registry=REGISTRY,
)
STREAMS_TAKEN = Counter(
    "lockstep_router_streams_taken", "Streams of this router that another router has taken over.", registry=REGISTRY
)
JOURNAL_LAG_SECONDS = Gauge(
    "lockstep_router_journal_lag_seconds",
    "Age of the oldest tokens of resumable streams that the state server does not have yet.",
    registry=REGISTRY,
)
JOURNAL_WRITE_SECONDS = Distribution(
    "lockstep_router_journal_write_seconds",
    "From a change of a resumable stream until the state server had it.",
    buckets=(0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60),
    registry=REGISTRY,
)
JOURNAL_WRITES = Counter(
    "lockstep_router_journal_writes",
    "Writes to streams in the state server, by outcome; `dropped`: the stream had left this router's memory before.",
    ["outcome"],
    registry=REGISTRY,
)
STATE_CLAIMS = Counter(
    "lockstep_router_state_claims",
    "Idempotency keys asked for at the state server: `granted`, another request has it (`known`), or it did not answer "
    "and the key holds on this router only (`away`).",
    ["outcome"],
    registry=REGISTRY,
)
STATE_FAILURES = Counter(
    "lockstep_router_state_failures",
    "Failed calls of the state server, by status of gRPC.",
    ["status"],
    registry=REGISTRY,
)
STATE_BREAKER = Gauge(
    "lockstep_router_state_breaker_open",
    "1 while the state server is not called, because it did not answer: calls that `requests` of clients wait for, and "
    "those of the `mirror` of the journals.",
    ["calls"],
    registry=REGISTRY,
)
DETACHED_STREAMS = Gauge(
    "lockstep_router_detached_streams", "Resumable requests that run without a client.", registry=REGISTRY
)
KEPT_STREAMS = Gauge(
    "lockstep_router_kept_streams", "Resumable requests that have ended and are kept.", registry=REGISTRY
)
KEPT_BYTES = Gauge(
    "lockstep_router_kept_stream_bytes",
    "Memory of the journals of resumable requests, about, those that run included.",
    registry=REGISTRY,
)
DROPPED_FRAMES = Counter(
    "lockstep_router_dropped_frames",
    "Dropped messages of workers, by reason: frames of an old epoch; tokens, phases or rejections of a stream.",
    ["reason"],
    registry=REGISTRY,
)
WORKERS = Gauge("lockstep_router_workers", "Workers by state as this router sees them.", ["state"], registry=REGISTRY)
READY_WORKERS = Gauge(
    "lockstep_router_ready_workers",
    "Workers of a model that take requests, as this router sees them; 0 for a model that it knows and that has none.",
    ["model"],
    registry=REGISTRY,
)
QUEUED_REQUESTS = Gauge(
    "lockstep_router_queued_requests",
    "Requests of all routers that wait on the ready workers of a model, as these last reported.",
    ["model"],
    registry=REGISTRY,
)
NO_WORKER = Counter(
    "lockstep_router_no_worker",
    "Times that a request looked for a worker of its model, found none that takes it and waits for one; `model` is "
    "empty if this router does not know the model.",
    ["model"],
    registry=REGISTRY,
)
DISCOVERED = Gauge("lockstep_router_discovered_workers", "Workers that discovery found last.", registry=REGISTRY)
UNLISTED_WORKERS = Gauge(
    "lockstep_router_unlisted_workers",
    "Workers that discovery no longer lists and that stay in use because they are connected and well.",
    registry=REGISTRY,
)
DISCOVERY_ERRORS = Counter(
    "lockstep_router_discovery_errors", "Failed attempts to discover the workers.", registry=REGISTRY
)
DISCOVERY_AGE_SECONDS = Gauge(
    "lockstep_router_discovery_age_seconds",
    "Seconds since discovery last had a complete answer; 0 for a static list.",
    registry=REGISTRY,
)
