"""Several processes of one router: they share the ports, one that dies is replaced, all drain and choose alike."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
from multiprocessing import Pipe

import grpc
import httpx
import key_files
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from lockstep_common import protobuf_metrics
from lockstep_common.answers import Answer, as_json
from lockstep_common.errors import LockstepError
from lockstep_common.protobuf_metrics import read_families
from lockstep_router.processes.answers import JointAnswers
from lockstep_router.processes.channel import Asker, answer_parent
from lockstep_router.processes.parent import MAX_FIRST_STARTS, Process, check_router_id, keep_all
from lockstep_router.settings import RouterSettings
from prometheus_client.parser import text_string_to_metric_families
from router_process import BODY, listening, start
from scripted_worker import Script, ScriptedWorker

DEADLINE_S = 60


@contextlib.asynccontextmanager
async def workers_on(tmp_path, count):
    made = [await ScriptedWorker(f"w{number}", tmp_path / f"w{number}.sock").start() for number in range(count)]
    try:
        yield made
    finally:
        for worker in made:
            await worker.kill()


@contextlib.asynccontextmanager
async def serving(workers, *flags):
    """Two processes; yields the parent, what it has said, and a client of the management port."""
    targets = ",".join(worker.target for worker in workers)
    process = await start("--workers", targets, "--port", "0", "--processes", "2", "--router-id", "r", *flags)
    try:
        entry = await listening(process)
        reading = asyncio.create_task(process.stderr.read())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{entry['management_port']}", timeout=30) as client:
            yield process, entry, client
        reading.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def complete(client, port, **fields):
    """A request on a connection of its own: the process that answers, and the answer."""
    url, body = f"http://127.0.0.1:{port}/v1/completions", BODY | {"max_tokens": 2} | fields
    answer = await client.post(url, json=body, headers={"connection": "close"})
    return answer.headers["x-lockstep-router"], answer


async def meet_both(client, port, **fields):
    """Send requests until each process has answered one: the answers by process."""
    met = {}
    async with asyncio.timeout(DEADLINE_S):
        while len(met) < 2:
            name, answer = await complete(client, port, **fields)
            assert answer.status_code == 200
            met[name] = answer
    return met


async def fetch(client, path, holds, **headers):
    """Ask until the answer is as expected. A joint answer lacks a process that does not answer within two seconds, as
    one may on a slow machine.
    """
    async with asyncio.timeout(DEADLINE_S):
        while not holds(answer := await client.get(path, headers=headers)):
            await asyncio.sleep(0.05)
    return answer


def is_good(answer):
    return answer.status_code == 200


async def status(client):
    """As far as at least one process answers."""
    return (await fetch(client, "/status", is_good)).json()


def both_are_up(answer):
    return all(f'lockstep_router_process_up{{process="{number}"}} 1.0' in answer.text for number in (0, 1))


def only_the_first_is_up(answer):
    return all(f'lockstep_router_process_up{{process="{number}"}} {1 - number}.0' in answer.text for number in (0, 1))


def samples_of(answer):
    return [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]


def counted_by(answer):
    """The processes that have counted requests that were answered."""
    return {
        sample.labels["process"]
        for sample in samples_of(answer)
        if sample.name == "lockstep_router_requests_total" and sample.labels["code"] == "200" and sample.value > 0
    }


def routers_of(body):
    return [(each["process"], (each["router"] or {}).get("id")) for each in body["processes"]]


def processes_of(state):
    """Those whose streams are shown."""
    return {each["key"].partition(".")[0] for each in state.get("streams", ())}


def sizes_of(answer):
    """The metrics' families, and how many samples each has."""
    return [(name, len(family.metrics)) for name, family in read_families(answer.content)]


