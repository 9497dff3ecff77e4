"""From logits to tokens, on rank 0.

A request that runs has a sampling row: a row of the sampler's tables, which the scheduler assigns. In each step some
requests have a logits row, the logits of their last token. The plan brings one uniform number for each. A token depends
on its own logits row, settings and number, never on the other rows.

Nothing here waits for the device: chosen tokens stay on it for the next step, and are copied to the host meanwhile.
"""

import importlib
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine import rowwise
from lockstep_engine.drawing import draw
from lockstep_engine.kernels import cpu
from lockstep_engine.plan import NO_TOKEN, RowSampling, StepLogprobs
from lockstep_engine.sampling_table import Listed, Penalties, SamplingTable, StepSettings, penalised
from lockstep_engine.transfers import to_device, to_host


@dataclass(frozen=True)
class ListedTokens:
    """The most likely tokens of some rows."""

    rows: Listed
    chosen: torch.Tensor
    """[n], float32: the log probability of the token that was chosen."""
    ids: torch.Tensor
    """[n, depth], int64."""
    logprobs: torch.Tensor
    """[n, depth], float32."""


@dataclass(frozen=True)
class Sampled:
    """The tokens chosen in a step. They are on the host once the device has finished earlier work."""

    ids: torch.Tensor | NDArray[np.int64]
    """[logits rows], int64; NO_TOKEN where the logits are no numbers."""
    listed: list[ListedTokens]
    """For requests that want log probabilities."""
    restricted: frozenset[int] = frozenset()
    """Logits rows whose tokens were restricted."""

    def read(self) -> tuple[list[int], list[StepLogprobs | None]]:
        """The ids, and for requests that want them the log probabilities of the model's own distribution; over the
        tokens that they may choose if these are restricted.
        """
        token_ids = self.ids.tolist()
        logprobs: list[StepLogprobs | None] = [None] * len(token_ids)
        for part in self.listed:
            chosen, ids, values = part.chosen.tolist(), part.ids.tolist(), part.logprobs.tolist()
            for place, (row, count) in enumerate(
                zip(part.rows.numbers.tolist(), part.rows.counts.tolist(), strict=True)
            ):
                top_ids, top = ids[place][:count], values[place][:count]
                if row in self.restricted:  # it may have fewer tokens than are wanted: the others have -inf
                    top = [value for value in top if value > -math.inf]
                logprobs[row] = StepLogprobs(chosen[place], top_ids[: len(top)], top)
        return token_ids, logprobs


