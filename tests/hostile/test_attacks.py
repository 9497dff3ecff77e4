"""Whatever one client does, the others' streams continue, /healthz and new requests are answered, nothing is left over.

What is held here, so that it holds on slow and busy machines: no stream fails and memory is freed in every try. Times
are below their limits in the first try, or each in two of three: in one the machine may have paused the router, the
workers or this process. The p99 of /healthz is below 200 ms in these, and below 100 ms in the best of all. On a machine
that is slower in calm, just before the attack, these limits are longer, up to four times. What is reached on a machine
without other work is the figure in `docs/bench/hostile.md`, which `tools/bench/hostile.py` measures: lower, and without
tries or a factor.
"""

import os
import signal
import threading
from collections import Counter

import pytest
from lockstep_tools.hostile.attacks import names
from trial import LIMITS, Outcome, Scene, attack, calm

SECONDS = 2.0
_CALM_S = 1.0
_LATEST_S = {
    "silence_s": LIMITS["silence_s"],
    "healthz_p99_s": 0.2,
    "first_token_s": 2.0,
    "vanished_s": LIMITS["vanished_s"],
}
"""In the first try, or each in two of three."""
_CALM_SILENCE_S = 0.1  # two tokens at 20 a second
_CALM_HEALTHZ_P99_S = 0.01
_MAX_SLOWNESS = 4.0
_TRIES = 3
_STOPPED_S = 4.0
_FAST = {"mixed-prompt", "stalled-bodies", "websocket-vanishing"}
"""Tokenizing, memory and sockets; `make test-slow` has the others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _FAST else pytest.mark.slow) for name in names()]
)
def test_attack_is_not_noticed(scene: Scene, name: str, summarize) -> None:
    late: Counter[str] = Counter()
    is_prompt = False
    for number in range(_TRIES):
        quiet = calm(scene.observer, _CALM_S)
        outcome = attack(scene.target, scene.observer, name, SECONDS)
        slowness = min(
            _MAX_SLOWNESS, max(1.0, quiet.silence_s / _CALM_SILENCE_S, quiet.healthz_p99_s / _CALM_HEALTHZ_P99_S)
        )
        summarize(
            f"{name}: silence {outcome.silence_s:.2f} s, healthz p99 {1000 * outcome.healthz_p99_s:.0f} ms, "
            f"first token {outcome.first_token_s:.2f} s, memory peak {outcome.memory_peak_bytes >> 20} MiB, "
            f"left {outcome.memory_left_bytes >> 20} MiB, vanished {outcome.vanished_s:.2f} s "
            f"(machine slower by {slowness:.1f})"
        )
        assert not outcome.failed
        assert not outcome.failures
        assert outcome.memory_peak_bytes < LIMITS["memory_peak_bytes"]
        assert outcome.memory_left_bytes < LIMITS["memory_left_bytes"]
        late.update(too_late(outcome, slowness))
        is_prompt |= outcome.healthz_p99_s < LIMITS["healthz_p99_s"] * slowness
        if number == 0 and is_prompt and not late:
            return
    assert is_prompt, "/healthz was late in every try"
    assert max(late.values(), default=0) < 2, f"late in several tries: {late}"


def test_silence_that_outlasts_its_attack_counts_whole(scene: Scene) -> None:
    pid = scene.target.router_pid
    os.kill(pid, signal.SIGSTOP)
    going_on = threading.Timer(_STOPPED_S, os.kill, (pid, signal.SIGCONT))
    going_on.start()
    try:
        outcome = attack(scene.target, scene.observer, "vanishing", 0.2)
    finally:
        going_on.join()
    # What was in the kernel's buffers is read after the router has stopped.
    assert outcome.silence_s > 0.8 * _STOPPED_S
    assert outcome.healthz_max_s > 0.8 * _STOPPED_S


def too_late(outcome: Outcome, slowness: float) -> list[str]:
    """The names of the times that are above their limits."""
    return [name for name, limit_s in _LATEST_S.items() if getattr(outcome, name) >= limit_s * slowness]
