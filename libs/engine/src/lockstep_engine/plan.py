"""A step's plan and its result: their contents, and their layout in shared memory.

Only this module knows the layout. The scheduler makes a `Plan`, `encode_plan` packs it, and a rank unpacks the same
`Plan`; results go the other way. Both are msgpack arrays in which a numpy array is an extension type: its elements as
they lie in memory, without a conversion of single numbers.
"""

import struct

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.control import RankSpec
from lockstep_engine.sizes import hot_pool_blocks

LAST_SAMPLED = -1
"""Placeholder for a token's id: the token that was last sampled for its sequence's sampling row."""

NO_TOKEN = -1
"""Instead of a sampled token's id: its logits hold NaN or infinity, or exclude every token."""


class RowSampling(msgspec.Struct, array_like=True):
    """How tokens are sampled for the request that gets a sampling row, with the past tokens that penalties need."""

    sampling_row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[int, float]
    logprobs: int
    """How many of the most likely tokens to report; -1: report no log probabilities."""
    prompt_ids: list[int]
    """Empty unless a penalty is set."""
    emitted_ids: list[int]
    """Empty unless a penalty is set."""
    forbidden_ids: list[int]
    """Cannot be chosen while the output is shorter than `min_tokens`."""
    min_tokens: int


class Plan(msgspec.Struct, array_like=True):
    """One step: which tokens of which sequences are computed, where their KV goes, and which sequences sample."""

    step: int
    token_ids: NDArray[np.int32]
    """[tokens], those of all sequences one after the other; at most the last one of each is LAST_SAMPLED."""
    starts: NDArray[np.int32]
    """[sequences]: position of the first token."""
    lengths: NDArray[np.int32]
    """[sequences]: tokens computed in this step."""
    sampling_rows: NDArray[np.int32]
    """[sequences]: the sampling row of each."""
    samples: NDArray[np.bool_]
    """[sequences]: whether the logits of the last token choose the next one."""
    emitted: NDArray[np.int32]
    """[sequences]: output tokens so far, those in flight included."""
    uniforms: NDArray[np.float64]
    """[sequences that sample]: the number in [0, 1) for each draw."""
    tables: NDArray[np.int32]
    """[sequences, width]: ids of blocks as the last query of each sequence sees them (see `kv_cache`); -1: unused."""
    moves: NDArray[np.int32]
    """[n, 2]: hot blocks, and the cold blocks that each layer makes of them before it attends."""
    late_moves: NDArray[np.int32]
    """[n, 2]: hot blocks, and the cold blocks that are made of them after the step."""
    added: list[RowSampling] = []
    """Settings for the sampling rows that get a new request."""
    targets: NDArray[np.int32] | None = None
    """[tokens]: the id that follows each token if its log probability is wanted, else -1. None: none is wanted."""
    vocabulary_logprobs: bool = False
    """Whether the log probabilities of the full vocabulary are wanted, too, at the targets."""
    hot_tables: NDArray[np.int32] | None = None
    """[sequences, width]: ids of hot blocks. None: no query of the step sees a block hot that another sees cold."""
    masked: NDArray[np.int32] | None = None
    """Which of the sequences that sample have a grammar, as indices among them. None: none has."""
    masks: NDArray[np.int32] | None = None
    """[masked, words]: the tokens that each of them may choose. Bit b of word w stands for token 32 * w + b."""

    pools: NDArray[np.bool_] | None = None
    """[sequences]: whether its hidden states become an embedding. None: none does."""
    completes: NDArray[np.bool_] | None = None
    """[sequences]: whether the step computes the last token of such a sequence. Set together with `pools`."""

    spills: NDArray[np.int32] | None = None
    """[n, 1 + slots of a hot block]: ids of blocks, and the slots of host memory to which each is copied before
    anything else in the step; -1: unused. None: no block is."""
    loads: NDArray[np.int32] | None = None
    """As `spills`: blocks that are copied back from their slots after the spills and before the step is computed."""

    @property
    def has_prefill(self) -> bool:
        """Whether any sequence computes more than one token."""
        return len(self.token_ids) > len(self.lengths)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the sequences that compute more than one."""
        return int(self.lengths[self.lengths > 1].sum()) if self.has_prefill else 0


def nothing(step: int, spills: NDArray[np.int32] | None, loads: NDArray[np.int32] | None) -> Plan:
    """The plan of a step that only copies blocks to host memory and from it."""
    none, moves = np.empty(0, np.int32), np.empty((0, 2), np.int32)
    return Plan(
        step=step,
        token_ids=none,
        starts=none,
        lengths=none,
        sampling_rows=none,
        samples=np.empty(0, np.bool_),
        emitted=none,
        uniforms=np.empty(0, np.float64),
        tables=np.empty((0, 1), np.int32),
        moves=moves,
        late_moves=moves,
        spills=spills,
        loads=loads,
    )


class StepLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities for one sampled token."""

    chosen: float
    top_ids: list[int]
    top_logprobs: list[float]


