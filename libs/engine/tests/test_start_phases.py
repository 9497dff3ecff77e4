"""What a start took is logged by phase, when the ranks are ready."""

import asyncio
import logging
from pathlib import Path

from handmade import write_model
from lockstep_engine import AsyncEngine, EngineConfig

RANKS = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import scripted_ranks_zygote; "
RANKS += "scripted_ranks_zygote.main(step_s=0.001, token_s=0.001)"


def test_a_start_is_logged_by_phase(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lockstep.engine")

    async def start():
        engine = AsyncEngine(
            EngineConfig(model=str(write_model(tmp_path)), max_seqs=1),
            on_outputs=lambda *_: None,
            on_change=lambda: None,
            zygote=RANKS,
        )
        async with asyncio.timeout(120):
            await engine.start()
            await engine.close()

    asyncio.run(start())
    (ready,) = (each for each in caplog.records if each.getMessage() == "ranks are ready")
    assert list(ready.phases_s) == ["import", "fork", "load", "record"]
    assert ready.phases_s["import"] > 0
