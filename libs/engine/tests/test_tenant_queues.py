"""Queues of tenants that take turns."""

from lockstep_engine.tenant_queues import TenantQueues


def test_tenants_take_turns_and_each_has_its_oldest_item_first():
    queues = TenantQueues(10)
    for item in range(3):
        queues.add("a", item)
    queues.add("b", 7)
    assert len(queues) == 4
    taken = []
    while tenant := next(iter(queues), None):
        taken.append((tenant, queues.first(tenant), queues.pop(tenant)))
        queues.end_turn(tenant)
    assert taken == [("a", 0, 0), ("b", 7, 7), ("a", 1, 1), ("a", 2, 2)]
    assert queues.first("a") is None
    assert not queues


def test_a_flood_drops_the_oldest_items_of_its_own_tenant():
    queues = TenantQueues(4)
    queues.add("b", 1)
    for item in range(100):
        queues.add("a", item)
    queues.add("c", 2)
    assert len(queues) == 4
    assert [queues.first(each) for each in ("a", "b", "c")] == [98, 1, 2]


def test_the_number_of_tenants_is_bounded(monkeypatch):
    monkeypatch.setattr("lockstep_engine.tenant_queues.MAX_TENANTS", 2)
    queues = TenantQueues(10)
    for tenant in ("a", "b", "c", "a"):
        queues.add(tenant, 0)
    assert list(queues) == ["a", "b"]
    assert len(queues) == 3
