"""How fast the ranks compute prompts at the moment, from the steps that computed parts of some.

A step takes some time whatever it computes, and more for each token of a prompt in it. The two are kept apart: after a
hit in the prefix cache a step computes only the few tokens at the end of a prompt, and nearly all of its time is the
fixed part. Divided by its tokens, that time would say that prompts are computed far slower than they are.
"""

import math

_STEP_WEIGHT = 0.2
"""Weight of the last step in the moving mean of the fixed part."""
_MEMORY_TOKENS = 512
"""After so many tokens of prompts, what was known before counts 1/e."""
_SELF_TEST_TOKENS = 16
"""The pace of the self-test counts like a step with so many tokens."""


class PromptPace:
    """Follows the steps of one engine. All times are in seconds on one monotonic clock."""

    def __init__(self) -> None:
        self.token_s = 0.0
        """Time for each further token of a prompt; 0: unknown."""
        self.step_s = 0.0
        """Time of a step besides that, those that decode in it included; 0: unknown."""
        self._measured = False
        # Least squares of the line through `step_s`: a long step says much more about the time of a token than a short
        # one. Both sums forget.
        self._squares = 0.0
        self._products = 0.0
        self._in_flight: dict[int, tuple[int, float]] = {}
        """Tokens of prompts and time of each step that is to be measured, by its number."""
        self._last_at = 0.0

    def begin(self, step_s: float, token_s: float) -> None:
        """New ranks are ready; these are the times of their self-test."""
        self._in_flight.clear()
        if not self._measured:
            self.step_s, self.token_s = step_s, token_s
            self._squares = _SELF_TEST_TOKENS**2 if token_s else 0.0
            self._products = self._squares * token_s

    def prompt_s(self, tokens: int, step_tokens: int) -> float:
        """Seconds that so many tokens of a prompt add, in steps of at most `step_tokens`."""
        return tokens * (self.token_s + self.step_s / step_tokens)

    def planned(self, step: int, prompt_tokens: int, sent_at: float) -> None:
        """A step is sent that computes so many tokens of prompts, and perhaps others.

        Args:
            step: its number.
            prompt_tokens: 0: it only decodes.
            sent_at: just before it was sent. Just after may be too late: on a busy machine the ranks may run, and be
                done, before the sender runs again.
        """
        self._in_flight[step] = (prompt_tokens, sent_at)

    def done(self, step: int, now: float) -> None:
        """A step is done. One that was not noted when it was sent is not measured."""
        noted = self._in_flight.pop(step, None)
        if noted is not None:
            tokens, sent_at = noted
            took_s = max(0.0, now - max(sent_at, self._last_at))
            if tokens:
                self._measure_prompt(tokens, took_s)
            else:
                self.step_s += _STEP_WEIGHT * (took_s - self.step_s)
        self._last_at = now

    def _measure_prompt(self, tokens: int, took_s: float) -> None:
        if took_s < self.step_s:  # from a time when more requests were decoding, or the machine was busier
            self.step_s += _STEP_WEIGHT * (took_s - self.step_s)
        kept = math.exp(-tokens / _MEMORY_TOKENS)
        self._squares = kept * self._squares + tokens**2
        self._products = kept * self._products + tokens * max(0.0, took_s - self.step_s)
        self.token_s = self._products / self._squares
        self._measured = True
