"""`lockstep profile`: what it reads in ranks' profiles, the trace it writes, and what it refuses."""

import gzip
import io
import json
import tarfile
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from lockstep_tools import cli
from lockstep_tools.chaos.release import WORKER
from lockstep_tools.debug.process import Process
from lockstep_tools.failure import CommandError
from lockstep_tools.profile import parts
from lockstep_tools.profile.merge import merged
from lockstep_tools.profile.parts import read_parts
from lockstep_tools.profile.summary import describe, summarize

MS = 1_000_000
STEPS = 10
BASE = 5_000 * MS


def part(rank, compute_ms, *, others_ms=None, steps=STEPS, device="cpu", clock_us=0.0, sampling_ms=0):
    """A rank with one collective a step, which ends when the slowest has come; 1 ms of transfer, 1 ms between steps."""
    arrives_ms = max(compute_ms, *(others_ms or [0]))
    marks, collectives, events = [], [], []
    at = BASE
    for number in range(1, steps + 1):
        ended = at + (arrives_ms + 1) * MS
        collectives.append(["all_reduce", at + compute_ms * MS, ended])
        marks.append([number, 2, 2, at, ended + sampling_ms * MS])
        events.append(event("user_annotation", f"lockstep step {number}", at / 1000 + clock_us, 4.0))
        events.append(event("cpu_op", "aten::mm", at / 1000 + clock_us + 10, 5.0))
        at = ended + 2 * MS
    head = {"rank": rank, "pid": 100 + rank, "device": device, "ended_by": "steps", "steps": marks}
    head |= {"collectives": collectives}
    return head, events


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": 100, "ts": ts, "dur": dur, "args": args}


def archive(*parts):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for head, events in parts:
            lines = json.dumps(head) + "\n" + json.dumps({"host_name": "canary", "traceEvents": events})
            data = gzip.compress(lines.encode())
            info = tarfile.TarInfo(f"rank-{head['rank']}.gz")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def test_the_slow_rank_is_named_and_where_time_goes():
    profiles = read_parts(archive(part(1, 6, others_ms=[3]), part(0, 3, others_ms=[6])))
    summary = summarize(profiles)
    first, second = summary.ranks
    assert (summary.bottleneck, summary.slower, summary.steps, summary.tokens) == (1, 2.0, STEPS, 2 * STEPS)
    assert [round(1000 * each / STEPS, 6) for each in (first.compute_s, first.transfer_s, first.waiting_s)] == [3, 1, 3]
    assert [round(1000 * each / STEPS, 6) for each in (second.compute_s, second.waiting_s)] == [6, 0]
    assert (first.last, second.last, summary.skew_us) == (0.0, 1.0, 0.0)
    assert round(1000 * first.idle_s) == 2 * (STEPS - 1)
    text = describe(summary, profiles)
    assert "bottleneck: rank 1: it computes 2.00 times as long as the others, which wait for it for 43 %" in text


def test_equal_ranks_are_balanced():
    profiles = read_parts(archive(part(0, 10, others_ms=[11]), part(1, 11, others_ms=[10])))
    summary = summarize(profiles)
    assert summary.bottleneck is None
    assert "balanced: no rank is clearly slower (the slowest computes 1.10 times as long)" in describe(
        summary, profiles
    )


def test_sampling_does_not_make_rank_0_the_bottleneck():
    """It samples after the last collective: no rank waits for that in a step."""
    slow = part(0, 4, others_ms=[4], sampling_ms=2)
    assert summarize(read_parts(archive(slow, part(1, 4, others_ms=[4])))).bottleneck is None


def test_one_slow_step_names_nobody():
    slow = part(1, 4, others_ms=[4])
    slow[0]["collectives"][3][1] += 0
    slow[0]["steps"][3][3] -= 500 * MS  # a page fault
    assert summarize(read_parts(archive(part(0, 4, others_ms=[4]), slow))).bottleneck is None


def test_one_rank_alone_waits_for_nobody():
    profiles = read_parts(archive(part(0, 3)))
    assert "one rank: it waits for no other one" in describe(summarize(profiles), profiles)


def test_only_common_steps_count():
    longer, shorter = part(0, 3, others_ms=[3]), part(1, 3, others_ms=[3], steps=4)
    shorter[0]["ended_by"] = "time"
    profiles = read_parts(archive(longer, shorter))
    summary = summarize(profiles)
    assert (summary.steps, summary.collectives) == (4, 4)
    assert "fewer steps than asked" in describe(summary, profiles)


