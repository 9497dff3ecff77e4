"""Weights in huge pages."""

import re
from pathlib import Path

import pytest
import torch
from lockstep_engine.huge_pages import HUGE_PAGE, empty


def flags_at(address):
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 32), (0, 4), (40, 2048, 32)])
def test_a_tensor_of_any_size_holds_what_is_put_into_it(shape, dtype):
    values = torch.randn(shape).to(dtype)
    kept = empty(shape, dtype)
    kept.copy_(values)
    assert kept.is_contiguous()
    assert torch.equal(kept, values)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="the kernel has no huge pages"
)
def test_the_kernel_is_asked_for_huge_pages_where_they_are_filled():
    large = empty((4 * HUGE_PAGE,), torch.uint8)
    assert "hg" in flags_at(large.data_ptr())
    assert "hg" not in flags_at(empty((HUGE_PAGE,), torch.uint8).data_ptr())


def test_without_them_the_memory_is_usual(monkeypatch):
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    assert empty((4 * HUGE_PAGE,), torch.uint8).shape == (4 * HUGE_PAGE,)
