"""Before torch is loaded: products whose rows have the same bits whatever their number, as in the rank processes."""

import os
import sys
from pathlib import Path

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
sys.path.insert(0, str(Path(__file__).parent))
