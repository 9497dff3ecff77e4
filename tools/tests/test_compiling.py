"""The root conftest's compiling of test files: only of what pytest would import, and nothing that it meets ends the
session.
"""

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def begin(conftest, tmp_path, pytestconfig, monkeypatch):
    """Begin the session of a process of pytest-xdist for a folder; the names of what was compiled."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)

    def begin(**options):
        options = {"assertmode": "rewrite"} | options
        config = SimpleNamespace(
            workerinput={"workerid": "gw1", "workercount": 2},
            args=[".", "none", "test_file.py::test"],
            invocation_params=SimpleNamespace(dir=tmp_path),
            option=SimpleNamespace(**options),
            getoption=options.get,
            getini=pytestconfig.getini,
            stash=pytestconfig.stash,
        )
        conftest.pytest_sessionstart(SimpleNamespace(config=config))
        return sorted(path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc"))

    return begin


def test_folders_that_pytest_does_not_enter_are_left_out(begin, tmp_path) -> None:
    for name in ("test_file.py", "folder/test_file_of_a_folder.py", ".venv/lib/test_library.py", "other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("assert True")
    assert begin() == ["test_file", "test_file_of_a_folder"]


def test_files_that_cannot_be_compiled_are_left_to_pytest(begin, tmp_path) -> None:
    (tmp_path / "test_a_link.py").symlink_to("nowhere")
    (tmp_path / "test_bytes.py").write_bytes(b"a = '\0'")
    (tmp_path / "test_syntax.py").write_text("def")
    (tmp_path / "test_well.py").write_text("assert True")
    assert begin() == ["test_well"]


def test_without_rewriting_nothing_is_compiled(begin, tmp_path) -> None:
    (tmp_path / "test_file.py").write_text("assert True")
    assert begin(assertmode="plain") == []
