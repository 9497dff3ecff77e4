"""Prompts for models that fill in the middle of a text: the tokens that mark what precedes and what follows the gap.

Which marks a model was trained with is known by its vocabulary alone; a model without any cannot do it. The marks are
added as ids, so the text between them is encoded like any other text of a client.
"""

from collections.abc import Callable
from dataclasses import dataclass

TokenId = Callable[[str], int | None]
"""The id of a token in the vocabulary; None: it has no such token."""


@dataclass(frozen=True)
class Infill:
    """The marks of one model, as ids."""

    before_prefix: int
    before_suffix: int
    before_middle: int | None
    """None: the suffix comes first, and the answer follows the prefix."""
    end: int | None = None
    """Ends the answer, like the model's own end-of-text ids."""

    def arrange(self, head: list[int], prefix: list[int], suffix: list[int]) -> list[int]:
        """The prompt.

        Args:
            head: the special tokens at the beginning of every text.
            prefix: the text before the gap.
            suffix: the text after the gap.
        """
        if self.before_middle is None:
            return [*head, self.before_suffix, *suffix, self.before_prefix, *prefix]
        return [*head, self.before_prefix, *prefix, self.before_suffix, *suffix, self.before_middle]


_MARKS: tuple[tuple[str, str, str | None, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", None),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", None),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", None),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", None),  # noqa: RUF001 - DeepSeek-Coder's own characters
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]", None, None),  # Codestral
)
"""Marks before the prefix, the suffix and the middle, and the end of the middle."""


def find_infill(token_id: TokenId) -> Infill | None:
    """The marks that a vocabulary has; None if it has none."""
    for before_prefix, before_suffix, before_middle, end in _MARKS:
        prefix_id, suffix_id = token_id(before_prefix), token_id(before_suffix)
        middle_id = None if before_middle is None else token_id(before_middle)
        if prefix_id is None or suffix_id is None or (middle_id is None) != (before_middle is None):
            continue
        return Infill(prefix_id, suffix_id, middle_id, None if end is None else token_id(end))
    return None
