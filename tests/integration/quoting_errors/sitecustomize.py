"""Errors whose messages quote a request, as those of libraries do. Python imports this at its start; no service has a
switch for it.

QUOTING_ERRORS is a folder. While it has a file `router`, `worker` or `rank`, the next request makes that process raise
such an error, once: the router when it encodes a prompt, the worker when it submits it, rank 0 when it computes it.
"""

import os
import runpy
import sys
from pathlib import Path

# Python imports only one file of this name: that of slow ranks is run by this one.
runpy.run_path(str(Path(__file__).parents[1] / "slow_rank/sitecustomize.py"))

folder = os.environ.get("QUOTING_ERRORS", "")


def is_next(place):
    """Whether this process has to raise an error now: the process that can remove the file has to."""
    try:
        os.unlink(os.path.join(folder, place))
    except FileNotFoundError:
        return False
    return True


if folder and "lockstep_router" in sys.orig_argv:
    from lockstep_router.text.tokenizer import Tokenizer

    encode = Tokenizer.encode

    def quoting(self, text, **options):
        if is_next("router"):
            raise ValueError(f"cannot encode {text!r}")
        return encode(self, text, **options)

    Tokenizer.encode = quoting

if folder and "lockstep_worker" in sys.orig_argv:
    from lockstep_engine.engine import AsyncEngine

    submit = AsyncEngine.submit

    def refusing(self, request):
        if is_next("worker"):
            raise ValueError(f"cannot take {request!r}")
        submit(self, request)

    AsyncEngine.submit = refusing

if folder and any("lockstep_engine.zygote" in argument for argument in sys.orig_argv):
    from lockstep_engine.rank import Rank

    forward = Rank.forward

    def failing(self, ids, *arguments):
        if self._spec.rank == 0 and is_next("rank"):
            raise RuntimeError(f"cannot compute {ids.tolist()}")
        return forward(self, ids, *arguments)

    Rank.forward = failing
