"""Before triton is loaded (transformers loads it): its kernels are interpreted where there is no GPU."""

import os
import sys
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def ordered_products(monkeypatch):
    """Products of Triton's interpreter in the order of their terms; on a GPU they are its own."""
    import ordered  # noqa: PLC0415 - it loads Triton

    ordered.install(monkeypatch)


@pytest.fixture
def without_kernels():
    """The twins of the CPU kernels in torch."""
    from lockstep_engine.kernels import cpu  # noqa: PLC0415 - it loads torch

    before = cpu.build or "off"
    cpu.use("off")
    yield
    cpu.use(before)