async def test_both_serve_and_report_together(tmp_path):
    async with workers_on(tmp_path, 1) as workers, serving(workers) as (process, entry, client):
        met = await meet_both(client, entry["port"])
        assert set(met) == {"r-0", "r-1"}
        assert (await fetch(client, "/healthz", is_good)).json() == {"status": "alive"}
        assert (await fetch(client, "/readyz", is_good)).json() == {"status": "ready"}
        assert (await client.get("/nowhere")).status_code == 404
        both = [(0, "r-0"), (1, "r-1")]
        answer = await fetch(client, "/status", lambda answer: is_good(answer) and routers_of(answer.json()) == both)
        body = answer.json()
        assert body["router"]["id"] == "r"
        assert len({process.pid, *(each["pid"] for each in body["processes"])}) == 3
        assert [worker["id"] for worker in body["workers"]] == ["w0"]
        answer = await fetch(client, "/console/state", lambda answer: processes_of(answer.json()) == {"0", "1"})
        state = answer.json()
        assert (state["router"]["id"], state["processes"]) == ("r", 2)
        most = state["router"]["max_streams"]
        answer = await fetch(client, "/console/router", lambda answer: answer.json().get("max_streams") == most)
        assert answer.json()["id"] == "r"
        assert (await client.get("/console/")).headers["content-type"] == "text/html; charset=utf-8"
        # A request has ended and is counted when its client has the answer already.
        answer = await fetch(
            client, "/metrics", lambda answer: both_are_up(answer) and counted_by(answer) == {"0", "1"}
        )
        samples = samples_of(answer)
        up = {sample.labels["process"]: sample.value for sample in samples if sample.name.endswith("process_up")}
        assert up == {"0": 1.0, "1": 1.0}
        of_parent = {sample.name for sample in samples if sample.labels.get("process") == "parent"}
        assert "process_resident_memory_bytes" in of_parent
        assert not [name for name in of_parent if name.startswith("lockstep_router_")]
        latency = ("lockstep_router_time_to_first_token_seconds", 2)
        form = protobuf_metrics.CONTENT_TYPE
        answer = await fetch(client, "/metrics", lambda answer: latency in sizes_of(answer), accept=form)
        assert answer.headers["content-type"] == form
        written = sizes_of(answer)
        assert len(dict(written)) == len(written)
        assert dict(written)["lockstep_router_process_up"] == 2
        assert dict(written)["process_resident_memory_bytes"] == 3


async def test_one_that_dies_is_replaced_while_the_other_serves(tmp_path):
    async with workers_on(tmp_path, 1) as workers, serving(workers) as (_, entry, client):
        await meet_both(client, entry["port"])
        first, second = (each["pid"] for each in (await status(client))["processes"])
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            while (await client.get("/healthz")).status_code != 503:
                if (await status(client))["processes"][0]["restarts"]:
                    break  # the machine paused meanwhile
                await asyncio.sleep(0.01)
            while _runs(first):  # until then it may take a connection
                await asyncio.sleep(0.01)
        _, answer = await complete(client, entry["port"])
        assert answer.status_code == 200
        async with asyncio.timeout(DEADLINE_S):
            while (await client.get("/healthz")).status_code != 200:
                await asyncio.sleep(0.05)
        await meet_both(client, entry["port"])
        replaced, kept = (await status(client))["processes"]
        assert (replaced["restarts"], kept["restarts"], kept["pid"]) == (1, 0, second)
        assert replaced["pid"] != first


async def test_one_that_hangs_is_not_up(tmp_path):
    async with workers_on(tmp_path, 1) as workers, serving(workers) as (_, _, client):
        hanging = (await status(client))["processes"][1]["pid"]
        os.kill(hanging, signal.SIGSTOP)
        try:
            await fetch(client, "/metrics", only_the_first_is_up)
        finally:
            os.kill(hanging, signal.SIGCONT)


