"""A worker process whose engine starts and then fails, for good or by a defect (SCRIPTED_DEFECT)."""

import os
import sys

from lockstep_worker.server import main
from scripted_engine import Script, ScriptedEngine


class FailingEngine(ScriptedEngine):
    async def start(self) -> None:
        await super().start()
        if defect := os.environ.get("SCRIPTED_DEFECT"):
            self.status_error = RuntimeError(defect)
        else:
            self.fail("the ranks do not stay up: rank 1 (pid 7) died")

    def status(self):
        if error := getattr(self, "status_error", None):
            raise error
        return super().status()


def make(config, *, on_outputs, on_change, on_phases, remote_store=None):
    return FailingEngine(Script(), config, on_outputs, on_change, on_phases)


if __name__ == "__main__":
    sys.exit(main(engine_factory=make))
