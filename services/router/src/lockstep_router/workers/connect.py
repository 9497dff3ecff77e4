"""Connects to a worker with a second attempt if the first one takes long: "happy eyeballs" (RFC 8305).

The second attempt goes to the worker's next address or, if it has only one, to the same again: a lost SYN is repeated
by the kernel after a second only. The first connection that is established wins, and only that one carries a call.
"""

import asyncio
from collections.abc import Callable, Sequence

import grpc

from lockstep_router import metrics

_ESTABLISHED = grpc.ChannelConnectivity.READY
_FAILED = frozenset({grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN})


async def connect(
    targets: Sequence[str], open_channel: Callable[[str], grpc.aio.Channel], hedge_after_s: float
) -> grpc.aio.Channel:
    """An established channel. If all attempts fail, one that has failed: a call on it says why.

    Cancelling closes all channels.

    Args:
        targets: the worker's addresses, in the order of preference.
        open_channel: opens a channel to a target.
        hedge_after_s: pause before the next attempt while others are pending; a failed one is followed at once.
    """
    waiting = list(targets) if len(targets) > 1 else [*targets, *targets]
    failed_targets: set[str] = set()
    pending: dict[asyncio.Task[bool], tuple[str, grpc.aio.Channel]] = {}
    failed: grpc.aio.Channel | None = None
    try:
        while True:
            waiting = [target for target in waiting if target not in failed_targets]
            if waiting:
                target = waiting.pop(0)
                if pending or failed is not None:
                    metrics.HEDGED_CONNECTS.inc()
                channel = open_channel(target)
                pending[asyncio.create_task(_is_established(channel))] = (target, channel)
            elif not pending:
                assert failed is not None
                last, failed = failed, None
                return last
            timeout_s = hedge_after_s if waiting else None
            done, _ = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in pending if task in done]:
                target, channel = pending.pop(task)
                if task.result():
                    return channel
                failed_targets.add(target)
                if failed is not None:
                    await failed.close()
                failed = channel
    finally:
        # Its own connection attempts end with a channel.
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for channel in [*(channel for _, channel in pending.values()), *([failed] if failed else [])]:
            await channel.close()


async def _is_established(channel: grpc.aio.Channel) -> bool:
    """Wait until the channel is established or has failed."""
    state = channel.get_state(try_to_connect=True)
    while state is not _ESTABLISHED and state not in _FAILED:
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
    return state is _ESTABLISHED
