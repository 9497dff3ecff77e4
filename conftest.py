"""What holds for every test of the repository: Ctrl-C reaches what a test starts, a run may have a time budget, no
example of Hypothesis has a deadline (machines differ), the garbage collector leaves alone what was imported, services
export their spans soon, and no test changes the level of the next one's logs. Processes of pytest-xdist share the
compiling of the test files.
"""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import hypothesis
import pytest
from _pytest.assertion import rewrite

BEGAN_S = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("lockstep").addoption(
        "--budget-s", type=float, metavar="S", help="skip the tests that have not begun after so many seconds"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BEGAN_S] = time.monotonic()
    hypothesis.settings.register_profile("lockstep", deadline=None)
    hypothesis.settings.load_profile("lockstep")
    os.environ.setdefault("OTEL_BSP_SCHEDULE_DELAY", "500")  # milliseconds
    # A shell starts background jobs with SIGINT ignored, nohup a command with SIGHUP; what a test starts inherits that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # handlers, unlike SIG_IGN, are not inherited over exec
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # what is imported and collected stays; a process that only distributes tests collects none


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a fresh clone nothing is compiled, and each process of pytest-xdist would rewrite all test files. Instead they
    begin at different ones, and skip what another one has written. Files that have changed since are left to pytest.
    """
    config = session.config
    does_rewrite = config.getoption("assertmode", "plain") == "rewrite"  # absent with `-p no:assertion`
    if not hasattr(config, "workerinput") or sys.dont_write_bytecode or not does_rewrite:
        return
    worker = config.workerinput
    ignored = config.getini("norecursedirs")
    files = [path for each in config.args for path in _test_files(Path(config.invocation_params.dir, each), ignored)]
    begin = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
    for path in files[begin:] + files[:begin]:
        _compile(path, config)


def _test_files(folder: Path, ignored: Iterable[str]) -> list[Path]:
    """Sorted. Folders that pytest does not enter, such as a virtual environment, are left out."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if not any(fnmatch(each, pattern) for pattern in ignored)]
        found += [Path(parent, each) for each in names if fnmatch(each, "test_*.py")]
    return sorted(found)


def _compile(path: Path, config: pytest.Config) -> None:
    """As pytest does it when it imports the file; it has no public function for this."""
    folder = rewrite.get_cache_dir(path)
    compiled = folder / (path.stem + rewrite.PYC_TAIL)
    if compiled.exists() or not rewrite.try_makedirs(folder):
        return
    try:
        source_hash, code = rewrite._rewrite_test(path, config)
    except (OSError, SyntaxError, ValueError):
        return  # collecting says so, or ignores it
    rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, compiled)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end. Without this a fifth of the time of the router's tests is spent on looking at
    them again, in pauses of up to a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, which may be what takes long."""
    budget_s = item.config.getoption("budget_s")
    if budget_s is not None and time.monotonic() - item.config.stash[BEGAN_S] > budget_s:
        pytest.skip("the time budget is used up")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Around a test and its fixtures."""
    logger = logging.getLogger("lockstep")
    level = logger.level
    try:
        return (yield)
    finally:
        logger.setLevel(level)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """With `--dist loadfile`: files in the order of the command line, each in one process, with two exceptions."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - only where tests run in parallel

    class Scopes(LoadFileScheduling):
        """The conformance tests share one system, so they stay together. Simulations, what searches orders of
        operations, and steps in Triton's interpreter are long and share nothing.
        """

        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/conformance/"):
                return "tests/conformance"
            alone = nodeid.startswith(
                (
                    "tests/simulation/",
                    "services/kv-state-server/tests/test_linearizability.py",
                    "libs/engine/tests/test_gpu_rank.py",
                    "libs/engine/tests/test_kernel_check.py",
                )
            )
            return nodeid if alone else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scopes(config, log)