def test_the_trace_has_all_ranks_on_one_clock_and_only_names():
    longer = part(0, 3, others_ms=[6], clock_us=9e9)
    longer[1].append(event("cpu_op", "aten::add", BASE / 1000 + 9e9, 1.0, **{"Concrete Inputs": ["canary"]}))
    data = merged(read_parts(archive(longer, part(1, 6, others_ms=[3], clock_us=-3e3))))
    assert b"canary" not in gzip.decompress(data)
    events = json.loads(gzip.decompress(data))["traceEvents"]
    names = {(each["pid"], each["args"]["name"]) for each in events if each["name"] == "process_name"}
    assert names == {(0, "rank 0 (pid 100, cpu)"), (1, "rank 1 (pid 101, cpu)")}
    steps = [(each["pid"], each["ts"], each["args"]) for each in events if each["name"] == "step 2"]
    assert [(pid, ts) for pid, ts, _ in steps] == [(0, 9000.0), (1, 9000.0)]
    assert steps[0][2] == {"sequences": 2, "tokens": 2}
    ends = [(each["ts"] + each["dur"], each["args"]["number"]) for each in events if each["name"] == "all_reduce"]
    assert ends[:STEPS] == ends[STEPS:], "collective k ends at the same time on all ranks"
    torch_events = [each for each in events if each["name"] == "aten::mm"]
    assert [each["ts"] for each in torch_events][:2] == [10.0, 9010.0], "torch's own clock is set to that of the steps"
    assert len({(each["pid"], each["tid"]) for each in torch_events}) == 2


def on_gpu():
    """A part as torch records it on a GPU: work has its launch's correlation and no mark of its step, and runs after
    the launch has returned.
    """
    head, events = part(0, 3, device="cuda:0")
    for number, (_, _, _, began, ended) in enumerate(head["steps"], 1):
        at = began / 1000
        launches = {"cudaMemcpyAsync": at + 20, "cudaGraphLaunch": at + 40, "cuLaunchKernelEx": ended / 1000 + 5}
        ids = {name: 10 * number + index for index, name in enumerate(launches)}
        for name, when in launches.items():
            cat = "cuda_driver" if name == "cuLaunchKernelEx" else "cuda_runtime"
            events.append(event(cat, name, when, 3.0, cbid=1, correlation=ids[name]))
        at = ended / 1000 + 100
        work = [
            ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at, 10.0, "cudaMemcpyAsync"),
            ("kernel", "gemm", at + 10, 390.0, "cudaGraphLaunch"),
            ("kernel", "ncclDevKernel_AllReduce_Sum", at + 400, 200.0, "cudaGraphLaunch"),
            ("kernel", "gemm", at + 600, 400.0, "cudaGraphLaunch"),
            ("kernel", "_compress", at + 1000, 50.0, "cuLaunchKernelEx"),  # between steps
        ]
        for cat, name, when, length, launch in work:
            events.append(event(cat, name, when, length, stream=7, correlation=ids[launch]))
    return head, events


def test_on_a_gpu_the_times_are_those_of_the_device():
    (share,) = summarize(read_parts(archive(on_gpu()))).ranks
    assert [round(1e6 * each / STEPS, 3) for each in (share.step_s, share.compute_s, share.transfer_s)] == [
        1000.0,
        800.0,
        200.0,
    ]


def test_work_whose_launch_is_not_in_the_trace_is_of_no_step():
    head, events = on_gpu()
    events = [each for each in events if each["cat"] != "cuda_runtime" or each["args"]["correlation"] > 30]
    assert [step.number for step in read_parts(archive((head, events)))[0].steps] == list(range(3, STEPS + 1))


@pytest.mark.parametrize("answer", [b"", b"no archive", archive(), archive(({"rank": 0}, []))])
def test_an_answer_that_is_no_profile_is_a_sentence(answer):
    with pytest.raises(CommandError, match="the worker's answer"):
        read_parts(answer)


def with_members(*members, compression=""):
    """An archive of (name or TarInfo, content)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=f"w:{compression}") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def hostile(**changes):
    """A part whose head or first event differs in these."""
    head, events = part(0, 3)
    events[0] |= {key: value for key, value in changes.items() if key in events[0]}
    head |= {key: value for key, value in changes.items() if key not in events[0]}
    return archive((head, events))


def test_what_unpacks_to_too_much_is_refused_before_it_is_in_memory(monkeypatch):
    """A worker that is not ours any more shall not take the operator's memory."""
    monkeypatch.setattr(parts, "MAX_PART_BYTES", 1 << 16)
    monkeypatch.setattr(parts, "MAX_UNPACKED_BYTES", 1 << 17)
    for answer in (
        with_members((tarfile.TarInfo("rank-0.gz"), gzip.compress(bytes(1 << 20)))),
        with_members((tarfile.TarInfo("rank-0.gz"), bytes(1 << 20)), compression="xz"),
        archive(*[part(rank, 3, steps=120) for rank in range(8)]),
        archive(part(0, 3), part(0, 3)),
    ):
        with pytest.raises(CommandError, match="not a profile of this version"):
            read_parts(answer)


@pytest.mark.parametrize(
    "answer",
    [
        with_members((tarfile.TarInfo("rank-0.gz"), gzip.compress(b"x" * 99)[:-20] + b"y" * 20)),
        with_members((tarfile.TarInfo("rank-0.gz"), gzip.compress(b"[" * 100_000))),
        archive(({"rank": 0, "steps": [], "collectives": [], "device": "cpu"}, ["x"])),
        hostile(ts=float("inf")),
        hostile(dur="x"),
        hostile(rank=10**30),
        hostile(steps=[["a", "b", 1, 2, 3]]),
        hostile(collectives=[["all_reduce", 1e300, {}]]),
    ],
)
def test_a_damaged_part_is_a_sentence(answer):
    with pytest.raises(CommandError, match="not a profile of this version"):
        read_parts(answer)


