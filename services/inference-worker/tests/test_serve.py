import asyncio
import contextlib
import dataclasses

import grpc
import pytest
from harness import PATIENCE_S, Router, make_settings, open_channel, served, submit, tokenizer_json, until
from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_engine import FinishReason, Logprobs, Output, Phase, TokenLogprob
from scripted_engine import CONTEXT_LENGTH, VOCAB_SIZE, Script, token_at

PROMPT = (1, 2, 3)


async def test_hello_and_status_come_first(worker):
    router = worker.router()
    hello = await router.greet()
    assert router.kinds() == ["hello"]
    assert (await router.next()).HasField("status")
    assert hello.worker_id == "w0"
    assert hello.incarnation > 1_700_000_000 * 10**9
    card = hello.model
    assert (card.name, card.tp, card.deterministic) == ("tiny", 2, True)
    assert (card.context_length, card.vocab_size) == (CONTEXT_LENGTH, VOCAB_SIZE)
    assert len(card.tokenizer_digest) == 64
    assert {frame.epoch for frame in router.seen} == {1}


async def test_the_card_has_the_grammar_engine_once_it_is_known(worker):
    router = worker.router()
    assert (await router.greet()).model.grammar_engine == ""
    worker.engine.grammar_engine = "compiler 1"
    assert (await router.next("hello")).hello.model.grammar_engine == "compiler 1"


async def test_nothing_is_sent_before_the_routers_hello(worker):
    router = worker.router()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await router.call.read()


@pytest.mark.parametrize("frame", [{"submit": submit()}, {"cancel": worker_pb2.Cancel(stream_id="s")}, {}])
async def test_a_first_frame_other_than_hello_is_refused(worker, frame):
    router = worker.router()
    await router.send(**frame)
    code, details = await router.end()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "RouterHello" in details


async def test_a_second_hello_is_refused(worker):
    router = await worker.greeted()
    await router.send(hello=worker_pb2.RouterHello(router_id="r0"))
    assert (await router.end())[0] == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("is_greeted", [False, True])
async def test_a_message_that_cannot_be_decoded_is_refused(worker, is_greeted):
    serve = worker.channel.stream_stream(
        "/lockstep.v1.Worker/Serve", response_deserializer=worker_pb2.WorkerFrame.FromString
    )
    call = serve()
    if is_greeted:
        hello = worker_pb2.RouterFrame(hello=worker_pb2.RouterHello(router_id="r"))
        await call.write(hello.SerializeToString())
    await call.write(b"\xff\xff")
    code, details = await Router(call).end()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be decoded" in details


async def test_a_request_for_the_tokenizer_that_cannot_be_decoded_is_refused(worker):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await worker.channel.unary_unary("/lockstep.v1.Worker/Tokenizer")(b"\x13")
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_stream_that_ends_at_once_ends_with_its_status(worker, is_refused):
    """Also where the end interrupts the worker's first frame, which is a matter of chance."""
    hello = worker_pb2.RouterHello(router_id="r0")
    for _ in range(300):
        router = worker.router()
        await router.send(hello=hello)
        await (router.send(hello=hello) if is_refused else router.call.done_writing())
        assert (await router.end())[0] == (grpc.StatusCode.INVALID_ARGUMENT if is_refused else grpc.StatusCode.OK)


async def test_several_frames_in_one_message_are_taken_in_order(worker):
    router = await worker.greeted()
    assert (await worker.router().greet()).accepts_several
    frames = [worker_pb2.RouterFrame(submit=submit(name)) for name in ("a", "b", "c")]
    frames.append(worker_pb2.RouterFrame(cancel=worker_pb2.Cancel(stream_id="b", attempt=1)))
    await router.send(several=worker_pb2.RouterFrames(frames=frames))
    await until(lambda: len(worker.engine.requests) == 2)
    worker.engine.step()
    assert [stream.stream_id for stream in (await router.next("tokens")).tokens.streams] == ["a", "c"]


async def test_a_message_of_many_frames_does_not_keep_the_loop_from_others(worker):
    router = await worker.greeted()
    frames = [worker_pb2.RouterFrame(submit=submit(f"s{number}")) for number in range(1000)]
    await router.send(several=worker_pb2.RouterFrames(frames=frames))
    async with asyncio.timeout(PATIENCE_S):
        while not worker.engine.requests:
            await asyncio.sleep(0)
    assert len(worker.engine.requests) < len(frames), "others would wait for all of them"
    await until(lambda: len(worker.engine.requests) == len(frames))


