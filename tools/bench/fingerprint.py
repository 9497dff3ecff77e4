"""The numerics fingerprint of a model on this CPU: workers with the same one continue each other's streams exactly.

It is measured in this process, without ranks, so that other CPUs can be emulated:

    python tools/bench/fingerprint.py models/reference
    qemu-x86_64 -cpu Haswell .venv/bin/python tools/bench/fingerprint.py models/reference
"""

import argparse
import sys
from pathlib import Path

import torch
from lockstep_engine.kernels import cpu
from measure import ROOT

sys.path.insert(0, str(ROOT / "libs/engine/tests"))

from in_process import InProcessGroup


def main() -> None:
    """Measure and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    numerics = InProcessGroup(arguments.model, 1).measure_alone()
    print(f"kernels: {cpu.build or 'off'}, torch: {torch.backends.cpu.get_cpu_capability()}")
    print(f"fingerprint: {numerics.fingerprint or 'none, results differ between steps'}")


if __name__ == "__main__":
    main()
