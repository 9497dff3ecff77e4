"""A worker process on the scripted engine: `python scripted_process.py [flags of the worker]`."""

import sys

from lockstep_common.lifecycle import obey_parent
from lockstep_worker.server import main
from scripted_engine import Script

if __name__ == "__main__":
    obey_parent()
    sys.exit(main(engine_factory=Script(step_s=0.02)))
