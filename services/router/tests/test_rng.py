"""A router's random choices come from one source: with equal sources, equal choices."""

from random import Random

from lockstep_api.v1 import inference_pb2
from lockstep_router.generation.request import Caller, GenerationRequest, TokenPrompt
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.tenants.tenant import Tenant
from router_cluster import eventually


async def choices_of(targets, rng):
    """The stream id and the seed of a request that names no seed."""
    async with Router(RouterSettings(workers=targets), rng=rng) as router:
        await eventually(router.workers.ready)
        request = GenerationRequest("reference", Caller("u"), (TokenPrompt([5]),), inference_pb2.Sampling(), 4)
        prepared = await router.prepare(request, router.limits.account(Tenant("t")))
        (journal,) = prepared.journals
        return journal.stream_id, journal.sampling.seed


async def test_equal_sources_give_equal_streams_and_others_give_others(cluster):
    targets = tuple(worker.target for worker in cluster.workers)
    first = await choices_of(targets, Random(1))
    assert await choices_of(targets, Random(1)) == first
    assert await choices_of(targets, Random(2)) != first
    assert await choices_of(targets, None) != await choices_of(targets, None)
