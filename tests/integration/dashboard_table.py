"""What returns no data in `test_dashboards`, and why: the beginnings of names of `scraper.queries`."""

AFTER_FAULTS = {
    "failures: Silence of a stream that moves": "no stream has moved",
    "service: Silence of a stream that moves": "no stream has moved",
    "tenants: Requests that were refused or failed": "no request of a tenant was refused",
}
"""None before something goes wrong."""

OTHER_STACK = {
    "ranks: GPUs": "needs GPUs",
    "alert: LockstepGpu": "needs GPUs",
    "service: State server: memory: max by (pod) (lockstep_state_memory_limit_bytes": "0 with Redis",
    "service: State server: evicted and damaged: sum by (kind)": "none with Redis",
    "alert: LockstepStateEvictsStreams": "none with Redis",
    "alert: LockstepRouterProcessDown": "needs a router of several processes",
    "alert: LockstepStateRefuses: lockstep_state_calls_total{": "needs a store that is full",
    "alert: LockstepCertificate": "needs TLS",
}
"""None in this test at all: `test_gpu_stack` has them."""
