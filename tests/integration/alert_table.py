"""Which alerts are fired by a fault of running services, and which by promtool alone.

`charts/lockstep/tests/alerts.yaml` lets promtool fire and resolve every alert from written series. What is here in
addition shows that the fault makes these series.
"""

INJECTED = {
    "LockstepNoRouter": "test_a_router_that_is_not_there_and_its_files",
    "LockstepCertificateExpires": "test_a_router_that_is_not_there_and_its_files",
    "LockstepCertificateNotReloaded": "test_a_router_that_is_not_there_and_its_files",
    "LockstepKeysNotReloaded": "test_a_router_that_is_not_there_and_its_files",
    "LockstepLimitsNotShared": "test_a_router_that_is_not_there_and_its_files",
    "LockstepStepStalled": "test_a_rank_that_hangs",
    "LockstepErrors": "test_a_rank_that_hangs",
    "LockstepErrorBudgetBurnsFast": "test_a_rank_that_hangs",
    "LockstepErrorBudgetBurnsSlowly": "test_a_rank_that_hangs",
    "LockstepSlowFirstToken": "test_a_rank_that_hangs",
    "LockstepRankDown": "test_ranks_that_do_not_come_back",
    "LockstepWorkerNotReady": "test_ranks_that_do_not_come_back",
    "LockstepModelDown": "test_ranks_that_do_not_come_back",
    "LockstepNoWorkerReady": "test_ranks_that_do_not_come_back",
    "LockstepSlowFailover": "test_ranks_that_do_not_come_back",
    "LockstepRankRestarts": "test_ranks_that_die_again_and_again",
    "LockstepFailovers": "test_ranks_that_die_again_and_again",
    "LockstepKvPressure": "test_a_full_cache",
    "LockstepKvCacheFull": "test_a_cache_that_stays_full",
    "LockstepOverload": "test_routers_that_fill_the_same_queues",
    "LockstepWorkerEjected": "test_a_worker_whose_ranks_die_under_what_the_other_completes",
    "LockstepDiscoveryStale": "test_a_router_that_is_not_there_and_its_files",
    "LockstepStateServerUnreachable": "test_a_state_server_that_hangs",
    "LockstepJournalLag": "test_a_state_server_that_hangs",
    "LockstepStateStoreUnreachable": "test_a_redis_that_is_away_or_full",
    "LockstepStateStoreFull": "test_a_redis_that_is_away_or_full",
    "LockstepStateMemoryNearLimit": "test_a_memory_that_is_full",
    "LockstepStateRefuses": "test_a_memory_that_is_full",
    "LockstepStateEvictsStreams": "test_a_memory_that_is_full",
    "LockstepStateDamagedValues": "test_a_redis_that_others_write_into",
    "LockstepImbalance": "test_a_session_that_overloads_its_worker",
    "LockstepHotspot": "test_a_session_that_overloads_its_worker",
    "LockstepWorkerSlow": "test_a_worker_that_crawls",
    "LockstepLateHeartbeats": "test_heartbeats_that_come_late",
    "LockstepSlowRank": "test_everything_that_tells_of_ranks_names_the_slow_one",
}

NOT_INJECTED = {
    "LockstepGpuXid": "needs a GPU that fails",
    "LockstepGpuEccErrors": "needs a GPU that fails",
    "LockstepGpuThrottled": "needs a GPU that is too hot",
    "LockstepGpuNotWatched": "needs a GPU that is lost",
    "LockstepRouterProcessDown": "needs a router of several processes; its own tests show the series",
}
"""By promtool alone, and why."""
