"""Separates users' text from the control tokens that the chat template puts around it.

A control token is one that the tokenizer's files call special, such as `<|assistant|>`, or that the chat template marks
turns with. In a user's text it would end the user's turn and begin another one, so there it is encoded as plain
characters. Only control tokens that the chat template writes are encoded as control tokens. A template can also make
one of pieces of users' texts, by removing something between two pieces or by writing something around one: those in
its own strings are marked before it runs, and of others a rendering with `neutral` texts shows whose they are. The
encoding of any other text never changes.
"""

import codecs
import json
import re
import secrets
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

_OPEN, _CLOSE = "\U000f0000", "\U000f0001"  # private-use characters, which ordinary text does not contain
_TWIN = 0x100000  # the last plane, which is for private use as well
SEARCH_CHARS = 64 << 10
"""A search holds Python's global lock: longer texts are searched in pieces, so that other threads run in between."""


class ControlTokens:
    """The control tokens of one tokenizer, and an alias for each of them.

    The constructor changes the tokenizer: it encodes a control token's own text as plain text, and each alias, an added
    token, as the control token. Aliases are random in every process and never leave it, so clients cannot guess them.

    Args:
        tokenizer: of the model. It takes `role_tokens` for special from now on.
        role_tokens: added tokens that count as control tokens although they are not special.
    """

    def __init__(self, tokenizer: RustTokenizer, role_tokens: Collection[str] = ()) -> None:
        added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        special = {
            token_id: token
            for token_id, token in added.items()
            if token.content and (token.special or token.content in role_tokens)
        }
        self._nonce = nonce = secrets.token_hex(8)
        self._alias_of = {token.content: f"{_OPEN}{nonce}a{token_id}{_CLOSE}" for token_id, token in special.items()}
        self._quoted_as = {token.content: f"{_OPEN}{nonce}q{token_id}{_CLOSE}" for token_id, token in special.items()}
        self._quoted_forms = _written_forms(self._quoted_as)
        self._written_forms = _written_forms(self._alias_of) | self._quoted_forms
        self._longest = max(map(len, self._alias_of), default=0)
        self._pattern = re.compile(_trie_pattern(self._alias_of)) if self._alias_of else None
        # Of a token that is not special, the library would find its own text too.
        tokenizer.add_special_tokens([_special(token) for token in special.values() if not token.special])
        tokenizer.add_tokens([_alias(token, self._alias_of[token.content]) for token in special.values()])
        tokenizer.encode_special_tokens = True
        self._id_of_alias_id = {
            alias_id: token_id
            for token_id, token in special.items()
            if (alias_id := tokenizer.token_to_id(self._alias_of[token.content])) is not None
        }
        self._least_alias_id = min(self._id_of_alias_id, default=0)
        self.unquotable = frozenset(
            token.content for token_id, token in special.items() if _is_leaky(tokenizer, token.content, token_id)
        )
        """Control tokens that the tokenizer's model also produces from their plain characters."""

    def is_alias(self, token_id: int) -> bool:
        """Whether the id is that of an alias, not of a token in the model's files."""
        return bool(self._id_of_alias_id) and token_id >= self._least_alias_id

    def find(self, text: str) -> str | None:
        """The first control token in a text."""
        return next((match[0] for match in self._matches(text)), None)

    def find_unquotable(self, text: str) -> str | None:
        """The first control token in a text that cannot be encoded as text."""
        if not self.unquotable:
            return None
        return next((match[0] for match in self._matches(text) if match[0] in self.unquotable), None)

    def quote(self, text: str) -> str:
        """The text with a placeholder for each control token, which `activate` turns back into plain text."""
        return self._replace(text, self._quoted_as)

    def mark(self, text: str) -> str:
        """The text with an alias for each control token."""
        return self._replace(text, self._alias_of)

    def positions(self, text: str) -> list[tuple[int, str]]:
        """Where the control tokens of a text begin, and which they are. Aliases and quoted ones are none."""
        return [(match.start(), match[0]) for match in self._matches(text)]

    def activate(self, text: str, starts: Container[int] | None = None) -> str:
        """The text with an alias for each control token; quoted ones become plain text again.

        Args:
            text: with aliases, control tokens and quoted ones.
            starts: where those control tokens begin that get an alias; all do without it.
        """
        text = self._replace(text, self._alias_of, starts)
        if f"{self._nonce}q" in text:
            for form, token in self._quoted_forms.items():
                text = text.replace(form, token)
        return text

    def show(self, text: str) -> str:
        """An error's text for clients: with control tokens in place of what stands for them, escaped or not."""
        if self._nonce in text:
            for form, token in self._written_forms.items():
                text = text.replace(form, token)
        return text.replace(self._nonce, "")

    def restore_ids(self, ids: list[int]) -> list[int]:
        """Replace the ids of aliases by those of their control tokens, in place."""
        for index, token_id in enumerate(ids):
            if self.is_alias(token_id):
                ids[index] = self._id_of_alias_id.get(token_id, token_id)
        return ids

    def _replace(self, text: str, names: Mapping[str, str], starts: Container[int] | None = None) -> str:
        pieces, end = [], 0
        for match in self._matches(text):
            if starts is not None and match.start() not in starts:
                continue
            pieces += [text[end : match.start()], names[match[0]]]
            end = match.end()
        return "".join(pieces) + text[end:] if pieces else text

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """All control tokens in a text, leftmost first; of several that begin at one place, the longest."""
        if self._pattern is None:
            return
        at = 0
        while at < len(text):
            piece_end = at + SEARCH_CHARS
            match = self._pattern.search(text, at, piece_end + self._longest)
            if match is None or match.start() >= piece_end:
                at = piece_end
            else:
                yield match
                at = match.end()