def test_nothing_of_a_part_acts_on_the_terminal():
    profiles = read_parts(hostile(device="cpu\x1b[2J\u202e"))
    text = describe(summarize(profiles), profiles)
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_trace_that_cannot_be_written_leaves_no_file(worker, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    worker.answer = archive(part(0, 3))
    monkeypatch.setattr("lockstep_tools.output_file.open", full, raising=False)
    assert cli.main(["profile", "--out", str(tmp_path / "trace")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def worker(monkeypatch):
    """Workers of a router, whose answer is set."""
    here = SimpleNamespace(found=[Process("router", "http://r"), Process("worker-w0", "http://w")], answer=b"")
    monkeypatch.setattr("lockstep_tools.debug.local.from_router", lambda *_: here.found)
    monkeypatch.setattr("lockstep_tools.commands.profile.fetch_profile", lambda *_: here.answer)
    return here


def test_the_command_writes_a_private_file_and_never_over_another(worker, tmp_path, capsys):
    worker.answer = archive(part(0, 3, others_ms=[6]), part(1, 6, others_ms=[3]))
    path = tmp_path / "trace.json.gz"
    assert cli.main(["profile", "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("worker-w0: 10 steps with 20 tokens")
    assert "bottleneck: rank 1" in printed
    assert (path.stat().st_mode & 0o777, json.loads(gzip.decompress(path.read_bytes()))["displayTimeUnit"]) == (
        0o600,
        "ms",
    )
    assert cli.main(["profile", "--out", str(path)]) == 2
    assert "there is such a file already" in capsys.readouterr().err


def test_a_path_that_cannot_be_written_is_refused_before_the_worker_is_asked(worker, tmp_path, capsys):
    worker.answer = None  # asking for it would fail otherwise
    assert cli.main(["profile", "--out", str(tmp_path / "no" / "trace")]) == 2
    assert "trace: No such file or directory" in capsys.readouterr().err


def test_a_profile_that_fails_leaves_no_file(worker, tmp_path, monkeypatch):
    def interrupted(*_):
        assert (tmp_path / "trace").exists()
        raise SystemExit(143)

    monkeypatch.setattr("lockstep_tools.commands.profile.fetch_profile", interrupted)
    with pytest.raises(SystemExit):
        cli.main(["profile", "--out", str(tmp_path / "trace")])
    worker.found = []
    assert cli.main(["profile", "--out", str(tmp_path / "trace")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_which_worker_is_meant_has_to_be_clear(worker, tmp_path, capsys):
    out = ["--out", str(tmp_path / "trace")]
    worker.found = [Process("worker-w0", "http://w"), Process("worker-w1", "")]
    for arguments, reason in (
        ([], "give --worker: there are w0, w1"),
        (["--worker", "w2"], "no such worker; there are w0, w1"),
        (["--worker", "w1"], "no management port"),
        (["--pod", "p"], "--pod needs --release"),
    ):
        assert cli.main(["profile", *out, *arguments]) == 2
        assert reason in capsys.readouterr().err
    worker.found = []
    assert cli.main(["profile", *out]) == 2
    assert "no worker on this machine" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["profile", "--steps", "201"])


def test_a_pod_of_a_release_is_profiled(worker, monkeypatch, tmp_path, capsys):
    @contextmanager
    def forwarded(_):
        yield [Process("pod-w-0", "http://w"), Process("pod-r-0", "http://r")], {"w-1": "it is pending"}

    pods = [SimpleNamespace(name=name, component=kind) for name, kind in (("w-0", WORKER), ("w-1", WORKER), ("r", "r"))]
    monkeypatch.setattr("lockstep_tools.debug.cluster.forwarded", forwarded)
    monkeypatch.setattr("lockstep_tools.commands.profile.Kubectl", lambda _: None)
    monkeypatch.setattr("lockstep_tools.commands.profile.Release", lambda *_: SimpleNamespace(require=lambda: pods))
    worker.answer = archive(part(0, 3))
    command = ["profile", "--release", "lockstep", "--out", str(tmp_path / "trace")]
    assert cli.main([*command, "--pod", "w-0", "--worker", "w1"]) == 2
    assert "a worker of a release is named by --pod" in capsys.readouterr().err
    assert cli.main(command) == 2
    assert "give --pod: there are w-0, w-1" in capsys.readouterr().err
    assert cli.main([*command, "--pod", "w-1"]) == 2
    assert "pod w-1 cannot be reached: it is pending" in capsys.readouterr().err
    assert cli.main([*command, "--pod", "w-0"]) == 0
    assert capsys.readouterr().out.startswith("pod-w-0: 10 steps")
