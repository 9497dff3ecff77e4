"""The simulated model: a tokenizer whose text shows each token, and tokens that depend on prompt, seed and position.

So a token that is lost, doubled, moved or changed on its way is seen in the client's text.
"""

import functools
import json
from dataclasses import dataclass
from hashlib import blake2b

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_router.text.tokenizer import Tokenizer
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from xxhash import xxh64_intdigest

MODEL = "simulated"
VOCAB_SIZE = 1024
EOS_ID = 0
POISON_ID = 1
"""A prompt that begins with it makes the ranks of its worker die."""
FIRST_ID = 4
CONTEXT_LENGTH = 512
NUMERICS = "numerics-1"


def text_of(token_id: int) -> str:
    """The text of one token. It ends no other text than that of a whole token."""
    return f"{token_id:03x};"


def ids_of(text: str) -> list[int]:
    """The tokens of a text.

    Raises:
        ValueError: it is no text of whole tokens.
    """
    if text and not text.endswith(";"):
        raise ValueError(f"{text[-8:]!r} ends within a token")
    return [int(part, 16) for part in text.split(";")[:-1]]


@functools.cache
def tokenizer_files() -> worker_pb2.TokenizerFiles:
    made = RustTokenizer(models.WordLevel({text_of(each): each for each in range(VOCAB_SIZE)}, unk_token=text_of(2)))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[^;]*;"), "isolated")
    made.decoder = decoders.ByteLevel()
    return worker_pb2.TokenizerFiles(
        digest="tokenizer-1", tokenizer_json=made.to_str().encode(), tokenizer_config_json=json.dumps({}).encode()
    )


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_files())


def card(digest: str = "model-1") -> worker_pb2.ModelCard:
    return worker_pb2.ModelCard(
        name=MODEL,
        digest=digest,
        architecture="LlamaForCausalLM",
        dtype="float32",
        context_length=CONTEXT_LENGTH,
        vocab_size=VOCAB_SIZE,
        tp=2,
        tokenizer_digest=tokenizer_files().digest,
        deterministic=True,
        fingerprint=NUMERICS,
        created=1_700_000_000,
    )


class Tokens:
    """The tokens of one stream, as every worker computes them."""

    def __init__(self, prompt_ids: tuple[int, ...], sampling: inference_pb2.Sampling) -> None:
        self._key = blake2b(repr((prompt_ids, sampling.seed)).encode(), digest_size=16).digest()
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._max_tokens = sampling.max_tokens

    def at(self, position: int) -> int:
        digest = xxh64_intdigest(self._key + position.to_bytes(4, "little"))
        return FIRST_ID + digest % (VOCAB_SIZE - FIRST_ID)

    def finish_after(self, token_id: int, position: int) -> int:
        """The finish reason with the token at a position; 0: the stream goes on."""
        if token_id in self._stop_ids:
            return int(inference_pb2.FINISH_REASON_STOP)
        if position + 1 >= self._max_tokens:
            return int(inference_pb2.FINISH_REASON_LENGTH)
        return 0


@dataclass(frozen=True)
class Expected:
    """What a client must get if nothing fails."""

    ids: tuple[int, ...]
    """Those with a text: a token that stops an answer has none."""
    finish: str
    counted: int
    """All tokens of the answer, without stop strings."""


def expected(prompt_ids: tuple[int, ...], sampling: inference_pb2.Sampling, stops: tuple[str, ...]) -> Expected:
    """The undisturbed answer. A stop string is the text of one whole token."""
    tokens, ids = Tokens(prompt_ids, sampling), []
    for position in range(sampling.max_tokens):
        token_id = tokens.at(position)
        if text_of(token_id) in stops:
            return Expected(tuple(ids), "stop", len(ids))
        if token_id in sampling.stop_token_ids:
            return Expected(tuple(ids), "stop", len(ids) + 1)
        ids.append(token_id)
    return Expected(tuple(ids), "length", len(ids))
