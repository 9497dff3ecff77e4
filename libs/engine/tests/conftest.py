"""Before torch is loaded: products whose rows have the same bits whatever their number, as in the rank processes.
Before triton is (transformers loads it): its kernels are interpreted where there is no GPU.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))
