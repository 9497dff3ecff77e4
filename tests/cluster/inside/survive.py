"""Runs in a pod with the tools' image: streams of `lockstep_client` that know several routers.

The argument is a JSON object: `routers` (base URLs), `model`, `streams`, `tokens`. All streams run once undisturbed,
then once more; the line `streaming` says that each of these has a token. The last line lists those whose text is not
the undisturbed one.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from lockstep_client import LockstepClient, LockstepError, Policy, TextPiece

given = json.loads(sys.argv[1])
begun = threading.Barrier(given["streams"], action=lambda: print("streaming", flush=True))


def text_of(client, number, *, together):
    """The text of a stream, or its error."""
    text, waits = "", together
    prompt = f"Story {number}: once upon a time"
    fields = {"max_tokens": given["tokens"], "seed": number, "ignore_eos": True}
    try:
        with client.complete(prompt, model=given["model"], stream=True, **fields) as stream:
            for event in stream:
                if isinstance(event, TextPiece):
                    text += event.text
                    if waits:
                        begun.wait(300)
                        waits = False
    except LockstepError as error:
        return f"{type(error).__name__}: {error.code}"
    return text


with (
    LockstepClient(given["routers"], policy=Policy(silence_timeout_s=120.0)) as client,
    ThreadPoolExecutor(given["streams"]) as pool,
):
    numbers = range(given["streams"])
    alone = list(pool.map(lambda number: text_of(client, number, together=False), numbers))
    again = list(pool.map(lambda number: text_of(client, number, together=True), numbers))
different = [f"{number}: {new[-60:]!r}" for number, old, new in zip(numbers, alone, again, strict=True) if old != new]
print(json.dumps({"streams": len(again), "characters": sum(map(len, again)), "different": different}))
