"""The Journal service over gRPC, on memory and on a real Redis."""

import grpc
from lockstep_api.v1 import inference_pb2, state_pb2
from lockstep_common.protocol import NO_TOKENS
from state_serving import refused, served

OK = state_pb2.WRITE_OUTCOME_OK
STALE = state_pb2.WRITE_OUTCOME_STALE
UNKNOWN = state_pb2.WRITE_OUTCOME_UNKNOWN
GAP = state_pb2.WRITE_OUTCOME_GAP
CONFLICT = state_pb2.WRITE_OUTCOME_CONFLICT
SEALED = state_pb2.WRITE_OUTCOME_SEALED
FULL = state_pb2.WRITE_OUTCOME_FULL
TOO_LARGE = state_pb2.WRITE_OUTCOME_TOO_LARGE
INVALID = state_pb2.WRITE_OUTCOME_INVALID
STOP = inference_pb2.FINISH_REASON_STOP


def record(choices=1, **fields):
    sampling = inference_pb2.Sampling(max_tokens=100, seed=7)
    values = {"schema": 1, "model": "reference", "request": b"\0private"}
    return state_pb2.StreamRecord(
        prompts=[inference_pb2.TokenIds(ids=[1, 2, 3])],
        choices=[state_pb2.StreamChoice(stream_id=f"s{n}", sampling=sampling) for n in range(choices)],
        **values | fields,
    )


def piece(choice, position, *ids, **fields):
    return state_pb2.Piece(choice=choice, position=position, ids=ids, **fields)


def write(client, stream_id="stream", **fields):
    values = {"tenant": client.tenant, "stream_id": stream_id, "epoch": 1}
    if "record" in fields:
        values["owner"] = "router-1"
    return state_pb2.StreamWrite(**values | fields)


async def append(client, *writes):
    response = await client.journal.Append(state_pb2.AppendRequest(writes=writes))
    return [result.outcome for result in response.results]


async def append_one(client, **fields):
    (result,) = (await client.journal.Append(state_pb2.AppendRequest(writes=[write(client, **fields)]))).results
    return result


def reading(client, stream_id="stream", positions=(), tenant=None):
    request = state_pb2.ReadRequest(tenant=tenant or client.tenant, stream_id=stream_id, positions=positions)
    return client.journal.Read(request)


def taking(client, owner="router-2", tenant=None):
    return client.journal.Take(
        state_pb2.TakeRequest(tenant=tenant or client.tenant, stream_id="stream", owner=owner, ttl_s=60)
    )


async def test_stream_is_read_as_it_was_appended(client):
    logprobs = [inference_pb2.Logprobs(chosen=inference_pb2.TokenLogprob(id=n, logprob=-n)) for n in (5, 6)]
    opened = write(client, record=record(2), pieces=[piece(0, 0, 5, 6, logprobs=logprobs), piece(1, 0, 9)])
    assert await append(client, opened) == [OK]
    grown = piece(1, 1, 8, finish=STOP, cached_tokens=2, inexact=True, numerics="n", unproven=True)
    assert await append(client, write(client, pieces=[grown])) == [OK]
    stored = await reading(client)
    assert stored.record == record(2)
    first, second = stored.logs
    assert (list(first.ids), list(first.logprobs), first.finish) == ([5, 6], logprobs, 0)
    assert (list(second.ids), second.finish, second.cached_tokens, second.inexact) == ([9, 8], STOP, 2, True)
    assert (second.numerics, first.unproven, second.unproven) == ("n", False, True)
    assert (stored.epoch, stored.owner, stored.HasField("seal")) == (1, "router-1", False)
    later = await reading(client, positions=[1])
    assert [(log.position, list(log.ids), len(log.logprobs)) for log in later.logs] == [(1, [6], 1), (0, [9, 8], 0)]


async def test_stream_is_read_without_its_tokens(client):
    """If they are wanted of no choice; a choice without a position is wanted from its beginning."""
    await refused(reading(client, positions=[NO_TOKENS]), grpc.StatusCode.NOT_FOUND)
    await append_one(client, record=record(2), pieces=[piece(0, 0, 5), piece(1, 0, 9)])
    await taking(client)
    assert (await append_one(client, epoch=2, seal=state_pb2.Seal(outcome=b"end"))).outcome == OK
    stored = await reading(client, positions=[NO_TOKENS] * 2)
    assert (stored.record, stored.epoch, stored.owner) == (record(2), 2, "router-2")
    assert stored.seal.outcome == b"end"
    assert not stored.logs
    assert [list(log.ids) for log in (await reading(client, positions=[NO_TOKENS])).logs] == [[], [9]]
    assert [list(log.ids) for log in (await reading(client, positions=[NO_TOKENS, 0])).logs] == [[], [9]]