async def test_a_second_hello_among_several_frames_is_refused(worker):
    router = await worker.greeted()
    hello = worker_pb2.RouterFrame(hello=worker_pb2.RouterHello(router_id="r0"))
    await router.send(several=worker_pb2.RouterFrames(frames=[hello]))
    assert (await router.end())[0] == grpc.StatusCode.INVALID_ARGUMENT


async def test_one_tokens_frame_a_step_holds_all_streams_of_the_router(worker):
    router = await worker.greeted()
    for name in ("a", "b", "c"):
        await router.send(submit=submit(name))
    await until(lambda: len(worker.engine.requests) == 3)
    for _ in range(4):
        worker.engine.step()
    frames = [(await router.next("tokens")).tokens for _ in range(4)]
    for position, frame in enumerate(frames):
        assert [stream.stream_id for stream in frame.streams] == ["a", "b", "c"]
        for stream in frame.streams:
            assert (stream.attempt, stream.position) == (1, position)
            assert list(stream.ids) == [token_at(PROMPT, position)]
    assert {stream.finish for stream in frames[-1].streams} == {inference_pb2.FINISH_REASON_LENGTH}
    assert {stream.finish for stream in frames[-2].streams} == {inference_pb2.FINISH_REASON_UNSPECIFIED}


async def test_a_resumed_stream_goes_on_where_it_was(worker):
    router = await worker.greeted()
    emitted = [token_at(PROMPT, position) for position in range(2)]
    await router.send(submit=submit(attempt=3, emitted_ids=emitted, tenant="t", priority=-1))
    await until(lambda: worker.engine.requests)
    (request,) = worker.engine.requests.values()
    assert (request.prompt_ids, request.emitted_ids) == (PROMPT, tuple(emitted))
    assert (request.tenant, request.priority) == ("t", -1)
    worker.engine.step()
    (stream,) = (await router.next("tokens")).tokens.streams
    assert (stream.attempt, stream.position, list(stream.ids)) == (3, 2, [token_at(PROMPT, 2)])


async def test_a_stream_that_is_complete_already_is_finished(worker):
    router = await worker.greeted()
    await router.send(submit=submit(attempt=2, emitted_ids=[1, 2, 3, 4], max_tokens=4))
    (stream,) = (await router.next("tokens")).tokens.streams
    assert (stream.position, list(stream.ids), stream.finish) == (4, [], inference_pb2.FINISH_REASON_LENGTH)


async def test_logprobs_and_cached_tokens_arrive(worker):
    router = await worker.greeted()
    await router.send(submit=submit())
    await until(lambda: worker.engine.requests)
    entry = Logprobs(TokenLogprob(7, -0.5), (TokenLogprob(7, -0.5), TokenLogprob(9, -2.0)))
    (request_id,) = worker.engine.requests
    worker.engine.give([Output(request_id, 0, (7,), (entry,), FinishReason.STOP, cached_tokens=16)])
    (stream,) = (await router.next("tokens")).tokens.streams
    assert stream.finish == inference_pb2.FINISH_REASON_STOP
    assert stream.cached_tokens == 16
    (logprobs,) = stream.logprobs
    assert (logprobs.chosen.id, logprobs.chosen.logprob) == (7, -0.5)
    assert [(token.id, token.logprob) for token in logprobs.top] == [(7, -0.5), (9, -2.0)]


async def test_status_is_a_heartbeat(worker):
    router = await worker.greeted()
    began = asyncio.get_running_loop().time()
    for _ in range(20):  # some of them may have waited already
        status = (await router.next("status")).status
    assert asyncio.get_running_loop().time() - began > 0.2
    assert (status.free_blocks, status.total_blocks, status.tokens_per_s) == (64, 64, 12.5)
    assert [(rank.rank, rank.pid, rank.state) for rank in status.ranks] == [
        (0, 1000, worker_pb2.RANK_STATE_READY),
        (1, 1001, worker_pb2.RANK_STATE_READY),
    ]
    assert status.pid > 0


async def test_a_change_of_state_is_told_at_once(model_dir, socket_path):
    script = Script(ready_at_once=False)
    async with served(make_settings(model_dir, socket_path, status_interval_s=10), script) as worker:
        router = worker.router()
        await router.greet()
        assert (await router.status(worker_pb2.WORKER_STATE_STARTING)).reason == "loading: 50%"
        worker.engine.finish_start()
        await router.ready()
        worker.engine.lose_ranks()
        assert "SIGKILL" in (await router.status(worker_pb2.WORKER_STATE_RESTARTING)).reason


