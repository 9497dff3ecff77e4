"""Runs one attack: NAME HOST PORT SECONDS."""

import asyncio
import sys

from lockstep_tools.file_limit import raise_file_limit
from lockstep_tools.hostile.attacks import run

raise_file_limit()
try:
    asyncio.run(run(sys.argv[1], (sys.argv[2], int(sys.argv[3])), float(sys.argv[4])))
except OSError as failure:
    sys.exit(f"attack {sys.argv[1]}: {failure}")
