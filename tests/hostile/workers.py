"""Two scripted workers as a process: `workers.py TESTS_OF_THE_ROUTER DIRECTORY TOKEN_EVERY_S [MAX_TOKENS]`.

They give every stream a token each TOKEN_EVERY_S, and MAX_TOKENS at most; one that asks for many tokens with their
log probabilities gets them as fast as a fast GPU gives them. For each line on stdin they print a line: the
streams that they still run.
"""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])

from scripted_worker import Script, ScriptedWorker, model_card

CONTEXT_LENGTH = 1 << 20
HEARTBEAT_S = 0.1
"""As a real worker's. A starved router reads each frame by itself, and new streams' tokens wait behind those unread."""
TOKEN_EVERY_S = float(sys.argv[3])
LARGE_TOKENS = 1000
FAST_BATCH = 10
"""Tokens of a fast stream in each step."""
MAX_TOKENS = int(sys.argv[4]) if len(sys.argv) > 4 else None


def token(prompt_ids, seed, position):
    """Cheap whatever the prompt."""
    return 100 + (seed + position * 7919) % 3000


def choose_script(worker):
    """Called before a stream reads its script."""

    def choose(submit, _):
        is_large = submit.sampling.HasField("logprobs") and submit.sampling.max_tokens >= LARGE_TOKENS
        worker.script = fast if is_large else usual

    usual, fast = (
        Script(delay_s=TOKEN_EVERY_S, token=token, stop_after=MAX_TOKENS, batch=batch) for batch in (1, FAST_BATCH)
    )
    worker.script, worker.on_start = usual, choose


def links(worker):
    """Its connections, in older checkouts too."""
    return worker.connections if hasattr(worker, "connections") else worker._connections


def running(workers):
    return sum(not task.done() for worker in workers for link in links(worker) for task in link.tasks.values())


async def forget(workers):
    """What the double records would fill the memory."""
    while True:
        await asyncio.sleep(0.5)
        for worker in workers:
            worker.submits.clear()
            worker.cancels.clear()
            for link in links(worker):
                link.tasks = {name: task for name, task in link.tasks.items() if not task.done()}


async def main():
    workers = []
    for index in range(2):
        worker = ScriptedWorker(
            f"w{index}",
            Path(sys.argv[2]) / f"w{index}.sock",
            card=model_card(context_length=CONTEXT_LENGTH),
            heartbeat_s=HEARTBEAT_S,
        )
        choose_script(worker)
        workers.append(await worker.start())
    print("ready", flush=True)
    forgetting = asyncio.create_task(forget(workers))
    while await asyncio.to_thread(sys.stdin.readline):
        print(running(workers), flush=True)
    forgetting.cancel()


asyncio.run(main())