async def test_a_submit_while_starting_is_refused_as_unavailable(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path), Script(ready_at_once=False)) as worker:
        router = worker.router()
        await router.greet()
        await router.send(submit=submit())
        rejected = (await router.next("rejected")).rejected
        assert (rejected.code, rejected.retryable) == ("unavailable", True)
        assert not worker.engine.requests


async def test_a_lost_rank_fails_streams_and_raises_the_epoch(worker):
    router = await worker.greeted()
    await router.send(submit=submit("a", 2, max_tokens=100))
    await router.send(submit=submit("b", 1, max_tokens=100))
    await until(lambda: len(worker.engine.requests) == 2)
    worker.engine.step()
    worker.engine.lose_ranks()
    first = (await router.next("rejected")).rejected
    second = (await router.next("rejected")).rejected
    assert {(first.stream_id, first.attempt), (second.stream_id, second.attempt)} == {("a", 2), ("b", 1)}
    assert (first.code, first.retryable) == ("worker_lost", True)
    assert "SIGKILL" in first.message
    hello = await router.next("hello")
    status = await router.next()
    assert (hello.epoch, status.epoch) == (2, 2)
    assert status.status.state == worker_pb2.WORKER_STATE_RESTARTING
    assert {rank.state for rank in status.status.ranks} == {worker_pb2.RANK_STATE_DEAD}
    worker.engine.restart()
    await router.ready()
    await router.send(submit=submit("a", 3, max_tokens=2, emitted_ids=[token_at(PROMPT, 0)]))
    await until(lambda: worker.engine.requests)
    worker.engine.step()
    tokens = await router.next("tokens")
    assert tokens.epoch == 2
    assert tokens.tokens.streams[0].position == 1
    epochs = [frame.epoch for frame in router.seen]
    assert epochs == sorted(epochs)
    first_of_epoch = epochs.index(2)
    assert router.kinds()[first_of_epoch] == "hello"


async def test_cancel_frees_the_request(worker):
    router = await worker.greeted()
    await router.send(submit=submit(max_tokens=100))
    await until(lambda: worker.engine.requests)
    (request_id,) = worker.engine.requests
    await router.send(cancel=worker_pb2.Cancel(stream_id="s", attempt=1))
    await until(lambda: not worker.engine.requests)
    # What the engine had under way for it is dropped.
    worker.engine.give([Output(request_id, 0, (1,))])
    await router.send(submit=submit("next", max_tokens=1))
    await until(lambda: worker.engine.requests)
    worker.engine.step()
    assert (await router.next("tokens")).tokens.streams[0].stream_id == "next"
    assert "rejected" not in router.kinds()


@pytest.mark.parametrize(("stream_id", "attempt"), [("unknown", 1), ("s", 2), ("", 0)])
async def test_cancel_of_what_does_not_run_is_ignored(worker, stream_id, attempt):
    router = await worker.greeted()
    await router.send(submit=submit(max_tokens=1))
    await router.send(cancel=worker_pb2.Cancel(stream_id=stream_id, attempt=attempt))
    await until(lambda: worker.engine.requests)
    worker.engine.step()
    assert (await router.next("tokens")).tokens.streams[0].stream_id == "s"
    assert worker.engine.cancelled == []


async def test_a_later_attempt_replaces_the_live_one(worker):
    router = await worker.greeted()
    await router.send(submit=submit("s", 1, max_tokens=100))
    await router.send(submit=submit("s", 2, max_tokens=100))
    await until(lambda: worker.engine.cancelled)
    worker.engine.step()
    (stream,) = (await router.next("tokens")).tokens.streams
    assert stream.attempt == 2
    assert len(worker.engine.requests) == 1


async def test_the_same_attempt_twice_ends_both(worker):
    router = await worker.greeted()
    for _ in range(2):
        await router.send(submit=submit("s", 1, max_tokens=100))
    rejected = (await router.next("rejected")).rejected
    assert (rejected.code, rejected.field, rejected.retryable) == ("invalid_request", "attempt", False)
    assert not worker.engine.requests


async def test_an_older_attempt_does_not_disturb_the_live_one(worker):
    router = await worker.greeted()
    await router.send(submit=submit("s", 2, max_tokens=100))
    await router.send(submit=submit("s", 1, max_tokens=100))
    rejected = (await router.next("rejected")).rejected
    assert (rejected.attempt, rejected.field) == (1, "attempt")
    worker.engine.step()
    assert (await router.next("tokens")).tokens.streams[0].attempt == 2


