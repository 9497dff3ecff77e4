"""Each worker of `lockstep serve` has GPUs of its own; too few are an error before anything starts."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from lockstep_tools.failure import CommandError
from lockstep_tools.serving import gpus
from lockstep_tools.serving.stack import Stack, StackSettings

ANY_LIBRARY = "libc.so.6"


def machine_with(number: int, monkeypatch: pytest.MonkeyPatch, given: str | None = None) -> None:
    """Let torch find so many GPUs, with CUDA_VISIBLE_DEVICES as given."""
    monkeypatch.setattr(gpus, "count", lambda: number)
    if given is None:
        monkeypatch.delenv(gpus.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(gpus.VARIABLE, given)


@pytest.mark.parametrize(
    ("given", "number", "workers", "tp", "expected"),
    [
        (None, 8, 2, 4, ["0,1,2,3", "4,5,6,7"]),
        (None, 8, 3, 2, ["0,1", "2,3", "4,5"]),
        (None, 1, 1, 1, ["0"]),
        ("6, 5,4,3", 4, 2, 2, ["6,5", "4,3"]),
        ("GPU-a,GPU-b", 2, 2, 1, ["GPU-a", "GPU-b"]),
        ("3,2,unknown,1", 2, 2, 1, ["3", "2"]),
    ],
)
def test_each_worker_has_its_slice_of_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, given: str | None, number: int, workers: int, tp: int, expected: list[str]
) -> None:
    machine_with(number, monkeypatch, given)
    assert gpus.of_workers("cuda", workers, tp) == expected
    assert gpus.of_workers("auto", workers, tp) == expected


def test_a_worker_on_the_cpu_is_given_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(8, monkeypatch)
    assert gpus.of_workers("cpu", 2, 4) == []
    assert gpus.of_workers("auto", 2, 9) == []  # as ranks choose: there is not one for each rank of a worker
    machine_with(0, monkeypatch)
    assert gpus.of_workers("auto", 2, 4) == []
    machine_with(8, monkeypatch, given="")
    assert gpus.of_workers("auto", 2, 4) == []


@pytest.mark.parametrize(
    ("device", "number", "given"), [("cuda", 7, None), ("auto", 4, None), ("cuda", 0, None), ("cuda", 8, "")]
)
def test_too_few_gpus_are_an_error_before_anything_starts(
    stubs: Path, model: str, monkeypatch: pytest.MonkeyPatch, device: str, number: int, given: str | None
) -> None:
    machine_with(number, monkeypatch, given)
    stack = Stack(StackSettings(model, workers=2, tp=4, device=device))
    found = 0 if given == "" else number
    with pytest.raises(CommandError, match=f"--workers 2 with --tp 4 needs 8 GPUs, .* finds {found} here") as raised:
        stack.start()
    assert raised.value.exit_code == 2
    assert not stack.started
    assert list(stubs.glob("*.starts")) == []


def test_a_worker_sees_its_gpus_alone_also_when_it_is_started_again(
    stubs: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with(4, monkeypatch, "7,6,5,4")

    def seen(pid: int | None) -> str | None:
        return psutil.Process(pid).environ().get(gpus.VARIABLE)

    with Stack(StackSettings(model, workers=2, tp=2)) as stack:
        stack.wait_ready(10)
        before = stack.worker_pids
        assert [seen(pid) for pid in before.values()] == ["7,6", "5,4"]
        assert seen(stack.router_pid) == "7,6,5,4"
        os.kill(before["w1"] or 0, 9)
        deadline = time.monotonic() + 10
        while stack.worker_pids["w1"] in (None, before["w1"]):
            assert time.monotonic() < deadline, "it is not started again"
            time.sleep(0.01)
        stack.wait_ready(10)
        assert seen(stack.worker_pids["w1"]) == "5,4"


def fake_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (folder / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_gpus_are_those_that_torch_finds_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "class cuda:\n    is_available = staticmethod(lambda: {})\n    device_count = staticmethod(lambda: 3)\n"
    fake_torch(tmp_path, monkeypatch, code.format(True))
    had_torch = "torch" in sys.modules
    assert gpus.count(ANY_LIBRARY) == 3
    assert ("torch" in sys.modules) is had_torch
    fake_torch(tmp_path, monkeypatch, code.format(False))
    assert gpus.count(ANY_LIBRARY) == 0


def test_without_a_driver_torch_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(tmp_path, monkeypatch, "raise SystemExit(3)")
    assert gpus.count("libno-such-driver.so.1") == 0


def test_gpus_that_cannot_be_counted_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(tmp_path, monkeypatch, "raise RuntimeError('the driver is broken')")
    with pytest.raises(CommandError, match="the GPUs cannot be counted: RuntimeError: the driver is broken"):
        gpus.count(ANY_LIBRARY)
