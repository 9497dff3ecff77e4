import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from lockstep_tools.serving.processes import Supervisor

SLEEP = ("sleep", "1000")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_until(holds: Callable[[], object], within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def is_alive(pid: int | None) -> bool:
    """A zombie counts as dead: whether an orphan is waited for depends on the machine's first process."""
    with suppress(psutil.NoSuchProcess):
        return pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervisor]]:
    made = []

    def start(*stages: dict[str, object], **options: object) -> Supervisor:
        made.append(Supervisor(stages, **options))
        made[-1].start()
        return made[-1]

    yield start
    for supervisor in made:
        supervisor.close()


def test_a_dead_process_is_started_again(supervise) -> None:
    events: list[str] = []
    supervisor = supervise({"a": SLEEP, "b": SLEEP}, on_event=events.append)
    first, other = supervisor.pid("a"), supervisor.pid("b")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: supervisor.pid("a") not in (None, first))
    assert supervisor.pid("b") == other
    assert events == ["a was killed by SIGKILL; starting it again"]


def test_the_pauses_before_starts_grow(supervise, tmp_path: Path) -> None:
    notes = tmp_path / "starts"
    code = f"import time; open({str(notes)!r}, 'a').write(f'{{time.monotonic()}}\\n'); raise SystemExit(3)"
    supervisor = supervise({"a": python(code)})
    assert supervisor.wait(60)
    assert (supervisor.exit_code, supervisor.reason) == (1, "a ended with exit code 3 5 times in a row")
    times = [float(line) for line in notes.read_text().split()]
    pauses = [after - before for before, after in pairwise(times)]
    assert len(times) == 5
    for pause, least in zip(pauses, (0.1, 0.2, 0.4, 0.8), strict=True):
        assert least <= pause < least + 10  # the lower bounds show the growth; a start itself may take a while


def test_being_killed_is_no_reason_to_give_up(supervise) -> None:
    supervisor = supervise({"a": python("import os; os.kill(os.getpid(), 9)")})
    assert not supervisor.wait(2.0)
    assert supervisor.exit_code is None


def test_exit_code_2_ends_all(supervise) -> None:
    supervisor = supervise({"a": SLEEP, "b": python("import time; time.sleep(0.2); raise SystemExit(2)")})
    bystander = supervisor.pid("a")
    assert supervisor.wait(30)
    assert (supervisor.exit_code, supervisor.reason) == (2, "b cannot run")
    assert not is_alive(bystander)


def test_stages_end_one_after_the_other(supervise, tmp_path: Path) -> None:
    notes = tmp_path / "ends"
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        f"    time.sleep(0.3); open({str(notes)!r}, 'a').write(sys.argv[1]); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"open({str(tmp_path)!r} + '/ready-' + sys.argv[1], 'w')\n"
        "time.sleep(100)"
    )
    supervisor = supervise({"a": [*python(code), "a"]}, {"b": [*python(code), "b"]})
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    supervisor.stop(30.0)
    assert supervisor.wait(60)
    assert notes.read_text() == "ab"
    assert supervisor.exit_code is None


DEAF = python("import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(1000)")


def test_what_ignores_sigterm_is_killed_after_the_grace(supervise, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as output:
        supervisor = supervise({"a": DEAF}, output=output)
    wait_until(lambda: (tmp_path / "out").stat().st_size)
    pid = supervisor.pid("a")
    began_s = time.monotonic()
    supervisor.stop(0.5)
    assert supervisor.wait(30)
    assert time.monotonic() - began_s >= 0.5
    assert not is_alive(pid)


def test_a_second_stop_shortens_the_grace(supervise, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as output:
        supervisor = supervise({"a": DEAF}, output=output)
    wait_until(lambda: (tmp_path / "out").stat().st_size)
    supervisor.stop(100.0)
    assert not supervisor.wait(0.2)
    supervisor.stop(0.0)
    assert supervisor.wait(30)


def test_what_a_process_has_started_ends_with_it(supervise, tmp_path: Path) -> None:
    """Also when it ignores signals, and before the process is started again."""
    code = (
        "import os, subprocess, time\n"
        f"child = subprocess.Popen({DEAF!r})\n"
        f"open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').write(str(child.pid))\n"
        "time.sleep(1000)"
    )
    supervisor = supervise({"a": python(code)})
    first = supervisor.pid("a")
    note = tmp_path / str(first)
    wait_until(lambda: note.exists() and note.read_text())
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: supervisor.pid("a") not in (None, first))
    assert not is_alive(int(note.read_text()))
    second = tmp_path / str(supervisor.pid("a"))
    wait_until(lambda: second.exists() and second.read_text())
    supervisor.stop(0.0)
    assert supervisor.wait(30)
    assert not is_alive(int(second.read_text()))


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    child = python(
        "from lockstep_common.lifecycle import obey_parent; obey_parent()\n"
        f"import os, time; open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w'); time.sleep(1000)"
    )
    code = (
        "import time; from lockstep_tools.serving.processes import Supervisor\n"
        f"Supervisor([{{'a': {child!r}, 'b': {child!r}}}]).start(); time.sleep(1000)"
    )
    parent = subprocess.Popen(python(code), env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    children = [int(file.name) for file in tmp_path.iterdir()]
    assert all(is_alive(pid) for pid in children)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in children))
