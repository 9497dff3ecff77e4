"""Turns text into token ids and back, for one model. Built from a worker's tokenizer files; runs no code of a model."""

import functools
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import LockstepError, invalid
from tokenizers import Tokenizer as RustTokenizer

from lockstep_router.text.chat_template import ChatTemplate
from lockstep_router.text.control_tokens import ControlTokens, map_texts, neutral
from lockstep_router.text.infill import find_infill
from lockstep_router.text.pieces import Pieces

logger = logging.getLogger("lockstep.router")

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no character, or not yet."""

SHORT_CHARS = 1024
"""Texts up to here are encoded without releasing Python's global lock, which takes 0.1 to 0.5 ms."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARK = "\N{WHITE SMILING FACE}"
"""A character that no merge joins with the text after it. Code Llama's own code uses it in the same way."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ControlTokenError(Exception):
    """A text has a control token that its tokenizer cannot encode as text."""

    def __init__(self, token: str) -> None:
        super().__init__(f"has the control token {token}, which this model's tokenizer cannot encode as text")


class Tokenizer:
    """A model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, files: worker_pb2.TokenizerFiles) -> None:
        """Read the files.

        Raises:
            ValueError: the files cannot be parsed.
        """
        try:
            self._rust: RustTokenizer = RustTokenizer.from_str(files.tokenizer_json.decode())
            config = json.loads(files.tokenizer_config_json or b"{}")
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer {files.digest}: {error}") from error
        self._rust.no_truncation()
        self._rust.no_padding()
        self.digest: str = files.digest
        decoder = json.loads(files.tokenizer_json).get("decoder")
        self._byte_level = _has_byte_level(decoder)
        self.is_concatenation = decoder is not None and decoder.get("type") == "ByteLevel"
        """Whether the text of ids is the text of all their bytes."""
        added = self._rust.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.chat_template: ChatTemplate | None = None
        self.template_problem = ""
        """Why the model's chat template cannot be used; empty if it can, or if there is none."""
        if files.chat_template:
            self._add_template(files.chat_template, config)
        self.infill = find_infill(self._rust.token_to_id)
        """How the model fills in the middle of a text; None: it does not."""
        role_tokens: frozenset[str] = frozenset()
        if self.chat_template is not None:
            role_tokens = self.chat_template.role_tokens([each.content for each in added.values() if not each.special])
        self._control_tokens = ControlTokens(self._rust, role_tokens)
        if self.chat_template is not None:
            self.chat_template.mark(self._control_tokens.mark)
        self._skips_special = not role_tokens
        """Whether the library skips special tokens: it takes role tokens for special, and those have a text."""
        self._adds_special_tokens = self._rust.num_special_tokens_to_add(False) > 0
        """Whether its files put special tokens around a text. To ask for them takes time even if there are none."""
        self.token_bytes = functools.lru_cache(maxsize=1 << 16)(self._token_bytes)
        self.token_text = functools.lru_cache(maxsize=1 << 16)(self._token_text)
        self.pieces = Pieces(self._token_text)
        """The texts of tokens as JSON."""

    def _add_template(self, source: str, config: dict[str, Any]) -> None:
        try:
            self.chat_template = ChatTemplate(source, _special_tokens(config))
        except ValueError as error:
            self.template_problem = str(error)
            logger.warning("tokenizer %s: %s; its models take no conversations", self.digest, error)

    def encode(self, text: str, *, add_special_tokens: bool = True, control_tokens: bool = False) -> list[int]:
        """A text's token ids. Python's global lock is released during the encoding of a long text.

        Args:
            text: a text of any length.
            add_special_tokens: add the special tokens that the model's files put around every text.
            control_tokens: encode control tokens written in the text as such, not as text.

        Raises:
            ControlTokenError: the text has a control token that this tokenizer cannot encode as text.
        """
        if control_tokens:
            return self.encode_rendered(self._control_tokens.activate(text), add_special_tokens=add_special_tokens)
        self._check_quotable(text)
        return self._encode(text, add_special_tokens=add_special_tokens)

    def encode_infill(self, prefix: str, suffix: str, *, control_tokens: bool = False) -> list[int]:
        """The token ids of a prompt for the text between two others; for models with `infill`.

        Args:
            prefix: the text before the gap.
            suffix: the text after the gap.
            control_tokens: as for `encode`.

        Raises:
            ControlTokenError: one of the texts has a control token that this tokenizer cannot encode as text.
        """
        assert self.infill is not None
        before = self.encode(prefix, add_special_tokens=False, control_tokens=control_tokens)
        # Many tokenizers put a space before a text. The suffix continues a text: it follows a mark that is cut off.
        mark = self._encode(_MARK, add_special_tokens=False)
        after = self.encode(_MARK + suffix, add_special_tokens=False, control_tokens=control_tokens)
        if after[: len(mark)] != mark:  # the mark and the suffix have a token in common
            mark, after = [], self.encode(suffix, add_special_tokens=False, control_tokens=control_tokens)
        return self.infill.arrange(self._encode("", add_special_tokens=True), before, after[len(mark) :])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        fields: Mapping[str, Any] | None = None,
        control_tokens: bool = False,
    ) -> str:
        """A conversation as text, for `encode_rendered` only: it has aliases in place of control tokens.

        Args:
            messages: the conversation.
            tools: the functions that the model may call.
            fields: further values for the template.
            control_tokens: encode control tokens written in all these texts as such, not as text.

        Raises:
            LockstepError: INVALID_REQUEST, the template does not accept these messages, or it puts control tokens
                together, and it depends on users' texts which ones.
            ControlTokenError: a message has a control token that this tokenizer cannot encode as text.
        """
        if control_tokens:
            return self._control_tokens.activate(self._render(messages, tools, fields))
        messages, tools, fields = _map_inputs(self._quote, messages, tools, fields)
        text = self._render(messages, tools, fields, marked=True)
        found = self._control_tokens.positions(text)  # the template has put them together, of whatever texts
        if not found:
            return self._control_tokens.activate(text, ())
        known = _map_inputs(neutral({token for _, token in found}), messages, tools, fields)
        other = self._render(*known, marked=True)
        own = self._control_tokens.positions(other)
        if not own or (len(other) == len(text) and set(own) <= set(found)):
            return self._control_tokens.activate(text, {start for start, _ in own})
        if [token for _, token in own] == [token for _, token in found]:
            return self._control_tokens.activate(text)
        shown = ", ".join(sorted({token for _, token in found}))
        raise invalid("messages", f"make the chat template put together one of the control tokens {shown}")

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        fields: Mapping[str, Any] | None,
        *,
        marked: bool = False,
    ) -> str:
        assert self.chat_template is not None
        try:
            return self.chat_template.render(messages, tools, fields, marked=marked)
        except LockstepError as error:
            shown = self._control_tokens.show(error.message)
            raise LockstepError(error.code, shown, field=error.field) from error

    def encode_rendered(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a text that `render` returned."""
        return self._control_tokens.restore_ids(self._encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids that have one according to `token_bytes`; special tokens are left out."""
        text: str = self._rust.decode(self._with_text(ids), skip_special_tokens=self._skips_special)
        return text

    def decode_long(self, ids: Sequence[int]) -> str:
        """The text of any ids, without special tokens. Python's global lock is released during the decoding."""
        if any(map(self._control_tokens.is_alias, ids)):
            ids = [token_id for token_id in ids if not self._control_tokens.is_alias(token_id)]
        text: str = self._rust.decode_batch([self._with_text(ids)], skip_special_tokens=self._skips_special)[0]
        return text

    def _with_text(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids that the library does not skip by itself, and that have a text."""
        return ids if self._skips_special else [token_id for token_id in ids if token_id not in self.special_ids]

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= SHORT_CHARS:
            # Handing a batch to the library's own threads takes longer than encoding a short text.
            encoding = self._rust.encode(text, add_special_tokens=add_special_tokens and self._adds_special_tokens)
        else:
            (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _quote(self, text: str) -> str:
        self._check_quotable(text)
        return self._control_tokens.quote(text)

    def added_id_of(self, text: str) -> int | None:
        """The id of the token that always stands for this text; None: it has none, and is written like any other."""
        token_id: int | None = self._rust.token_to_id(text)
        return token_id if token_id in self._added_ids else None

    def special_ids_of(self, texts: Collection[str]) -> frozenset[int]:
        """The ids of the special tokens with these texts."""
        ids = map(self._rust.token_to_id, texts)
        return frozenset(token_id for token_id in ids if token_id in self.special_ids)

    def _check_quotable(self, text: str) -> None:
        if (token := self._control_tokens.find_unquotable(text)) is not None:
            raise ControlTokenError(token)

    def _token_bytes(self, token_id: int) -> bytes:
        """A token's bytes; a special token's name; empty for an id outside the vocabulary."""
        token = self._rust.id_to_token(token_id)
        if token is None or self._control_tokens.is_alias(token_id):
            return b""
        if token_id in self._added_ids:
            return str(token).encode()
        if self._byte_level:
            try:
                return bytes(map(_byte_of_char().__getitem__, token))
            except KeyError:  # the library takes such a token as it is
                return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()

    def _token_text(self, token_id: int) -> str | None:
        """What a token adds to any text that ends on a whole character; None if that depends on the text, or if more
        tokens are needed to know.
        """
        if not self.is_concatenation or token_id in self._added_ids:
            return None
        try:
            text = self._token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None
        return text if text and not text.endswith(REPLACEMENT) else None


def _map_inputs(
    change: Callable[[str], str],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    fields: Mapping[str, Any] | None,
) -> tuple[list[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, Mapping[str, Any] | None]:
    """What a template is given, with all texts changed but the roles, which are few and known."""
    return (
        [map_texts(message, change, but="role") for message in messages],
        map_texts(tools, change),
        map_texts(fields, change),
    )


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The inverse of GPT-2's table of printable stand-ins for bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _has_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return decoder.get("type") == "ByteLevel" or any(map(_has_byte_level, decoder.get("decoders", ())))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The text of bos_token and others; tokenizer_config.json has it as a string or as an object."""
    tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
