"""Workers whose steps take long on a machine of any speed, for streams that must not end before the test ends them."""

from pathlib import Path

from kube import Json, apply
from lockstep_tools.chaos.kubectl import Kubectl

LONG = 1900
"""Tokens of a stream that the test ends: they take 76 s at least."""
_PAUSE_MS = 40
_CHANGES = Path(__file__).parents[1] / "integration/slow_rank/sitecustomize.py"
_NAME = "slow-steps"
_MOUNTED = "/slow-steps"


def slow_workers(kubectl: Kubectl) -> Json:
    """The values of a release in this namespace whose ranks sleep for a while in each step."""
    data = {_CHANGES.name: _CHANGES.read_text()}
    apply(kubectl, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _NAME}, "data": data})
    return {
        "env": [
            {"name": "PYTHONPATH", "value": f"{_MOUNTED}:/app"},  # of the image: /app
            {"name": "STEP_PAUSE_MS", "value": str(_PAUSE_MS)},
        ],
        "extraVolumes": [{"name": _NAME, "configMap": {"name": _NAME}}],
        "extraVolumeMounts": [{"name": _NAME, "mountPath": _MOUNTED, "readOnly": True}],
    }
