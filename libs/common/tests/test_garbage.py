"""What is imported at a process's start is not searched for garbage meanwhile."""

import gc
import subprocess
import sys

import pytest
from lockstep_common.garbage import without_collections

# The exit status says whether the collector runs when the service's modules are imported; none of them is.
_PROBE = """
import gc, runpy, sys

class Probe:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            sys.exit(10 + gc.isenabled())

sys.meta_path.insert(0, Probe())
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.fixture(params=[True, False], ids=["on", "off"])
def was_enabled(request):
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


def test_nothing_is_collected_inside(was_enabled):
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled() is was_enabled


def test_the_collector_is_as_before_after_an_error(was_enabled):
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled() is was_enabled


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("lockstep_router", "lockstep_router.processes"),
        ("lockstep_worker", "lockstep_worker.server"),
        ("lockstep_state", "lockstep_state.server"),
    ],
)
def test_services_import_without_collections(package, module):
    ended = subprocess.run([sys.executable, "-c", _PROBE, package, module], check=False, timeout=120)
    assert ended.returncode == 10