async def test_all_drain_on_sigterm(tmp_path):
    async with workers_on(tmp_path, 1) as workers, serving(workers) as (process, entry, client):
        workers[0].script = Script(delay_s=0.05)
        pids = [each["pid"] for each in (await status(client))["processes"]]
        running = [asyncio.create_task(complete(client, entry["port"], max_tokens=40)) for _ in range(12)]
        async with asyncio.timeout(DEADLINE_S):
            while len(workers[0].submits) < 12:
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        answers = await asyncio.gather(*running)
        assert [answer.json()["usage"]["completion_tokens"] for _, answer in answers] == [40] * 12
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


async def test_none_outlives_the_parent(tmp_path):
    async with workers_on(tmp_path, 1) as workers, serving(workers) as (process, _, client):
        pids = [each["pid"] for each in (await status(client))["processes"]]
        process.kill()
        await process.wait()
        async with asyncio.timeout(DEADLINE_S):
            while any(_runs(pid) for pid in pids):
                await asyncio.sleep(0.01)


def _runs(pid):
    """Whether a process runs; one whose parent has not waited for it has ended too, with the last of its threads."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):  # it may end between the opening and the reading
        return False


async def test_grpc_port_is_shared_too(tmp_path):
    async with workers_on(tmp_path, 1) as workers, serving(workers, "--grpc-port", "0") as (_, entry, client):
        for each in (await status(client))["processes"]:
            os.kill(each["pid"], signal.SIGSTOP)
            try:
                await _serves_grpc(entry["grpc_port"])
            finally:
                os.kill(each["pid"], signal.SIGCONT)


async def _serves_grpc(port):
    """Try connections until one reaches a process that runs."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            options = (("grpc.use_local_subchannel_pool", 1),)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING
                    return


@pytest.mark.slow
async def test_all_choose_the_same_worker_for_a_session_also_after_restarts(tmp_path):
    sessions = [f"session {number}" for number in range(50)]
    # A busy machine makes no worker suspected, whose sessions would go elsewhere.
    patient = ("--suspicion-phi", "0", "--heartbeat-timeout-s", "30")
    async with workers_on(tmp_path, 5) as workers:
        chosen = []  # by session, for each start
        for _ in range(2):
            async with serving(workers, *patient) as (_, entry, client):
                for session in sessions:
                    await meet_both(client, entry["port"], user=session, prompt=session)
            chosen.append(take_choices(workers))
        assert chosen[0] == chosen[1]
        assert all(len(names) == 1 for names in chosen[0].values())
        assert len(chosen[0]) == len(sessions)
        assert len(set().union(*chosen[0].values())) > 1
        await workers[2].kill()
        async with serving(workers[:2] + workers[3:], *patient) as (_, entry, client):
            for session in sessions:
                await meet_both(client, entry["port"], user=session, prompt=session)
        fewer = take_choices(workers)
    moved = {session for session in fewer if fewer[session] != chosen[0][session]}
    assert moved == {session for session, names in chosen[0].items() if names == {"w2"}}
    assert moved


def take_choices(workers):
    """The workers of each session's streams, which have a prompt of their own; forgets them."""
    choices = {}
    for worker in workers:
        for submit in worker.submits:
            choices.setdefault(tuple(submit.prompt_ids), set()).add(worker.worker_id)
        worker.submits.clear()
    return choices


async def test_taken_port_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start("--workers", "a:1", "--port", str(port), "--processes", "2")
        _, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 2
    assert errors.decode().splitlines() == [f"cannot listen on 127.0.0.1:{port}: Address already in use"]


async def test_another_router_cannot_take_the_port_unnoticed(tmp_path):
    async with workers_on(tmp_path, 1) as workers, serving(workers) as (_, entry, _):
        port = entry["port"]
        process = await start("--workers", "a:1", "--port", str(port), "--processes", "2")
        _, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 2
    assert errors.decode().splitlines() == [f"cannot listen on 127.0.0.1:{port}: Address already in use"]


async def test_settings_that_no_process_can_use_end_the_parent(tmp_path):
    process = await start("--workers", "a:1", "--port", "0", "--processes", "2", "--keys-file", str(tmp_path / "none"))
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 2
    assert b"keys_file" in errors