@pytest.mark.parametrize("how", ["cancel", "half-close", "channel"])
async def test_a_router_that_goes_frees_its_requests(worker, how):
    stays = await worker.greeted("r1")
    await stays.send(submit=submit(max_tokens=100))
    async with open_channel(worker.address) as channel:
        goes = dataclasses.replace(worker, channel=channel).router()
        await goes.greet("r0")
        for name in ("a", "b"):
            await goes.send(submit=submit(name, max_tokens=100))
        await until(lambda: len(worker.engine.requests) == 3)
        if how == "cancel":
            goes.call.cancel()
        elif how == "half-close":
            await goes.call.done_writing()
            assert (await goes.end())[0] == grpc.StatusCode.OK
    await until(lambda: len(worker.engine.requests) == 1)
    assert len(worker.engine.cancelled) == 2
    worker.engine.step()
    assert (await stays.next("tokens")).tokens.streams[0].stream_id == "s"


async def test_routers_do_not_see_each_others_streams(worker):
    one, two = await worker.greeted("r1"), await worker.greeted("r2")
    for router, prompt in ((one, [1]), (two, [2])):
        await router.send(submit=submit("same", prompt_ids=prompt))
    await until(lambda: len(worker.engine.requests) == 2)
    worker.engine.step()
    for router, prompt in ((one, [1]), (two, [2])):
        (stream,) = (await router.next("tokens")).tokens.streams
        assert list(stream.ids) == [token_at(prompt, 0)]
    await one.send(cancel=worker_pb2.Cancel(stream_id="same", attempt=1))
    await until(lambda: len(worker.engine.requests) == 1)
    worker.engine.step()
    assert (await two.next("tokens")).tokens.streams[0].position == 1


async def test_a_router_that_does_not_read_is_cut_off_and_holds_up_nobody(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path, outgoing_frames=8)) as worker:
        slow, quick = await worker.greeted("slow"), await worker.greeted("quick")
        for router in (slow, quick):
            await router.send(submit=submit(max_tokens=100))
        await until(lambda: len(worker.engine.requests) == 2)
        slow_id = next(name for name in worker.engine.requests if name.startswith("1:"))
        steps = 0
        while slow_id in worker.engine.requests:
            steps += 1
            assert steps < 50
            other = [Output(name, steps - 1, (1,)) for name in worker.engine.requests if name != slow_id]
            worker.engine.give([Output(slow_id, 0, (5,) * 300_000), *other])
            assert (await quick.next("tokens")).tokens.streams[0].position == steps - 1
            await asyncio.sleep(0)
        assert worker.engine.cancelled == [slow_id]
        code, details = await slow.end()
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "slowly" in details
        again = await worker.greeted("slow")
        await again.send(submit=submit(attempt=2, max_tokens=100))
        await until(lambda: len(worker.engine.requests) == 2)


