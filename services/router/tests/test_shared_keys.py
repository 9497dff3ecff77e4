"""Keys that are renewed in a state server, more than the mirror has room for at once."""

from lockstep_router.journals.mirror import _MAX_CHORES
from lockstep_router.journals.shared_keys import SharedKeys
from lockstep_router.journals.stored_form import Key

KEYS = 3 * _MAX_CHORES


class Renewals:
    """In place of the mirror and of the client: does a second's chores at the end of it, and notes them."""

    def __init__(self):
        self.chores = []
        self.renewed = []

    def add_chore(self, work):
        self.chores.append(work)

    async def renew(self, request):
        self.renewed.append(request.request_id)

    async def second_passes(self, keys):
        keys.tend(lambda _: True)
        assert len(self.chores) <= _MAX_CHORES, "the mirror would leave some out"
        for work in self.chores:
            await work()
        self.chores.clear()


async def test_after_the_state_server_was_away_every_key_is_renewed():
    renewals = Renewals()
    keys = SharedKeys(renewals, renewals, ttl_s=3600.0)
    for number in range(KEYS):
        keys.adopt(f"r-{number}", Key(f"tenant/{number}", "ab"))
    keys.renew_soon()
    keys.forget("r-7")
    for _ in range(KEYS):
        await renewals.second_passes(keys)
        if len(renewals.renewed) >= KEYS - 1:
            break
    await renewals.second_passes(keys)
    assert sorted(renewals.renewed) == sorted(f"r-{number}" for number in range(KEYS) if number != 7)