@pytest.mark.parametrize(("ending", "exit_code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", 128 + 9)])
async def test_processes_that_never_start_end_the_parent(tmp_path, ending, exit_code):
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(f"import os, sys\nif 'lockstep_router.processes.child' in sys.orig_argv: {ending}\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = await start("--workers", "a:1", "--port", "0", "--processes", "2", PYTHONPATH=path)
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == exit_code
    assert 2 * (MAX_FIRST_STARTS - 1) >= errors.count(b'"message":"process ended"') >= MAX_FIRST_STARTS - 1


async def test_router_id_without_room_for_a_number_ends_the_parent():
    process = await start("--workers", "a:1", "--port", "0", "--processes", "2", "--router-id", "r" * 127)
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 2
    assert errors.decode().splitlines() == ["router_id must have at most 126 characters with 2 processes"]


@pytest.mark.parametrize(("processes", "longest"), [(2, 126), (10, 126), (11, 125), (64, 125)])
def test_longest_router_id_is_taken_by_all_processes(processes, longest):
    settings = RouterSettings(workers=("a:1",), processes=processes, router_id="r" * longest)
    check_router_id(settings)
    of_last = settings.model_copy(update={"router_id": f"{settings.router_id}-{processes - 1}"})
    assert RouterSettings.model_validate_json(of_last.model_dump_json()) == of_last
    with pytest.raises(LockstepError):
        check_router_id(settings.model_copy(update={"router_id": "r" * (longest + 1)}))


@pytest.mark.slow
async def test_settings_that_become_unusable_end_no_process_that_serves(tmp_path):
    keys = tmp_path / "keys.yaml"
    key_files.write(keys, key_files.tenant("search", key_files.KEY))
    async with workers_on(tmp_path, 1) as workers, serving(workers, "--keys-file", str(keys)) as (_, entry, client):
        client.headers.update(key_files.bearer(key_files.KEY))
        first, second = (each["pid"] for each in (await status(client))["processes"])
        key_files.write_text(keys, "tenants: [")
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            while (await status(client))["processes"][0]["restarts"] < 2:
                await asyncio.sleep(0.05)
        _, answer = await complete(client, entry["port"])
        assert answer.status_code == 200
        key_files.write(keys, key_files.tenant("search", key_files.KEY))
        async with asyncio.timeout(DEADLINE_S):
            while (await client.get("/healthz")).status_code != 200:
                await asyncio.sleep(0.05)
        assert (await status(client))["processes"][1]["pid"] == second


async def test_process_that_cannot_be_started_is_tried_again(monkeypatch, caplog):
    create, tries = asyncio.create_subprocess_exec, []

    async def create_later(*command, **options):
        tries.append(command)
        if len(tries) < 3:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await create(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_later)
    process = Process(0, RouterSettings(workers=("a:1",), port=0, management_port=0, router_id="r-0"))
    stop, listening = asyncio.Event(), asyncio.Event()
    keeping = asyncio.create_task(process.keep(stop, listening, asyncio.Event()))
    async with asyncio.timeout(DEADLINE_S):
        await listening.wait()
    assert process.restarts == 2
    stop.set()
    process.terminate()
    assert await asyncio.wait_for(keeping, DEADLINE_S) == 0
    assert [record.message for record in caplog.records].count("process not started") == 2


async def test_process_that_has_ended_is_not_asked_to(monkeypatch):
    class Ended:
        """Of a process that has ended before it read its settings, and whose parent has not waited for it."""

        stdout = asyncio.StreamReader()
        pid = 1

        def terminate(self):
            raise ProcessLookupError(errno.ESRCH, "No such process")

        async def wait(self):
            return 7

    async def create(*_, **__):
        return Ended()

    Ended.stdout.feed_eof()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
    stop = asyncio.Event()
    stop.set()
    process = Process(0, RouterSettings(workers=("a:1",)))
    assert await process.keep(stop, asyncio.Event(), asyncio.Event()) == 7


async def test_all_drain_before_a_defect_of_one_ends_the_parent():
    class Kept:
        def __init__(self, defect=None):
            self.defect, self.drained = defect, False

        def terminate(self):
            pass

        async def keep(self, stop, listening, serving):
            if self.defect is not None:
                raise self.defect
            await stop.wait()
            await asyncio.sleep(0.05)
            self.drained = True
            return 0

    kept = Kept()
    with pytest.raises(RuntimeError, match="a defect"):
        await keep_all([Kept(RuntimeError("a defect")), kept], asyncio.Event(), {})
    assert kept.drained


class Dead:
    number, restarts, asker, pid = 0, 3, None, None


@pytest.mark.parametrize("path", ["/metrics", "/status"])
def test_strangers_learn_health_only(path):
    answers = JointAnswers("r", [Dead()])
    assert answers.of(path, is_stranger=True).status == 403
    assert answers.of("/healthz", is_stranger=True).status == 503
    assert json.loads(answers.of("/readyz", is_stranger=True).body) == {"status": "starting"}


class Alive:
    """A process of the router that answers operators; what it was asked is kept."""

    restarts, pid = 0, 7

    def __init__(self, number, answer):
        self.number, self._answer, self.asked, self.asker = number, answer, [], self

    def ask(self, path, operation="", accept=""):
        self.asked.append((operation, path))
        return self._answer


def test_an_operator_reaches_all_processes():
    dead = Dead()
    dead.number = 2
    levels = [Alive(number, as_json(200, {"level": "debug"})) for number in (0, 1)]
    answer = JointAnswers("r", [*levels, dead]).to_operator("POST", "/loglevel?level=debug")
    assert json.loads(answer.body) == {"processes": {"0": {"level": "debug"}, "1": {"level": "debug"}, "2": None}}
    assert [each.asked for each in levels] == [[("POST", "/loglevel?level=debug")]] * 2
    logs = [Alive(number, Answer(200, "application/x-ndjson", b"{}\n")) for number in (0, 1)]
    assert JointAnswers("r", logs).to_operator("GET", "/debug/logs").body == b"{}\n{}\n"
    bad = [Alive(number, as_json(400, {"error": "level"})) for number in (0, 1)]
    assert JointAnswers("r", bad).to_operator("POST", "/loglevel").status == 400
    assert JointAnswers("r", [Dead()]).to_operator("GET", "/debug/stacks").status == 503


def test_an_answer_that_cannot_be_made_is_one_and_the_next_is_made():
    class Answers:
        def of(self, path, *, is_stranger, accept=""):
            if path == "/status":
                raise OSError(2, "No such file", "f")
            return as_json(200, path)

    ours, theirs = Pipe()
    with ours, theirs:
        answer_parent(theirs, Answers())
        asker = Asker(ours)
        failed = asker.ask("/status")
        assert (failed.status, "No such file" in json.loads(failed.body)["error"]) == (500, True)
        assert asker.ask("/healthz").status == 200
    joint = JointAnswers("r", [Alive(0, failed)])
    assert json.loads(joint.of("/healthz", is_stranger=False).body) == {"status": "failed", "process": 0}
    assert b'process_up{process="0"} 0.0' in joint.of("/metrics", is_stranger=False).body


def test_a_process_answers_its_parent_as_an_operator():
    class Answers:
        def of(self, path, *, is_stranger, accept=""):
            return as_json(200, [path, is_stranger])

        def to_operator(self, method, path):
            return as_json(200, [method, path])

    ours, theirs = Pipe()
    with ours, theirs:
        answer_parent(theirs, Answers())
        asker = Asker(ours)
        assert json.loads(asker.ask("/status").body) == ["/status", False]
        assert json.loads(asker.ask("/loglevel?level=debug", "POST").body) == ["POST", "/loglevel?level=debug"]
