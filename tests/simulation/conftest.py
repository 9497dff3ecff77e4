"""The path on which these tests find the simulation."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# Faults are what these tests are made of: the router's warnings about them tell nothing.
logging.getLogger("lockstep").setLevel(logging.CRITICAL)
