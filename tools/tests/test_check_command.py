"""`make check` runs the tests that a change touches, nearest first, and no longer than its budget."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lockstep_tools.repository import check
from lockstep_tools.repository.check import ROOT, changed_files, importers_of, touched_tests

FILES = {
    "libs/common/src/lockstep_common/errors.py": "",
    "services/router/src/lockstep_router/__init__.py": "from lockstep_router.journal import Journal\n",
    "services/router/src/lockstep_router/journal.py": "from lockstep_common import errors\n",
    "services/router/src/lockstep_router/clock.py": "",
    "services/router/tests/conftest.py": "import cluster\n",
    "services/router/tests/cluster.py": "import lockstep_router\n",
    "services/router/tests/test_journal.py": "from lockstep_router.journal import Journal\n",
    "services/router/tests/test_clock.py": "from lockstep_router.clock import now\n",
    "tools/src/lockstep_tools/cli.py": "load = 'lockstep_tools.commands.'\n",
    "tools/src/lockstep_tools/commands/chat.py": "",
    "tools/tests/test_cli.py": "RUN = 'lockstep_tools.cli'\n",
    "tests/integration/test_serve.py": "import lockstep_router\n",
    "k8s/chaos/lib.sh": "",
    "tests/deployment/test_manifests.py": "",
    "tools/tests/test_chaos.py": "",
    "docs/architecture.md": "",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        (
            "lockstep_router/journal.py",
            ["test_journal", "test_clock"],
        ),  # the second by the package that its fixtures use
        ("lockstep_router/clock.py", ["test_clock"]),
        ("lockstep_common/errors.py", ["test_journal", "test_clock"]),
        ("tests/cluster.py", ["test_clock", "test_journal"]),
        ("tests/test_clock.py", ["test_clock"]),
        ("commands/chat.py", ["test_cli"]),
        ("k8s/chaos/lib.sh", ["test_manifests", "test_chaos"]),
        ("docs/architecture.md", []),
        ("integration/test_serve.py", []),
    ],
)
def test_the_tests_of_a_change(repository: Path, changed: str, touched: list[str]) -> None:
    (path,) = [name for name in FILES if name.endswith(changed)]
    assert [Path(test).stem for test in touched_tests(repository, [path], importers_of(repository))] == touched


def test_a_change_is_what_differs_from_main_committed_or_not(repository: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=repository, check=True, capture_output=True)

    git("init", "-b", "main")
    git("add", "libs", "services")
    git("commit", "-m", "before")
    git("checkout", "-b", "work")
    (repository / "services/router/src/lockstep_router/clock.py").write_text("now = 1\n")
    git("commit", "-am", "committed")
    (repository / "services/router/src/lockstep_router/journal.py").write_text("Journal = 1\n")
    git("add", "tools")
    changed = changed_files(repository, "main")
    assert "services/router/src/lockstep_router/clock.py" in changed
    assert "services/router/src/lockstep_router/journal.py" in changed
    assert "tools/src/lockstep_tools/cli.py" in changed  # staged
    assert "k8s/chaos/lib.sh" in changed  # not even that
    assert "libs/common/src/lockstep_common/errors.py" not in changed
    assert "services/router/src/lockstep_router/clock.py" not in changed_files(repository, "work")
    assert changed_files(repository, "nowhere") == changed_files(repository, "work")


@pytest.mark.slow
def test_every_real_module_of_a_package_is_touched_by_some_test() -> None:
    """A change of any of them runs something."""
    sources = [path for path in sorted((ROOT / "services").glob("*/src/**/*.py")) if path.name != "__init__.py"]
    by_file = importers_of(ROOT)
    for path in sources:
        assert touched_tests(ROOT, [str(path.relative_to(ROOT))], by_file), path


@pytest.mark.slow
@pytest.mark.parametrize(("budget_s", "outcome"), [("0", "1 skipped"), ("60", "1 passed")])
def test_a_budget_skips_what_has_not_begun(tmp_path: Path, budget_s: str, outcome: str) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), "-c", "/dev/null", f"--budget-s={budget_s}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert outcome in done.stdout


@pytest.mark.parametrize("program", ["#!/bin/sh\necho 'fatal: detected dubious ownership' >&2\nexit 128\n", None])
def test_a_git_that_fails_is_no_change_that_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str | None
) -> None:
    if program is not None:
        (tmp_path / "git").write_text(program)
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.main(["--list"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("check: git cannot tell what has changed: ")
    assert ("dubious ownership" if program else "No such file") in printed.err
