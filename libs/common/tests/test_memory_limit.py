"""Memory that a process can get, read from files as kernels and runtimes lay them out."""

import sys

import pytest
from lockstep_common.memory_limit import usable_memory

GIB = 2**30


@pytest.fixture
def memory(tmp_path):
    """The usable memory by a tree of files, on a machine that has 8 GiB available."""

    def found(membership, files, meminfo="MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n"):
        for name, content in {**files, "membership": membership, "meminfo": meminfo}.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return usable_memory(tmp_path, tmp_path / "membership", tmp_path / "meminfo")

    return found


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"memory.max": f"{GIB}\n"}, GIB),
        ("0::/\n", {"memory.max": "max\n"}, 8 * GIB),
        ("0::/\n", {"memory.max": f"{9 * GIB}\n"}, 8 * GIB),
        ("0::/pod/one\n", {"pod/memory.max": f"{2 * GIB}\n", "pod/one/memory.max": "max\n"}, 2 * GIB),
        ("5:memory:/docker/abc\n4:cpu:/\n", {"memory/memory.limit_in_bytes": f"{3 * GIB}\n"}, 3 * GIB),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 8 * GIB),
    ],
)
def test_the_tightest_limit_counts(memory, membership, files, expected):
    assert memory(membership, files) == expected


def test_without_any_word_of_it_there_is_no_limit(memory, tmp_path):
    assert memory("", {}, meminfo="") == sys.maxsize
    nowhere = tmp_path / "none"
    assert usable_memory(nowhere, nowhere, nowhere) == sys.maxsize


def test_this_machine_has_some():
    assert 0 < usable_memory() < sys.maxsize
