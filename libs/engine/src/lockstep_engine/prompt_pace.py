"""How fast the ranks compute prompts at the moment, from the steps that computed parts of some."""

_WEIGHT = 0.2
"""Weight of the last step in the moving mean."""


class PromptPace:
    """Follows the steps of one engine. All times are in seconds on one monotonic clock."""

    def __init__(self) -> None:
        self.token_s = 0.0
        """Time for each token of a prompt; 0: unknown."""
        self._measured = False
        self._in_flight: dict[int, tuple[int, float]] = {}
        """Tokens and time of each step, by its number."""
        self._last_at = 0.0

    def begin(self, token_s: float) -> None:
        """New ranks are ready; `token_s` is the pace of their self-test."""
        self._in_flight.clear()
        if not self._measured:
            self.token_s = token_s

    def planned(self, step: int, prompt_tokens: int, now: float) -> None:
        """A step was sent that computes so many tokens of prompts and others; 0: none of prompts."""
        self._in_flight[step] = (prompt_tokens, now)

    def done(self, step: int, now: float) -> None:
        """A step is done. There may have been no memory to note it when it was sent."""
        tokens, sent_at = self._in_flight.pop(step, (0, 0.0))
        if tokens:
            step_s = (now - max(sent_at, self._last_at)) / tokens
            self.token_s += (_WEIGHT if self._measured else 1.0) * (step_s - self.token_s)
            self._measured = True
        self._last_at = now
