"""Text to token ids and back, for one model. Built from the files that a worker hands out; knows no model code."""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from lockstep_api.v1 import worker_pb2
from tokenizers import Tokenizer as RustTokenizer

from lockstep_router.chat_template import ChatTemplate

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, files: worker_pb2.TokenizerFiles) -> None:
        """Read the files.

        Raises:
            ValueError: they cannot be understood.
        """
        try:
            self._rust: RustTokenizer = RustTokenizer.from_str(files.tokenizer_json.decode())
            config = json.loads(files.tokenizer_config_json or b"{}")
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer {files.digest}: {error}") from error
        self._rust.no_truncation()
        self._rust.no_padding()
        self.digest: str = files.digest
        self._byte_level = _has_byte_level(json.loads(files.tokenizer_json).get("decoder"))
        added = self._rust.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.chat_template = ChatTemplate(files.chat_template, _special_tokens(config)) if files.chat_template else None
        self.token_bytes = functools.lru_cache(maxsize=1 << 16)(self._token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids, with those that the model's files put around every text if wanted."""
        ids: list[int] = self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids without special tokens."""
        text: str = self._rust.decode(ids, skip_special_tokens=True)
        return text

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a special token's name; nothing for an id outside the vocabulary."""
        token = self._rust.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return str(token).encode()
        if self._byte_level:
            return b"".join(_byte_of_char().get(char, char.encode()) for char in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


@functools.cache
def _byte_of_char() -> dict[str, bytes]:
    """The inverse of GPT-2's table of printable stand-ins for bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    chars = {chr(byte): bytes([byte]) for byte in printable}
    return chars | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


def _has_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return decoder.get("type") == "ByteLevel" or any(map(_has_byte_level, decoder.get("decoders", ())))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Names such as bos_token with their text, which tokenizer_config.json gives plainly or as an object."""
    tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