def _written_forms(names: Mapping[str, str]) -> dict[str, str]:
    """The tokens by their names, as these are and as a template writes them in JSON or in a list."""
    return {form: token for token, name in names.items() for form in (name, repr(name)[1:-1], json.dumps(name)[1:-1])}


def map_texts(value: Any, change: Callable[[str], str], but: str = "") -> Any:
    """Any JSON value with its texts changed, also the names of fields; what the field `but` has is kept."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {change(key): each if key == but else map_texts(each, change) for key, each in value.items()}
        case list() | tuple():
            return [map_texts(each, change) for each in value]
        case _:
            return value


def neutral(tokens: Collection[str]) -> Callable[[str], str]:
    """A function that gives, in place of a text, one of the same length of which none of the tokens can be made.

    Letters, digits and the tokens' characters become private-use characters, each its own, so that equal texts stay
    equal. Words that are no part of a token stay: templates compare them with known ones, as in `type: function`.
    """
    twins = _Twins(tokens)
    folded = [token.casefold() for token in tokens]

    def change(text: str) -> str:
        if text.isidentifier() and not any(text.casefold() in token for token in folded):
            return text
        pieces = (text[start : start + SEARCH_CHARS] for start in range(0, len(text), SEARCH_CHARS))
        return "".join(map(twins.of, pieces))

    return change


class _Twins(dict[int, int]):
    """For `str.translate`: the private-use characters in place of others."""

    def __init__(self, tokens: Collection[str]) -> None:
        super().__init__()
        self._chars = frozenset("".join(tokens))
        self._latin = "".join(chr(self[code]) for code in range(256))

    def of(self, text: str) -> str:
        """The text with other characters. Most texts are Latin, for which there is a faster way."""
        try:
            return codecs.charmap_decode(text.encode("latin-1"), "strict", self._latin)[0]
        except UnicodeEncodeError:
            return text.translate(self)

    def __missing__(self, code: int) -> int:
        char = chr(code)
        is_kept = char.isspace() or not (char.isalnum() or char in self._chars)
        self[code] = twin = code if is_kept else _TWIN | (code & 0xFFFF)
        return twin


def _alias(token: AddedToken, name: str) -> AddedToken:
    """The alias of a control token: it treats spaces around it in the same way, but is not special itself."""
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=False,
    )


def _special(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def _is_leaky(tokenizer: RustTokenizer, text: str, token_id: int) -> bool:
    # Unigram and word-level models may have a control token among their pieces and find it in plain text.
    samples = tokenizer.encode_batch_fast([text, f"a{text}a", f" {text} "], add_special_tokens=False)
    return any(token_id in sample.ids for sample in samples)


def _trie_pattern(texts: Mapping[str, str]) -> str:
    """A pattern that finds the longest of the texts, in a time that does not depend on their number."""
    trie: dict[str, dict] = {}  # type: ignore[type-arg]
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _node_pattern(trie)


def _node_pattern(node: dict[str, dict]) -> str:  # type: ignore[type-arg]
    prefix = ""
    while len(node) == 1 and "" not in node:
        ((char, node),) = node.items()
        prefix += re.escape(char)
    branches = [re.escape(char) + _node_pattern(child) for char, child in node.items() if char]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