class Sampler:
    """State of all sampling rows: the settings of their requests, and for penalties the tokens of prompt and output.
    `kernels`: Triton's choose the tokens.
    """

    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device, *, kernels: bool = False) -> None:
        self._kernels = importlib.import_module("lockstep_engine.kernels.triton_sampling") if kernels else None
        self._vocab_size = vocab_size
        self._device = device
        self._table = SamplingTable(max_seqs, vocab_size, device, kernels=kernels)
        self._counts = torch.zeros((max_seqs, vocab_size), dtype=torch.int32, device=device)
        """[sampling rows, vocabulary]: how often each token is in the output."""
        self._in_prompt = torch.zeros((max_seqs, vocab_size), dtype=torch.bool, device=device)
        """[sampling rows, vocabulary]"""
        self._last = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        """[sampling rows]: the token that was last chosen."""
        self._last_here = self._last.numpy() if device.type == "cpu" else np.empty(0, np.int64)
        """The same memory. Numpy takes less time than torch for the few numbers of a step."""

    def launch_all(self, dtype: torch.dtype, ranks: int) -> None:
        """Launch every form of the kernels once, so that none has to be built while serving.

        Args:
            dtype: of the model's logits.
            ranks: they hold parts of the logits that are equally wide, so that rows may be longer than the vocabulary.
                Copies of some rows are not, and a copy of one may be.
        """
        if self._kernels is not None:
            padded = -(-self._vocab_size // ranks) * ranks
            for width, drawn in itertools.product({padded, self._vocab_size}, {dtype, torch.float32}):
                self._kernels.launch_all(self._vocab_size, width, dtype, drawn, self._device)

    def last(self, sampling_rows: torch.Tensor) -> torch.Tensor:
        """The tokens [rows], int64 on the device, that were last chosen for these sampling rows, int64."""
        return self._last.index_select(0, sampling_rows)

    def last_here(self, sampling_rows: NDArray[np.int32]) -> NDArray[np.int64]:
        """The same on the CPU, [rows]."""
        return self._last_here[sampling_rows]

    def add(self, sampling: RowSampling) -> None:
        """A sampling row gets a new request.

        Raises:
            MemoryError: or torch's errors for this. Tokens of this row then mean nothing until its next request.
        """
        row = sampling.sampling_row
        self._table.clear(row)
        if penalised(sampling):
            emitted = _put(np.array(sampling.emitted_ids, dtype=np.int64), self._device)
            self._counts[row] = 0  # counted there: a row of counts is too much to send for a request
            self._counts[row].index_add_(0, emitted, torch.ones_like(emitted, dtype=torch.int32))
            self._in_prompt[row] = False
            prompt_ids = np.array(sampling.prompt_ids, dtype=np.int64)
            self._in_prompt[row].index_fill_(0, _put(prompt_ids, self._device), True)
        self._table.set(sampling)

    def sample(
        self,
        logits: torch.Tensor,
        sampling_rows: NDArray[np.int32],
        emitted: NDArray[np.int32],
        uniforms: NDArray[np.float64],
        masked: NDArray[np.int32] | None = None,
        masks: NDArray[np.int32] | None = None,
    ) -> Sampled:
        """Choose a token for each logits row.

        Args:
            logits: [logits rows, vocabulary], any float type.
            sampling_rows: [logits rows], the sampling row of each.
            emitted: [logits rows], output tokens before this one.
            uniforms: [logits rows], in [0, 1).
            masked: logits rows whose tokens are restricted.
            masks: [masked, words], the tokens that each of them may choose (see `Plan.masks`).
        """
        settings = self._table.of(sampling_rows, emitted)
        # The kernels read any float type.
        given = raw = logits if self._kernels is not None else logits.float()
        by_cpu = self._kernels is None and cpu.available(given) and given.is_contiguous()
        if settings.only_greedy and masked is None and by_cpu:
            largest, reported = cpu.largest(given)
            self._last_here[sampling_rows] = largest
            return Sampled(reported, [])
        if masked is not None and masks is not None:
            raw = _restrict(raw, masked, masks)
        adjusted = raw
        if not settings.plain:
            adjusted = raw.float()
            if adjusted is given or (adjusted is raw and settings.listed):
                adjusted = adjusted.clone()
            self._adjust(adjusted, settings)
        choices = settings.choices
        if self._kernels is not None and choices is not None:
            numbers = to_device(uniforms, self._device) if choices.kinds.draws else None
            ids, usable = self._kernels.choose(adjusted, logits, choices, numbers, self._last)
        else:
            ids, usable = self._choose_by_torch(adjusted, given, settings, uniforms)
        for each in settings.penalties:
            places = each.sampling_rows * self._vocab_size + ids.index_select(0, each.rows)
            self._counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        listed = [_list_tokens(raw, ids, each) for each in settings.listed]
        return Sampled(to_host(usable), listed, frozenset() if masked is None else frozenset(masked.tolist()))

    def _choose_by_torch(
        self, adjusted: torch.Tensor, given: torch.Tensor, settings: StepSettings, uniforms: NDArray[np.float64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[logits rows], int64: the tokens, and NO_TOKEN in their place where the model's logits are no numbers.

        The largest element shows a NaN or an infinity anywhere in its row, because both count as larger than all
        numbers. It is taken from the model's own logits: masks, bias and min_tokens exclude tokens by -inf. On the
        device an unusable row keeps an id that exists: with overlap the next step has been planned with it.
        """
        takes_largest = adjusted is given and settings.greedy is None
        largest = None if takes_largest else given.amax(dim=-1)
        ids = self._choose(adjusted, settings, uniforms)
        if largest is None:
            largest = given.gather(1, ids.unsqueeze(1)).squeeze(1)
        self._last.index_copy_(0, settings.sampling_rows, ids)
        return ids, ids.where(largest.isfinite(), NO_TOKEN)

    def _choose(self, logits: torch.Tensor, settings: StepSettings, uniforms: NDArray[np.float64]) -> torch.Tensor:
        """[logits rows], int64: the tokens."""
        if settings.greedy is None:
            return logits.argmax(dim=-1)
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if len(settings.greedy):
            ids.index_copy_(0, settings.greedy, logits.index_select(0, settings.greedy).argmax(dim=-1))
        for each in settings.draws:
            drawn = draw(logits.index_select(0, each.rows), each, uniforms[each.numbers])
            ids.index_copy_(0, each.rows, drawn)
        return ids

    def _adjust(self, logits: torch.Tensor, settings: StepSettings) -> None:
        """Apply penalties, bias and min_tokens to logits [logits rows, vocabulary], in place."""
        for each in settings.penalties:
            logits.index_copy_(0, each.rows, self._penalise(logits.index_select(0, each.rows), each))
        flat = logits.view(-1)
        if settings.biased is not None and settings.bias is not None:
            flat.index_add_(0, settings.biased, settings.bias)
        if settings.forbidden is not None:
            flat.index_fill_(0, settings.forbidden, -math.inf)

    def _penalise(self, logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
        counts = self._counts.index_select(0, penalties.sampling_rows)
        emitted = counts > 0
        seen = emitted | self._in_prompt.index_select(0, penalties.sampling_rows)
        scaled = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
        logits = torch.where(seen, scaled, logits)
        return logits.sub_(counts * penalties.frequency).sub_(emitted * penalties.presence)


@dataclass(frozen=True)
class Scores:
    """Results of `score`. They are on the host once the device has finished earlier work."""

    targets: torch.Tensor
    """[rows], float32: log probabilities of the targets."""
    ranks: torch.Tensor
    """[rows], int32: ranks of the targets; 1: the most likely token."""
    distributions: torch.Tensor | None
    """[rows, vocabulary], float32: log probabilities of all tokens."""

    def read(self) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32] | None]:
        """Targets, ranks and distributions in the types of a `Result`."""
        vocabulary = None if self.distributions is None else self.distributions.numpy()
        return self.targets.numpy(), self.ranks.numpy(), vocabulary


def score(logits: torch.Tensor, targets: NDArray[np.int32], *, vocabulary: bool) -> Scores:
    """Log probabilities and ranks of given tokens in the model's own distributions.

    Args:
        logits: [rows, vocabulary], any float type.
        targets: [rows], a token for each row.
        vocabulary: return the distributions, too.
    """
    distributions = _log_softmax(logits)
    wanted = _put(targets.astype(np.int64), logits.device)
    chosen = distributions.gather(1, wanted.unsqueeze(1))
    ranks = (distributions > chosen).sum(dim=1, dtype=torch.int32) + 1
    return Scores(to_host(chosen.squeeze(1)), to_host(ranks), to_host(distributions) if vocabulary else None)


def _restrict(logits: torch.Tensor, masked: NDArray[np.int32], masks: NDArray[np.int32]) -> torch.Tensor:
    """A copy of the logits [rows, vocabulary] with -inf for the tokens that the masks of `masked` rows exclude."""
    rows = _put(masked.astype(np.int64), logits.device)
    allowed = _unpack(masks, logits.shape[1], logits.device)
    return logits.index_copy(0, rows, logits.index_select(0, rows).masked_fill(~allowed, float("-inf")))


def _unpack(masks: NDArray[np.int32], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Masks [rows, words] as booleans [rows, vocabulary] on the device."""
    if device.type == "cpu":
        bits = np.unpackbits(
            masks.astype("<i4", copy=False).view(np.uint8), axis=1, count=vocabulary, bitorder="little"
        )
        return torch.from_numpy(bits.view(np.bool_))
    return _unpack_on_device(masks, vocabulary, device)


def _unpack_on_device(masks: NDArray[np.int32], vocabulary: int, device: torch.device) -> torch.Tensor:
    """The same for a GPU: only the packed masks are copied to it."""
    words = to_device(masks.copy(), device)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((words.unsqueeze(2) >> shifts) & 1).flatten(1)[:, :vocabulary].bool()


def _log_softmax(x: torch.Tensor) -> torch.Tensor:
    return rowwise.log_softmax(x) if x.device.type == "cpu" else torch.log_softmax(x, dim=-1, dtype=torch.float32)


def _put(numbers: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Indices, int64 on the device."""
    return to_device(numbers, device)


def _list_tokens(logits: torch.Tensor, ids: torch.Tensor, listed: Listed) -> ListedTokens:
    values = _log_softmax(logits.index_select(0, listed.rows))
    chosen = values.gather(1, ids.index_select(0, listed.rows).unsqueeze(1)).squeeze(1)
    top = torch.topk(values, listed.depth)
    return ListedTokens(listed, to_host(chosen), to_host(top.indices), to_host(top.values))
