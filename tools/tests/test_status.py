import copy
import io
import json
import signal
import subprocess
import sys

import pytest
from fake_openai import FakeOpenAI
from lockstep_tools.commands.status import render
from lockstep_tools.serving.status import is_ready
from rich.console import Console

STATUS = {
    "router": {"id": "r1", "pid": 10, "uptime_s": 3725.5, "streams": 3, "failovers": 2},
    "models": [{"name": "reference"}],
    "workers": [
        {
            "id": "w0",
            "target": "unix:/w0",
            "state": "ready",
            "reason": "",
            "epoch": 4,
            "pid": 20,
            "queued": 1,
            "running": 2,
            "free_blocks": 90,
            "total_blocks": 100,
            "tokens_per_s": 123.4,
            "fingerprint": "0123abcd" * 8,
            "last_seen_s": 0.04,
            "ranks": [
                {"rank": 0, "pid": 21, "state": "ready", "steps": 77},
                {"rank": 1, "pid": 22, "state": "dead", "steps": 76},
            ],
        },
        {
            "id": "",
            "target": "unix:/w1",
            "state": "connecting",
            "reason": "no socket",
            "last_seen_s": None,
            "ranks": [],
        },
    ],
}


def shown(status) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=200).print(render(status))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def words(line: str) -> str:
    return " ".join(line.split())


def test_the_table_shows_workers_and_ranks() -> None:
    head, _, titles, *rows = shown(STATUS)
    assert head == "router r1 (pid 10), up 1 h 2 min: 3 streams, 2 failovers; models: reference"
    assert words(titles) == "NAME STATE PID EPOCH QUEUED RUNNING BLOCKS FREE TOKENS/S STEPS SEEN NUMERICS REASON"
    assert [words(row) for row in rows] == [
        "w0 ready 20 4 1 2 90/100 123 0.0 s ago 0123abcd",
        "├ rank 0 ready 21 77",
        "└ rank 1 dead 22 76",
        "unix:/w1 connecting - - - - -/- - never unknown no socket",
    ]


def test_what_a_router_says_is_shown_as_it_is_and_never_acted_on() -> None:
    status = copy.deepcopy(STATUS)
    status["router"]["id"] = "r\x1b[2J"
    worker = status["workers"][1]
    worker["target"], worker["reason"] = "[fd00::12]:9000", "[/models/x] is [red]\x1b]0;owned\x07"
    worker["health"] = {"problems": ["\x1b[31mslow"]}
    head, *_, last = shown(status)
    assert head.startswith("router r\\x1b[2J (pid 10)")
    assert words(last) == (
        r"[fd00::12]:9000 connecting (\x1b[31mslow) - - - - -/- - never unknown [/models/x] is [red]\x1b]0;owned\x07"
    )


def test_problems_of_a_worker_are_beside_its_state() -> None:
    status = copy.deepcopy(STATUS)
    status["workers"][0]["health"] = {"problems": ["suspected", "slow"]}
    rows = [words(row) for row in shown(status)[3:]]
    assert rows[0].startswith("w0 ready (suspected, slow) 20 4 ")
    assert is_ready(status)


def test_a_slow_rank_is_named_with_what_its_steps_took() -> None:
    status = copy.deepcopy(STATUS)
    worker = status["workers"][0]
    for rank, compute_s, collective_s in ((0, 0.0101, 0.0042), (1, 0.0131, 0.0012)):
        worker["ranks"][rank] |= {"state": "ready", "compute_s": compute_s, "collective_s": collective_s}
    worker["slow_rank"] = None
    assert "slow" not in "".join(shown(status))
    worker["slow_rank"] = 1
    rows = [words(row) for row in shown(status)[3:]]
    assert rows[1:3] == [
        "├ rank 0 ready 21 77 a step: computes 10.1 ms, 4.2 ms in collectives",
        "└ rank 1 ready (slow) 22 76 a step: computes 13.1 ms, 1.2 ms in collectives; the others wait for it",
    ]


LONG = "the numerics fingerprint differs from that of the other workers"
COUNTED = "NAME STATE PID QUEUED RUNNING BLOCKS FREE TOKENS/S"


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (120, f"{COUNTED} STEPS SEEN REASON".replace("PID", "PID EPOCH")),
        (90, f"{COUNTED} REASON"),
        (60, "NAME STATE PID REASON"),
    ],
)
def test_a_narrow_console_has_fewer_columns_and_whole_cells(width: int, titles: str) -> None:
    status = copy.deepcopy(STATUS)
    worker = status["workers"][1]
    worker["pid"], worker["reason"] = 1234567, LONG
    status["workers"][0]["health"] = {"problems": ["suspected", "slow"]}
    out = io.StringIO()
    Console(file=out, width=width).print(render(status))
    head, *rows = out.getvalue().partition("\n\n")[2].splitlines()
    assert max(map(len, rows)) <= width
    assert words(head) == titles
    at = head.index("REASON")
    assert words(" ".join(row[at:] for row in rows)) == LONG
    for cell in ("├ rank 0", "unix:/w1", "connecting", "1234567"):
        assert any(cell in row for row in rows), cell


@pytest.mark.parametrize("width", [40, 60])
def test_a_long_name_is_folded_and_not_cut_off(width: int) -> None:
    status = copy.deepcopy(STATUS)
    status["workers"][1]["target"] = target = "lockstep-worker-reference-1.workers.serving.svc.cluster.local:9000"
    out = io.StringIO()
    Console(file=out, width=width).print(render(status))
    head, *rows = out.getvalue().partition("\n\n")[2].splitlines()
    names = [row[: head.index("STATE")].strip() for row in rows]
    assert target in "".join(names)


def test_a_router_without_workers_and_with_fields_missing() -> None:
    assert "no workers" in "\n".join(shown({"workers": []}))
    assert "w9" in "\n".join(shown({"router": {}, "workers": [{"id": "w9"}]}))


def test_ready_is_one_ready_worker() -> None:
    status = copy.deepcopy(STATUS)
    assert is_ready(status)
    status["workers"][0]["state"] = "RESTARTING"
    assert not is_ready(status)


def test_exit_codes(server: FakeOpenAI, lockstep) -> None:
    server.status = STATUS
    result = lockstep("status", "--url", server.url)  # with /v1 as well as without
    assert (result.returncode, result.stderr) == (0, "")
    assert "rank 1" in result.stdout
    server.status = {"router": {}, "workers": []}
    assert lockstep("status", "--url", server.root).returncode == 1
    server.status = None
    strange = lockstep("status", "--url", server.root)
    assert (strange.returncode, "HTTP status 404" in strange.stderr) == (2, True)
    gone = lockstep("status", "--url", "http://127.0.0.1:1")
    assert (gone.returncode, "no router answers" in gone.stderr) == (2, True)


def test_json_is_what_the_router_says(server: FakeOpenAI, lockstep) -> None:
    server.status = STATUS
    assert json.loads(lockstep("status", "--url", server.root, "--json").stdout) == STATUS


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_watching_ends_with_ctrl_c(server: FakeOpenAI, flags: tuple[str, ...]) -> None:
    server.status = STATUS
    watching = subprocess.Popen(
        [sys.executable, "-m", "lockstep_tools.cli", "status", "--url", server.root, "--watch", *flags],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"},
    )
    assert watching.stdout is not None
    seen = 0
    for line in watching.stdout:
        seen += "w0" in line
        if seen == 4:
            break
    watching.send_signal(signal.SIGINT)
    watching.stdout.close()
    assert watching.wait(5) == 0