class Result(msgspec.Struct, array_like=True):
    """Rank 0's answer: one entry for each sequence that samples, in the plan's order."""

    step: int
    token_ids: list[int]
    """NO_TOKEN: the logits were no numbers."""
    logprobs: list[StepLogprobs | None]
    waited_us: int
    """Time before the step in which rank 0 had nothing to compute."""
    collective_us: int
    unserved: list[int] = []
    """Sampling rows for whose new requests there is no memory; tokens sampled for them mean nothing."""
    target_logprobs: NDArray[np.float32] | None = None
    """Log probabilities, one for each target of the plan that is not -1. None: the plan has no targets."""
    target_ranks: NDArray[np.int32] | None = None
    """Ranks of these targets; 1: the most likely token."""
    vocabulary_logprobs: NDArray[np.float32] | None = None
    """[targets, vocabulary]: log probabilities, if the plan wants them."""
    embeddings: NDArray[np.float32] | None = None
    """[sequences that the plan completes, hidden]. None: the plan pools nothing."""


_DTYPES = tuple(np.dtype(kind) for kind in (np.bool_, np.int32, np.float32, np.float64))
_CODES = {(kind, dims): 2 * number + dims - 1 for number, kind in enumerate(_DTYPES) for dims in (1, 2)}
_WIDTH = struct.Struct("<I")


def _pack_array(value: object) -> msgspec.msgpack.Ext:
    """The elements, followed by the length of a row if there are two dimensions."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} cannot be sent")
    width = _WIDTH.pack(value.shape[1]) if value.ndim == 2 else b""
    return msgspec.msgpack.Ext(_CODES[value.dtype, value.ndim], value.tobytes() + width)


def _unpack_array(code: int, data: memoryview) -> NDArray[np.generic]:
    content = bytes(data)  # the message is not aligned; this is
    dtype = _DTYPES[code // 2]
    if code % 2 == 0:
        return np.frombuffer(content, dtype=dtype)
    (width,) = _WIDTH.unpack_from(content, len(content) - _WIDTH.size)
    rows = (len(content) - _WIDTH.size) // (dtype.itemsize * width)
    return np.ndarray((rows, width), dtype, content)


encode_plan = msgspec.msgpack.Encoder(enc_hook=_pack_array).encode
decode_plan = msgspec.msgpack.Decoder(Plan, ext_hook=_unpack_array).decode
encode_result = msgspec.msgpack.Encoder(enc_hook=_pack_array).encode
decode_result = msgspec.msgpack.Decoder(Result, ext_hook=_unpack_array).decode


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask over a vocabulary."""
    return -(-vocab_size // 32)


def message_sizes(spec: RankSpec) -> tuple[int, int]:
    """Most bytes of an encoded plan, and of an encoded result."""
    config, context_length = spec.config, spec.model.context_length
    tables = 4 * config.max_seqs * -(-context_length // BLOCK_SIZE)
    hot_window, windowed = spec.hot_window, spec.model.windowed
    if hot_window is not None:  # also hot tables, and a move for each block in them and in the step
        tables = 2 * tables + 8 * config.max_seqs * (hot_window.size + 2) + config.step_tokens
    if config.host_cache_bytes:  # each block of the largest pools may be both spilled and loaded
        hot = 0 if hot_window is None else hot_pool_blocks(config, hot_window)
        # Slots of a block: four times the bytes of a cold one, in as many layers, or in more.
        slots = 4 if windowed is None else -(-4 * windowed.total // (windowed.total - len(windowed.numbers)))
        tables += 2 * (1 + slots) * 4 * (hot + config.max_seqs * -(-context_length // BLOCK_SIZE))
    # A request that gets a sampling row brings the tokens that penalties need (at most 9 bytes for each id of prompt
    # and output) and its bias.
    added = config.max_seqs * (18 * context_length + 32 * 1024)
    masks = config.max_seqs * (4 + 4 * mask_words(spec.model.vocab_size))
    plan = masks + 4096 + 8 * config.step_tokens + 64 * config.max_seqs + tables + added
    # A step scores at most as many prompt tokens as it can sample; for evaluation with the full vocabulary. Pages that
    # are never written use no memory.
    embedding = 0 if spec.model.embedding is None else 4 * spec.model.embedding.size
    return plan, 4096 + config.max_seqs * (1024 + 4 * (2 + spec.model.vocab_size) + embedding)