async def test_each_write_of_a_batch_has_its_outcome(client):
    await append(client, write(client, "old", record=record(), pieces=[piece(0, 0, 5)]))
    outcomes = await append(
        client,
        write(client, "new", record=record(), pieces=[piece(0, 0, 1)]),
        write(client, "unknown", pieces=[piece(0, 0, 1)]),
        write(client, "old", pieces=[piece(0, 1, 6)]),
        write(client, "odd", record=record(), epoch=0),
        write(client, "new2", record=record(), seal=state_pb2.Seal(outcome=b"end")),
    )
    assert outcomes == [OK, UNKNOWN, OK, INVALID, OK]
    assert [list(log.ids) for log in (await reading(client, "old")).logs] == [[5, 6]]
    assert (await reading(client, "new2")).seal.outcome == b"end"
    await refused(reading(client, "odd"), grpc.StatusCode.NOT_FOUND)


async def test_repeats_change_nothing_and_gaps_are_refused(client):
    for _ in range(3):
        assert (await append_one(client, record=record(), pieces=[piece(0, 0, 5, 6)])).outcome == OK
    gap = await append_one(client, pieces=[piece(0, 4, 8)])
    assert (gap.outcome, gap.choice, gap.length) == (GAP, 0, 2)
    assert (await append_one(client, pieces=[piece(0, 1, 7)])).outcome == CONFLICT
    assert (await append_one(client, record=record(model="other"))).outcome == CONFLICT
    assert [list(log.ids) for log in (await reading(client)).logs] == [[5, 6]]


async def test_router_that_takes_a_stream_fences_the_other(client):
    await append_one(client, record=record(), pieces=[piece(0, 0, 5)])
    taken = await taking(client)
    assert (taken.epoch, taken.owner, list(taken.logs[0].ids)) == (2, "router-2", [5])
    stale = await append_one(client, pieces=[piece(0, 1, 6)])
    assert (stale.outcome, stale.epoch) == (STALE, 2)
    assert (await append_one(client, epoch=2, pieces=[piece(0, 1, 7)])).outcome == OK
    assert list((await reading(client)).logs[0].ids) == [5, 7]


async def test_sealed_stream_stays_as_it_is_until_it_is_trimmed(client):
    seal = state_pb2.Seal(outcome=b"end")
    await append_one(client, record=record(), pieces=[piece(0, 0, 5)])
    for _ in range(2):
        assert (await append_one(client, seal=seal)).outcome == OK
    assert (await append_one(client, pieces=[piece(0, 1, 6)])).outcome == SEALED
    assert (await append_one(client, seal=state_pb2.Seal(outcome=b"other"))).outcome == SEALED
    assert (await reading(client)).seal == seal
    trim = state_pb2.TrimRequest(tenant=client.tenant, stream_ids=["stream", "none"])
    assert (await client.journal.Trim(trim)).trimmed == 1
    error = await refused(reading(client), grpc.StatusCode.NOT_FOUND)
    assert ("lockstep-error-code", "stream_not_found") in tuple(error.trailing_metadata())


async def test_one_request_gets_an_idempotency_key(client):
    def claim(request_id, fingerprint):
        request = state_pb2.ClaimRequest(
            tenant=client.tenant, key="key", request_id=request_id, fingerprint=fingerprint, ttl_s=60
        )
        return client.journal.Claim(request)

    def release(request_id):
        request = state_pb2.ReleaseClaimRequest(tenant=client.tenant, key="key", request_id=request_id)
        return client.journal.Release(request)

    def look_up(tenant=client.tenant):
        return client.journal.LookUpClaim(state_pb2.LookUpClaimRequest(tenant=tenant, key="key"))

    assert (await look_up()).request_id == ""
    assert (await claim("one", b"a")).granted
    assert (await claim("one", b"a")).granted
    found = await look_up()
    assert (found.granted, found.request_id, found.fingerprint) == (False, "one", b"a")
    assert (await look_up(client.tenant + "x")).request_id == ""
    other = await claim("two", b"b")
    assert (other.granted, other.request_id, other.fingerprint) == (False, "one", b"a")
    assert not (await release("two")).released
    assert (await release("one")).released
    assert (await claim("two", b"b")).granted


async def test_foreign_tenant_gets_nothing(client):
    await append_one(client, record=record(), pieces=[piece(0, 0, 5)])
    stranger = f"{client.tenant}-other"
    await refused(reading(client, tenant=stranger), grpc.StatusCode.NOT_FOUND)
    await refused(taking(client, tenant=stranger), grpc.StatusCode.NOT_FOUND)
    trim = state_pb2.TrimRequest(tenant=stranger, stream_ids=["stream"])
    assert (await client.journal.Trim(trim)).trimmed == 0
    assert (await append_one(client, tenant=stranger, pieces=[piece(0, 1, 6)])).outcome == UNKNOWN
    claim = state_pb2.ClaimRequest(key="key", request_id="mine", ttl_s=60)
    for tenant in (client.tenant, stranger):
        claim.tenant = tenant
        assert (await client.journal.Claim(claim)).granted
    stored = await reading(client)
    assert (stored.epoch, list(stored.logs[0].ids)) == (1, [5])


