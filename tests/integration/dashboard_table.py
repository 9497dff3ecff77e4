"""What returns no data in `test_dashboards`, and why: the beginnings of names of `scraper.queries`."""

AFTER_FAULTS = {
    "failures: Silence of a stream that moves": "no stream has moved",
    "service: Silence of a stream that moves": "no stream has moved",
    "tenants: Requests that were refused or failed": "no request of a tenant was refused",
}
"""None before something goes wrong."""

NOT_HERE = {
    "ranks: GPUs": "needs a GPU",
    "alert: LockstepGpu": "needs a GPU",
    "service: State server: memory: max by (pod) (lockstep_state_memory_limit_bytes": "0 with Redis",
    "service: State server: evicted and damaged: sum by (kind)": "none with Redis",
    "alert: LockstepStateEvictsStreams": "none with Redis",
    "alert: LockstepRouterProcessDown": "needs a router of several processes",
    "alert: LockstepStateRefuses: lockstep_state_calls_total{": "needs a tenant beyond its quota",
    "alert: LockstepCertificate": "needs TLS; `test_alerts` has it",
}
"""None in this test at all."""
