"""Before triton is loaded (transformers loads it): its kernels are interpreted where there is no GPU."""

import os
import sys
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))