async def test_invalid_writes_name_their_field_and_are_not_stored(client):
    wrong = {
        "tenant": {"tenant": ""},
        "stream_id": {"stream_id": "x" * 513},
        "epoch": {"epoch": 1 << 60},
        "ttl_s": {"ttl_s": float("nan")},
        "owner": {"owner": ""},
        "left_s": {"left_s": float("nan")},
        "record.schema": {"record": record(schema=2)},
        "record.choices": {"record": record(0)},
        "record.prompts": {"record": state_pb2.StreamRecord(schema=1, choices=[state_pb2.StreamChoice()])},
        "pieces": {"pieces": [piece(0, 0, 5), piece(0, 1, 6)]},
        "pieces.choice": {"pieces": [piece(1 << 20, 0, 5)]},
        "pieces.finish": {"pieces": [piece(0, 0, 5, finish=99)]},
        "pieces.numerics": {"pieces": [piece(0, 0, 5, numerics="x" * 513)]},
        "pieces.logprobs": {"pieces": [piece(0, 0, 5, 6, logprobs=[inference_pb2.Logprobs()])]},
    }
    for field, fields in wrong.items():
        result = await append_one(client, **{"record": record(), "owner": "router-1", "pieces": []} | fields)
        assert (result.outcome, result.field) == (INVALID, field)
        await refused(reading(client), grpc.StatusCode.NOT_FOUND)
    twice = [write(client, record=record(), pieces=[piece(0, 0, n)]) for n in (5, 6)]
    assert await append(client, *twice) == [OK, INVALID]
    assert list((await reading(client)).logs[0].ids) == [5]


async def test_invalid_calls_name_their_field(client):
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    journal = client.journal
    await refused(journal.Append(state_pb2.AppendRequest()), invalid, "writes")
    await refused(journal.Read(state_pb2.ReadRequest(tenant="t")), invalid, "stream_id")
    await refused(journal.Take(state_pb2.TakeRequest(tenant="t", stream_id="s")), invalid, "owner")
    await refused(journal.Trim(state_pb2.TrimRequest(tenant="t")), invalid, "stream_ids")
    claim = state_pb2.ClaimRequest(tenant="t", key="k", request_id="r", fingerprint=bytes(129))
    await refused(journal.Claim(claim), invalid, "fingerprint")
    await refused(journal.Claim(state_pb2.ClaimRequest(tenant="t", request_id="r")), invalid, "key")
    await refused(journal.LookUpClaim(state_pb2.LookUpClaimRequest(tenant="t")), invalid, "key")


async def test_message_that_is_too_large_is_refused_and_serving_goes_on(client):
    huge = write(client, record=record(request=bytes(17 << 20)))
    await refused(client.journal.Append(state_pb2.AppendRequest(writes=[huge])), grpc.StatusCode.RESOURCE_EXHAUSTED)
    await refused(reading(client), grpc.StatusCode.NOT_FOUND)
    assert (await append_one(client, record=record())).outcome == OK


async def test_tenants_have_quotas_of_their_own(tmp_path, store):
    quotas = {"max_tenant_streams": 3, "max_stream_bytes": 4096, "max_tenant_bytes": 1 << 20, "max_batch": 4}
    async with served(tmp_path, store=store, **quotas) as client:
        opened = [write(client, f"s{n}", record=record()) for n in range(4)]
        assert await append(client, *opened) == [OK, OK, OK, FULL]
        assert (await append_one(client, stream_id="s1", pieces=[piece(0, 0, 5)])).outcome == OK
        many = [piece(0, 1, *range(100_000, 102_000))]
        assert (await append_one(client, stream_id="s1", pieces=many)).outcome == TOO_LARGE
        other = write(client, "s3", tenant=f"{client.tenant}-other", record=record())
        assert await append(client, other) == [OK]
        assert list((await reading(client, "s1")).logs[0].ids) == [5]
        batch = state_pb2.AppendRequest(writes=[*opened, other])
        await refused(client.journal.Append(batch), grpc.StatusCode.INVALID_ARGUMENT, "writes")


async def test_a_tenants_claims_take_no_room_of_others(tmp_path, store):
    quotas = {"max_memory_bytes": 1 << 20, "max_tenant_bytes": 256 << 10}
    async with served(tmp_path, store=store, **quotas) as client:
        assert (await append_one(client, record=record(), seal=state_pb2.Seal(outcome=b"end"))).outcome == OK
        mine = state_pb2.ClaimRequest(tenant=client.tenant, key="k", request_id="r1", ttl_s=600)
        assert (await client.journal.Claim(mine)).granted
        stranger, granted = f"{client.tenant}-other", 0
        for number in range(4000):
            claim = state_pb2.ClaimRequest(tenant=stranger, key=f"k{number}", request_id="r", ttl_s=600)
            try:
                granted += (await client.journal.Claim(claim)).granted
            except grpc.aio.AioRpcError:
                break
        await refused(client.journal.Claim(claim), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert 100 < granted < 1000
        bind = state_pb2.BindRequest(tenant=stranger, session="s", worker_id="w", ttl_s=600)
        await refused(client.sessions.Bind(bind), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert (await reading(client)).seal.outcome == b"end"
        found = await client.journal.LookUpClaim(state_pb2.LookUpClaimRequest(tenant=client.tenant, key="k"))
        assert found.request_id == "r1"
