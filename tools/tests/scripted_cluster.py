"""The cluster behind `fake_kubectl.py`, as tests use it: its programs, and what an experiment has left there."""

import json
import sys
from pathlib import Path

FAKE_KUBECTL = Path(__file__).with_name("fake_kubectl.py")
OTHERS_RULES = "-P PREROUTING ACCEPT\n-P POSTROUTING ACCEPT\n-A PREROUTING -i cni0 -j DROP\n"
"""iptables rules that do not belong to Lockstep."""


def install(state: Path) -> Path:
    """Set up a cluster in a directory; returns the directory of its programs."""
    programs = state / "bin"
    programs.mkdir()
    for program in ("kubectl", "helm", "iptables"):
        script = programs / program
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{FAKE_KUBECTL}" {program} "$@"\n')
        script.chmod(0o755)
    for node in ("n1", "n2"):
        (state / f"rules-{node}").write_text(OTHERS_RULES)
    return programs


def left(state: Path) -> list[str]:
    """What an experiment has left: objects, cordons, running containers, rules, an upgraded release."""
    found = [path.name for path in sorted((state / "objects").glob("*:*"))]
    found += [path.name for pattern in ("cordoned-*", "container-*") for path in sorted(state.glob(pattern))]
    found += [path.name for path in sorted(state.glob("rules-*")) if path.read_text() != OTHERS_RULES]
    revision = state / "helm"
    return found + (["upgrade"] if revision.exists() and json.loads(revision.read_text())[1] != 1 else [])
