"""`lockstep generate`: text from a model, offline: an engine in this process's care and no server."""

import argparse
import sys
import time
from dataclasses import fields
from typing import Any

from lockstep_common.errors import LockstepError

from lockstep_tools import console
from lockstep_tools.arguments import add_engine, real, whole
from lockstep_tools.failure import UNUSABLE, CommandError

DESCRIPTION = "Generate text offline, without a server: the continuation of PROMPT goes to stdout, the speed to stderr."

EXAMPLES = """\
  lockstep generate models/reference 'It was a dark night, and' --max-tokens 100
  lockstep generate models/reference - --tp 2 --temperature 0 < prompt.txt"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="directory of the model")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads stdin")
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=whole(1), default=128, metavar="N", help="default: 128")
    group.add_argument("--temperature", type=real(0, 100), default=0.8, metavar="T", help="0 is greedy (default: 0.8)")
    group.add_argument("--top-k", type=whole(0), default=0, metavar="K", help="keep the K most likely tokens; 0: all")
    group.add_argument("--top-p", type=real(1e-9, 1), default=1.0, metavar="P", help="keep the likeliest P of the mass")
    group.add_argument("--min-p", type=real(0, 1), default=0.0, metavar="P", help="drop below P of the likeliest")
    group.add_argument("--repetition-penalty", type=real(0.01, 100), default=1.0, metavar="R")
    group.add_argument("--seed", type=whole(0, 2**64 - 1), default=0, metavar="N", help="default: 0")
    group.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    add_engine(parser)
