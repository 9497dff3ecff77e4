"""Text of others, made harmless for a terminal. Imports nothing heavy: every command shows its errors with it."""

import unicodedata

_OTHER_FORMATS = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode's categories of characters that terminals and bidirectional text act on, or that are invisible."""


def harmless(text: str, *, keep: str = "") -> str:
    """The text with every character escaped that a terminal or bidirectional text would act on, but for `keep`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if each in keep else _escaped(each) for each in text)


def harmless_lines(text: str) -> str:
    """The same for a text that may have several lines."""
    return harmless(text, keep="\n\t")


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in _OTHER_FORMATS:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
