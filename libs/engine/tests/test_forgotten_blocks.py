"""What a request has computed whose logits are no numbers: no later request begins with it, wherever it is."""

import numpy as np
import pytest
from lockstep_common.errors import ErrorCode
from lockstep_engine.block_tables import BlockTables
from lockstep_engine.blocks import HostSizes, PoolSizes
from lockstep_engine.config import BLOCK_SIZE, HotWindow
from lockstep_engine.plan import NO_TOKEN, Result
from lockstep_engine.request import Request, SamplingParams
from lockstep_engine.sequence import Sequence
from scripted_ranks import Server, words
from test_block_pool import keys_of, text
from test_host_tier import LONG, serve


def run_first_without_numbers(server):
    """One step in which the newest request's logits are no numbers, then all others to the end."""
    result = server.ranks.execute(server.scheduler.schedule())
    result.token_ids[-1] = NO_TOKEN
    server.finish(result)
    server.run()


def failure(server, number):
    return server.outputs[number][-1].error.code


def known(server):
    """Keys that the prefix cache knows, in the pools and in host memory."""
    pools = server.pool.hot, server.pool.cold
    keys = [key.tokens for pool in pools for key in pool._keys if key is not None]
    return {*keys, *(held.key.tokens for held in server.pool.host._held.values())}


def blocks_of(prompt):
    return {key.tokens for key in keys_of(prompt)}


def test_a_request_that_is_preempted_before_its_result_comes_leaves_nothing():
    server = Server(blocks=4, depth=2)
    older, newer = (server.submit(words(2 * BLOCK_SIZE - 1, seed), max_tokens=17) for seed in (1, 2))
    server.plan()
    server.step()
    server.plan()  # the older request needs a block, for which the newer one gives up its own
    assert server.scheduler.sequences.preemptions == 1
    assert blocks_of(words(2 * BLOCK_SIZE - 1, 2)) & known(server)
    server._results[0].token_ids[1] = NO_TOKEN
    server.run()
    assert failure(server, newer) is ErrorCode.NUMERICAL_ERROR
    assert server.ids(older) == server.expected(older)
    assert not blocks_of(words(2 * BLOCK_SIZE - 1, 2)) & known(server)
    server.assert_idle()


def test_an_embedding_that_is_no_number_leaves_nothing():
    server = Server()
    number = server.embed(words(40, 1))
    plan = server.scheduler.schedule()
    server.finish(Result(plan.step, [], [], 0, 0, [], embeddings=np.full((1, 2), np.nan, np.float32)))
    assert failure(server, number) is ErrorCode.NUMERICAL_ERROR
    assert not known(server)
    server.assert_idle()


def test_a_block_that_is_still_to_be_loaded_stays_known():
    """Its next owner must cancel the load, which would overwrite what that one computes."""
    tables = BlockTables(PoolSizes(4, 0, HostSizes(slots=20, slot_bytes=10, step_slots=20)), None, 1, 128)
    keys = keys_of(text(1, 2))
    blocks = [tables.hot.allocate() for _ in keys]
    for block, key in zip(blocks, keys, strict=True):
        tables.hot.remember(block, key)
    tables.hot.release(blocks)
    taken = [tables.hot.allocate() for _ in range(4)]  # both are copied to host memory
    tables.host.take()
    tables.hot.release(taken)
    loading = tables.hot.allocate()
    tables.hot.remember(loading, keys[0])
    tables.host.pin(keys[:1], cold=False)
    tables.host.load(loading, keys[0], cold=False)
    tables.hot.release([loading])  # its owner was cancelled
    sequence = Sequence(Request("r", (1,), SamplingParams()), 0)
    sequence.keys = keys
    tables.forget(sequence)
    tables.check()
    assert tables.hot.find(keys[0]) == loading
    assert not tables.host.has(keys[1], cold=False)
    for _ in range(4):
        tables.hot.allocate()
    assert not tables.host.wait_for(loading)
    tables.check()


@pytest.mark.parametrize("hot_window", [None, HotWindow(sink=1, size=2)], ids=str)
def test_copies_in_host_memory_are_forgotten(hot_window):
    server = serve(hot_window)
    for seed in range(5):
        number = server.submit(words(LONG, seed), max_tokens=3)
        server.run()
    assert blocks_of(words(LONG, 0)) & {held.key.tokens for held in server.pool.host._held.values()}
    number = server.submit(words(LONG, 0), max_tokens=3)
    run_first_without_numbers(server)
    assert failure(server, number) is ErrorCode.NUMERICAL_ERROR
    assert not blocks_of(words(LONG, 0)) & known(server)
    server.assert_idle()
    again = server.submit(words(LONG, 0), max_tokens=3)
    server.run()
    assert server.outputs[again][0].cached_tokens == 0
    assert server.ids(again) == server.expected(again)


def test_what_a_request_has_computed_that_is_cancelled_before_its_output_is_not_stored():
    server, stored = Server(), []
    server.scheduler.on_end = lambda sequence: stored.append((sequence.request.id, sequence.remembered))
    first = server.submit(words(100, 1))
    server.step()
    assert server.cancel(first)
    second = server.submit(words(100, 2), max_tokens=20)
    while not server.outputs[second]:
        server.step()
    assert server.cancel(second)
    third = server.embed(words(100, 3))
    server.run()
    assert server.embedding(third)
    assert stored == [(str(second), 6), (str(third), 6)]
    server.assert_idle()
