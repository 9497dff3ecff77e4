"""Starting and stopping again and again leaves nothing: no process, no shared memory, no port, no file.

`--restarts 200` makes it as long as you like.
"""

import random
import secrets
import time
from collections.abc import Callable

import httpx
import pytest
from killing import percentile
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import left_since, port_is_free, quiet_port, traces
from system import MODEL, REFERENCE

_QUESTION = {"model": MODEL, "prompt": "Call me", "max_tokens": 4, "temperature": 0}


@pytest.mark.slow
def test_nothing_is_left_by_many_starts_and_stops(
    pytestconfig: pytest.Config, private_tmp: object, summarize: Callable[[str], None]
) -> None:
    """Every other system serves before it is stopped; the rest is stopped at a random moment of its start."""
    count = pytestconfig.getoption("restarts")
    seed = pytestconfig.getoption("chaos_seed")
    seed = secrets.randbelow(10**6) if seed is None else seed
    choices = random.Random(seed)
    before = traces()
    ready_s: list[float] = []
    stopped_s: list[float] = []
    answers = set()
    port = quiet_port()  # the same one every time: it must be free again
    for number in range(count):
        began_s = time.monotonic()
        with Stack(StackSettings(str(REFERENCE), threads=1, device="cpu", port=port)) as stack:
            if number % 2 == 0:
                stack.wait_ready(60)
                ready_s.append(time.monotonic() - began_s)
                response = httpx.post(f"{stack.url}/v1/completions", json=_QUESTION, timeout=30, trust_env=False)
                answers.add(response.raise_for_status().json()["choices"][0]["text"])
            else:
                time.sleep(choices.uniform(0.0, 1.2 * ready_s[-1]))
            stopping_s = time.monotonic()
        stopped_s.append(time.monotonic() - stopping_s)
        assert left_since(before) == [], f"start {number}"
        assert port_is_free(port), f"start {number}"
    summarize(
        f"restarts: {count} starts and stops (seed {seed}), nothing left; {len(ready_s)} until ready and answering "
        f"(p50 {percentile(ready_s, 0.5):.1f} s, max {max(ready_s):.1f} s), {count - len(ready_s)} stopped while "
        f"starting; a stop took p50 {percentile(stopped_s, 0.5):.2f} s, max {max(stopped_s):.2f} s"
    )
    assert len(answers) == 1
    assert max(stopped_s) < 10
