"""A worker process with `device: cuda` and without GPUs: its engine and its NVML are scripted.

`gpu_worker.py READINGS [flags of the worker]`; READINGS is the file of `nvml.Readings`.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests/doubles"))
sys.path.append(str(Path(__file__).parents[2] / "services/inference-worker/tests"))

from lockstep_common.lifecycle import obey_parent
from lockstep_worker.server import main
from nvml import FileNvml
from scripted_engine import Script

if __name__ == "__main__":
    obey_parent()
    sys.modules["pynvml"] = FileNvml(Path(sys.argv[1]))  # type: ignore[assignment]
    sys.exit(main(["--device=cuda", *sys.argv[2:]], Script(step_s=0.02)))
