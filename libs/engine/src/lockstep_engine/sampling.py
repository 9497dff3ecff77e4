"""From logits to tokens, on rank 0.

A request that runs has a sampling row: a row of the sampler's tables, which the scheduler assigns. In each step some
requests have a logits row, the logits of their last token. The plan brings one uniform number for each. A token depends
on its own logits row, settings and number, never on the other rows.

Nothing here waits for the device: chosen tokens stay on it for the next step, and are copied to the host meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine import rowwise
from lockstep_engine.plan import NO_TOKEN, RowSampling, StepLogprobs


@dataclass
class _Occupant:
    """The request that has a sampling row."""

    sampling: RowSampling
    greedy: bool
    plain: bool
    """It has no penalties, no bias and no forbidden ids."""


@dataclass(frozen=True)
class Sampled:
    """The tokens chosen in a step. They are on the host once the device has finished earlier work."""

    ids: torch.Tensor
    """[logits rows], int64; NO_TOKEN where the logits are no numbers."""
    logprobs: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """By logits row, for requests that want log probabilities: that of the token ([1]), the most likely ids, and those
    of these ids."""
    restricted: frozenset[int] = frozenset()
    """Logits rows whose tokens were restricted."""

    def read(self) -> tuple[list[int], list[StepLogprobs | None]]:
        """The ids, and for requests that want them the log probabilities of the model's own distribution; over the
        tokens that they may choose if these are restricted.
        """
        logprobs: list[StepLogprobs | None] = [None] * len(self.ids)
        for logits_row, (chosen, top_ids, top_logprobs) in self.logprobs.items():
            count = len(top_ids)
            if logits_row in self.restricted:  # it may have fewer tokens than are wanted: the others have -inf
                count = int((top_logprobs > float("-inf")).sum())
            logprobs[logits_row] = StepLogprobs(float(chosen), top_ids[:count].tolist(), top_logprobs[:count].tolist())
        return self.ids.tolist(), logprobs


class Sampler:
    """State of all sampling rows: the settings of their requests, and for penalties the tokens of prompt and output."""

    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._occupants: list[_Occupant | None] = [None] * max_seqs
        self._counts = torch.zeros((max_seqs, vocab_size), dtype=torch.int32, device=device)
        """[sampling rows, vocabulary]: how often each token is in the output."""
        self._in_prompt = torch.zeros((max_seqs, vocab_size), dtype=torch.bool, device=device)
        """[sampling rows, vocabulary]"""
        self._last = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        """[sampling rows]: the token that was last chosen."""

    def last(self, sampling_rows: NDArray[np.int32]) -> torch.Tensor:
        """The tokens [sampling rows], int64 on the device, that were last chosen for these rows."""
        return self._last.index_select(0, _put(sampling_rows.astype(np.int64), self._device))

    def add(self, sampling: RowSampling) -> None:
        """A sampling row gets a new request.

        Raises:
            MemoryError: or torch's errors for this. Tokens of this row then mean nothing until its next request.
        """
        row = sampling.sampling_row
        self._occupants[row] = _Occupant(sampling, greedy=True, plain=True)
        penalised = _penalised(sampling)
        if penalised:
            counts = np.bincount(np.array(sampling.emitted_ids, dtype=np.int64), minlength=self._vocab_size)
            self._counts[row] = torch.from_numpy(counts.astype(np.int32)).to(self._device, non_blocking=True)
            self._in_prompt[row] = False
            self._in_prompt[row].index_fill_(0, _put(sampling.prompt_ids, self._device), True)
        self._occupants[row] = _Occupant(
            sampling,
            greedy=sampling.temperature == 0,
            plain=not (penalised or sampling.logit_bias or sampling.forbidden_ids),
        )

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
        occupants = [self._occupant(int(row)) for row in sampling_rows]
        given = raw = logits.float()
        if masked is not None and masks is not None:
            raw = _restrict(raw, masked, masks)
        adjusted = raw
        for logits_row, occupant in enumerate(occupants):
            if not occupant.plain:
                if adjusted is raw:
                    adjusted = raw.clone()
                self._adjust(adjusted[logits_row], occupant.sampling, int(emitted[logits_row]))
        ids = adjusted.argmax(dim=-1)
        # The largest element tells of a NaN or an infinity anywhere in its row, because both count as larger than all
        # numbers. What masks, bias and min_tokens exclude is -inf only after the model's own logits have been checked.
        largest = given.gather(1, ids.unsqueeze(1)).squeeze(1) if adjusted is given else given.amax(dim=-1)
        usable = largest.isfinite()
        random = [logits_row for logits_row, occupant in enumerate(occupants) if not occupant.greedy]
        if random:
            random_rows = _put(random, self._device)
            samplings = [occupants[logits_row].sampling for logits_row in random]
            drawn = _draw(adjusted.index_select(0, random_rows), samplings, uniforms[random])
            ids.index_copy_(0, random_rows, drawn)
        self._last.index_copy_(0, _put(sampling_rows.astype(np.int64), self._device), ids)
        logprobs = {}
        for logits_row, occupant in enumerate(occupants):
            token = ids[logits_row : logits_row + 1]
            if occupant.sampling.logprobs >= 0:
                logprobs[logits_row] = _logprobs(raw[logits_row], token, occupant.sampling.logprobs)
            if not occupant.plain and _penalised(occupant.sampling):
                self._counts[occupant.sampling.sampling_row].index_add_(
                    0, token, torch.ones_like(token, dtype=torch.int32)
                )
        # On the device an unusable row keeps an id that exists: with overlap the next step has been planned with it.
        return Sampled(
            _fetch(ids.where(usable, NO_TOKEN)), logprobs, frozenset() if masked is None else frozenset(masked.tolist())
        )

    def _occupant(self, sampling_row: int) -> _Occupant:
        occupant = self._occupants[sampling_row]
        assert occupant is not None
        return occupant

    def _adjust(self, logits: torch.Tensor, sampling: RowSampling, emitted: int) -> None:
        """Apply penalties, bias and min_tokens to one logits row [vocabulary], in place."""
        if _penalised(sampling):
            counts = self._counts[sampling.sampling_row]
            seen = (counts > 0) | self._in_prompt[sampling.sampling_row]
            scaled = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
            logits.copy_(torch.where(seen, scaled, logits))
            logits.sub_(counts * sampling.frequency_penalty).sub_((counts > 0) * sampling.presence_penalty)
        if sampling.logit_bias:
            bias = torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype).to(
                logits.device, non_blocking=True
            )
            logits.index_add_(0, _put(list(sampling.logit_bias), logits.device), bias)
        if emitted < sampling.min_tokens:
            logits.index_fill_(0, _put(sampling.forbidden_ids, logits.device), float("-inf"))


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
    return Scores(_fetch(chosen.squeeze(1)), _fetch(ranks), _fetch(distributions) if vocabulary else None)


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
    words = torch.from_numpy(masks.copy()).to(device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    return ((words.unsqueeze(2) >> shifts) & 1).flatten(1)[:, :vocabulary].bool()


def _penalised(sampling: RowSampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def _softmax(x: torch.Tensor) -> torch.Tensor:
    """On the CPU with the same bits on every machine: a draw near a token's limit must not depend on it."""
    return rowwise.softmax(x) if x.device.type == "cpu" else torch.softmax(x, dim=-1)