async def test_one_router_too_many_is_refused(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path, max_routers=1)) as worker:
        first = await worker.greeted()
        second = worker.router()
        await second.send(hello=worker_pb2.RouterHello(router_id="r1"))
        assert (await second.end())[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        first.call.cancel()
        await until(first.call.done)
        async with asyncio.timeout(PATIENCE_S):
            while True:  # the worker hears of it a little later
                with contextlib.suppress(grpc.aio.AioRpcError, EOFError):
                    await worker.greeted("r1")
                    break


async def test_the_deadline_ends_a_stream(worker):
    router = await worker.greeted()
    submitted = worker.engine.submit

    def submitted_and_stepped(request):
        submitted(request)
        # Before any deadline, however slow the machine is.
        asyncio.get_running_loop().call_soon(worker.engine.step)

    worker.engine.submit = submitted_and_stepped
    await router.send(submit=submit("early", deadline_s=0.5, max_tokens=1))
    await router.send(submit=submit("late", deadline_s=1.0, max_tokens=100))
    rejected = (await router.next("rejected")).rejected
    assert (rejected.stream_id, rejected.code, rejected.retryable) == ("late", "deadline_exceeded", False)
    assert worker.engine.cancelled == ["1:late:1"], "the deadline of the other has passed too, after its end"
    await router.next("status")
    assert router.kinds().count("rejected") == 1


async def test_an_unknown_kind_of_frame_is_ignored(worker):
    router = await worker.greeted()
    await router.send()
    await router.send(submit=submit())
    await until(lambda: worker.engine.requests)
    worker.engine.step()
    assert (await router.next("tokens")).tokens.streams[0].stream_id == "s"
    assert "rejected" not in router.kinds()


async def test_tokenizer_files_are_found_by_digest(worker):
    hello = await worker.router().greet()
    digest = hello.model.tokenizer_digest
    files = await worker.stub.Tokenizer(worker_pb2.TokenizerRequest(digest=digest))
    assert files.digest == digest
    assert files.tokenizer_json == tokenizer_json("hello").encode()
    assert b"bos_token" in files.tokenizer_config_json
    assert files.chat_template == "{{ messages }}"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.Tokenizer(worker_pb2.TokenizerRequest(digest="other"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_routers_are_told_when_their_streams_run_and_wait(worker):
    router, other = await worker.greeted(), await worker.greeted("r1")
    await router.send(submit=submit("a", attempt=3, max_tokens=100))
    (change,) = (await router.next("phases")).phases.streams
    assert (change.stream_id, change.attempt, change.phase) == ("a", 3, worker_pb2.STREAM_PHASE_RUNNING)
    worker.engine.change_phase("1:a:3", Phase.WAITING)
    (change,) = (await router.next("phases")).phases.streams
    assert change.phase == worker_pb2.STREAM_PHASE_WAITING
    assert "phases" not in other.kinds()


async def test_status_tells_the_wait_and_the_deadline_of_the_step(worker):
    router = await worker.greeted()
    worker.engine.queue_wait, worker.engine.step_deadline_s = (42.0, 1.5), 15.0
    status = (await router.next("status")).status
    while not status.queue_wait_s:
        status = (await router.next("status")).status
    assert (status.queue_wait_s, status.queue_wait_per_request_s) == (42.0, 1.5)
    assert status.step_deadline_s == 15.0
    assert status.free_seqs == worker.engine.config.max_seqs


async def test_status_says_how_many_submits_have_arrived_on_the_connection(worker):
    first, second = await worker.greeted("first"), await worker.greeted("second")
    for number in range(3):
        await first.send(submit=submit(f"s{number}", max_tokens=100))
    await first.send(submit=submit("s0", max_tokens=100))  # refused, but it has arrived
    while (await first.next("status")).status.received != 4:
        pass
    assert (await second.next("status")).status.received == 0


async def test_status_says_what_the_ranks_ran_when_they_were_lost(worker):
    first, second = await worker.greeted("first"), await worker.greeted("second")
    suspicions = (worker_pb2.SUSPICION_ON_TRIAL, worker_pb2.SUSPICION_SUSPECTED, worker_pb2.SUSPICION_NONE)
    for number, suspicion in enumerate(suspicions):
        await first.send(submit=submit(f"s{number}", max_tokens=100, suspicion=suspicion))
    await second.send(submit=submit("s", max_tokens=100))
    await second.send(submit=submit("waiting", max_tokens=100, suspicion=worker_pb2.SUSPICION_ON_TRIAL))
    await until(lambda: len(worker.engine.requests) == 5)
    waiting = next(request_id for request_id in worker.engine.requests if "waiting" in request_id)
    worker.engine.change_phase(waiting, Phase.WAITING)
    await asyncio.sleep(0)
    worker.engine.lose_ranks()
    for router in (first, second):
        status = await router.status(worker_pb2.WORKER_STATE_RESTARTING)
        assert status.lost == worker_pb2.LostBatch(streams=4, suspected=2, on_trial=1)
        again = await router.status(worker_pb2.WORKER_STATE_RESTARTING)
        assert again.lost == status.lost, "a router that missed the first status gets it too"
    worker.engine.restart()
    assert not (await first.status(worker_pb2.WORKER_STATE_READY)).HasField("lost")


async def test_lines_of_a_stream_that_moves_name_its_request_and_trace(worker, caplog):
    caplog.set_level("INFO", logger="lockstep")
    router = await worker.greeted()
    traceparent = f"00-{10:032x}-{11:016x}-01"
    await router.send(submit=submit("a", 2, max_tokens=100, request_id="q-1", traceparent=traceparent))
    await router.send(submit=submit("b", 1, max_tokens=100, request_id="line\nbreak"))
    await until(lambda: len(worker.engine.requests) == 2)
    worker.engine.lose_ranks()
    await router.next("rejected")
    begins, *failed = [vars(record) for record in caplog.records if "stream" in vars(record)]
    common = {"request_id": "q-1", "trace_id": f"{10:032x}", "span_id": f"{11:016x}", "stream": "a", "attempt": 2}
    assert begins | common | {"message": "stream begins", "epoch": 1} == begins
    by_stream = {record["stream"]: record for record in failed}
    assert by_stream["a"] | common | {"message": "attempt failed", "code": "worker_lost"} == by_stream["a"]
    assert "request_id" not in by_stream["b"]
