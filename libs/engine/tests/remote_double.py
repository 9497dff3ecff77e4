"""A store for KV blocks in this process, which can be told to misbehave."""

import asyncio
import math

from lockstep_engine import FetchResult


class MemoryStore:
    """Keeps parts of blocks.

    Attributes:
        parts: by tenant, name and heads.
        outcome: if set, every fetch ends with it.
        most: blocks that a fetch finds at most.
        spoils: writes something else to the first part before it does what it does.
        gate: if set, a fetch waits for it after it has begun to write.
        room: parts that it still takes; None: all.
        is_away: whether it is.
        lost_at: it keeps only what it has taken since then.
        asked: for each fetch the tenant and the number of blocks.
        began: set while a fetch waits for the gate.
    """

    fetch_timeout_s = 5.0

    def __init__(self):
        self.parts = {}
        self.outcome = None
        self.error = None
        self.most = 10**6
        self.spoils = False
        self.gate = None
        self.room = None
        self.is_away = False
        self.lost_at = -math.inf
        self.on_lost = lambda _: None
        self.asked = []
        self.estimates = []
        self.offers = []
        self.began = asyncio.Event()

    async def fetch(self, tenant, hashes, heads, form, recompute_s, into, further_bytes):
        self.asked.append((tenant, len(hashes)))
        self.estimates.append(recompute_s(len(hashes)))
        if self.spoils:
            into(0, 0)[:] = b"\xff" * form.length
        if self.gate is not None:
            self.began.set()
            await self.gate.wait()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if self.outcome is not None:
            return FetchResult(0, self.outcome)
        count = 0
        for index, name in enumerate(hashes[: self.most]):
            found = [self.parts.get((tenant, name, each)) for each in heads]
            if None in found:
                break
            for rank, (content, stored) in enumerate(found):
                assert stored == form
                into(index, rank)[:] = content
            count += 1
        return FetchResult(count, "fetched" if count else "absent")

    def is_kept(self, offered_at):
        return offered_at > self.lost_at

    def offer(self, tenant, blocks):
        taken = len(blocks) if self.room is None else min(self.room, len(blocks))
        if self.room is not None:
            self.room -= taken
        for each in blocks[:taken]:
            assert len(each.content) == each.form.length
            self.offers.append((tenant, each.hash, each.heads))
            self.parts[tenant, each.hash, each.heads] = bytes(each.content), each.form
        return taken