def _log_softmax(x: torch.Tensor) -> torch.Tensor:
    return rowwise.log_softmax(x) if x.device.type == "cpu" else torch.log_softmax(x, dim=-1, dtype=torch.float32)


def _put(numbers: Sequence[int] | NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Indices, int64 on the device, without waiting: small copies from memory that is not pinned are staged."""
    return torch.as_tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def _fetch(x: torch.Tensor) -> torch.Tensor:
    """`x` on the host; it is valid once the device has finished earlier work."""
    return x.to("cpu", non_blocking=True)


def _draw(logits: torch.Tensor, samplings: list[RowSampling], uniforms: NDArray[np.float64]) -> torch.Tensor:
    """Inverse-CDF sampling, in the order of token ids, over the tokens of each row that top-k, top-p and min-p keep."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).unsqueeze(1).to(device, non_blocking=True)

    most = torch.finfo(torch.float32)
    # A row with NaN or infinity is an error, see `Sampler.sample`; here it only has to give an id that exists.
    logits = torch.nan_to_num(logits, nan=most.min, posinf=most.max, neginf=most.min)
    logits = logits - logits.amax(dim=-1, keepdim=True)
    weights = _softmax(logits / column([max(each.temperature, most.tiny) for each in samplings]))
    filtered = [row for row, each in enumerate(samplings) if each.top_k > 0 or each.top_p < 1 or each.min_p > 0]
    if filtered:
        rows = _put(filtered, device)
        part = weights.index_select(0, rows)
        least = _least_kept(part, [samplings[row] for row in filtered])
        weights.index_copy_(0, rows, part.masked_fill(part < least.unsqueeze(1), 0))
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    targets = torch.from_numpy(np.ascontiguousarray(uniforms)).to(device, non_blocking=True).unsqueeze(1) * total
    # The first id whose cumulative weight is above the target; rounding must not lead past the last id with weight.
    chosen = torch.searchsorted(cumulative, targets, right=True)
    last = torch.searchsorted(cumulative, total, right=False)
    return torch.minimum(chosen, last).squeeze(1)


def _least_kept(weights: torch.Tensor, samplings: list[RowSampling]) -> torch.Tensor:
    """[rows]: the smallest probability that a row's filters keep; tokens of equal probability are kept together."""
    ordered = _descending(weights)
    vocabulary = weights.shape[1]
    least = torch.zeros(len(samplings), dtype=weights.dtype, device=weights.device)
    for row, each in enumerate(samplings):
        values = ordered[row]
        if 0 < each.top_k < vocabulary:
            values = values[: each.top_k]
        last = values[-1:]
        if each.top_p < 1:
            cumulative = values.cumsum(0, dtype=torch.float64)
            kept = (cumulative - values < each.top_p * cumulative[-1]).sum(dim=0, keepdim=True)
            last = values.gather(0, kept.clamp_min(1) - 1)
        least[row : row + 1] = torch.maximum(last, values[:1] * each.min_p)
    return least


def _descending(weights: torch.Tensor) -> torch.Tensor:
    if weights.device.type == "cpu":  # numpy's vector sort takes a tenth of torch's time
        return torch.from_numpy(np.ascontiguousarray(np.sort(weights.numpy(), axis=-1)[:, ::-1]))
    return weights.sort(dim=-1, descending=True).values


def _logprobs(row: torch.Tensor, token: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = _log_softmax(row)
    top = torch.topk(values, min(count, len(values)))
    return _fetch(values.gather(0, token)), _fetch(top.indices), _fetch(top.values)
