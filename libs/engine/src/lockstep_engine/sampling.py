"""From logits to tokens, on rank 0. One uniform number a row comes with the plan; a row's token depends on its own
logits, its own settings and its own number, never on the other rows.

Nothing here waits for the device: what is chosen stays there for the next step, and is on its way to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.plan import SlotSampling, StepLogprobs


@dataclass
class _Slot:
    sampling: SlotSampling
    greedy: bool
    plain: bool
    """Neither penalties nor bias nor forbidden ids."""


@dataclass(frozen=True)
class Sampled:
    """What was chosen for the rows of a step, on the host once the device has done all that it was asked for before."""

    ids: torch.Tensor
    """[rows], int64."""
    logprobs: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """For rows that ask for them: the log probability of the token ([1]), the most likely ids and theirs."""

    def read(self) -> tuple[list[int], list[StepLogprobs | None]]:
        """The ids, and for rows that ask for them the log probabilities of the model's own distribution."""
        logprobs: list[StepLogprobs | None] = [None] * len(self.ids)
        for row, (chosen, top_ids, top_logprobs) in self.logprobs.items():
            logprobs[row] = StepLogprobs(float(chosen), top_ids.tolist(), top_logprobs.tolist())
        return self.ids.tolist(), logprobs


class Sampler:
    """Sampling state of all slots: their settings, and which tokens they have seen as far as penalties ask for it."""

    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: list[_Slot | None] = [None] * max_seqs
        self._counts = torch.zeros((max_seqs, vocab_size), dtype=torch.int32, device=device)
        """How often each token is in the output."""
        self._in_prompt = torch.zeros((max_seqs, vocab_size), dtype=torch.bool, device=device)
        self._last = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        """The token that was last chosen for each slot."""

    def last(self, slots: NDArray[np.int32]) -> torch.Tensor:
        """The tokens [slots], int64 on the device, that were last chosen for some slots."""
        return self._last.index_select(0, _put(slots.astype(np.int64), self._device))

    def add(self, sampling: SlotSampling) -> None:
        """A slot has a new occupant. If there is no memory for its settings, its next tokens mean nothing.

        Raises:
            MemoryError: likewise torch's errors of this kind.
        """
        self._slots[sampling.slot] = _Slot(sampling, greedy=True, plain=True)
        penalised = _penalised(sampling)
        if penalised:
            counts = np.bincount(np.array(sampling.emitted_ids, dtype=np.int64), minlength=self._vocab_size)
            self._counts[sampling.slot] = torch.from_numpy(counts.astype(np.int32)).to(self._device, non_blocking=True)
            self._in_prompt[sampling.slot] = False
            self._in_prompt[sampling.slot].index_fill_(0, _put(sampling.prompt_ids, self._device), True)
        self._slots[sampling.slot] = _Slot(
            sampling,
            greedy=sampling.temperature == 0,
            plain=not (penalised or sampling.logit_bias or sampling.forbidden_ids),
        )

    def sample(
        self, logits: torch.Tensor, slots: NDArray[np.int32], emitted: NDArray[np.int32], uniforms: NDArray[np.float64]
    ) -> Sampled:
        """Choose a token for each row.

        Args:
            logits: [rows, vocabulary], any float type.
            slots: [rows]
            emitted: [rows], output tokens before this one.
            uniforms: [rows], in [0, 1).
        """
        states = [self._state(int(slot)) for slot in slots]
        raw = logits.float()
        adjusted = raw
        for row, state in enumerate(states):
            if not state.plain:
                if adjusted is raw:
                    adjusted = raw.clone()
                self._adjust(adjusted[row], state.sampling, int(emitted[row]))
        ids = adjusted.argmax(dim=-1)
        random = [row for row, state in enumerate(states) if not state.greedy]
        if random:
            rows = _put(random, self._device)
            drawn = _draw(adjusted.index_select(0, rows), [states[row].sampling for row in random], uniforms[random])
            ids.index_copy_(0, rows, drawn)
        self._last.index_copy_(0, _put(slots.astype(np.int64), self._device), ids)
        logprobs = {}
        for row, state in enumerate(states):
            token = ids[row : row + 1]
            if state.sampling.logprobs >= 0:
                logprobs[row] = _logprobs(raw[row], token, state.sampling.logprobs)
            if not state.plain and _penalised(state.sampling):
                self._counts[state.sampling.slot].index_add_(0, token, torch.ones_like(token, dtype=torch.int32))
        return Sampled(_fetch(ids), logprobs)

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot]
        assert state is not None
        return state

    def _adjust(self, row: torch.Tensor, sampling: SlotSampling, emitted: int) -> None:
        """Apply penalties, bias and min_tokens to one row of logits, in place."""
        if _penalised(sampling):
            counts = self._counts[sampling.slot]
            seen = (counts > 0) | self._in_prompt[sampling.slot]
            scaled = torch.where(row > 0, row / sampling.repetition_penalty, row * sampling.repetition_penalty)
            row.copy_(torch.where(seen, scaled, row))
            row.sub_(counts * sampling.frequency_penalty).sub_((counts > 0) * sampling.presence_penalty)
        if sampling.logit_bias:
            bias = torch.tensor(list(sampling.logit_bias.values()), dtype=row.dtype).to(row.device, non_blocking=True)
            row.index_add_(0, _put(list(sampling.logit_bias), row.device), bias)
        if emitted < sampling.min_tokens:
            row.index_fill_(0, _put(sampling.forbidden_ids, row.device), float("-inf"))


@dataclass(frozen=True)
class Scores:
    """What `score` has found, on the host once the device has done all that it was asked for before."""

    targets: torch.Tensor
    """[rows], float32: log probabilities."""
    ranks: torch.Tensor
    """[rows], int32; 1: the most likely."""
    distributions: torch.Tensor | None
    """[rows, vocabulary], float32: log probabilities."""

    def read(self) -> tuple[bytes, bytes, bytes]:
        """All three, as bytes."""
        whole = b"" if self.distributions is None else self.distributions.numpy().tobytes()
        return self.targets.numpy().tobytes(), self.ranks.numpy().tobytes(), whole


def score(logits: torch.Tensor, targets: NDArray[np.int32], *, whole: bool) -> Scores:
    """What the model's own distributions say of tokens that are given.

    Args:
        logits: [rows, vocabulary], any float type.
        targets: [rows], a token each.
        whole: give the distributions, too.
    """
    distributions = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    wanted = _put(targets.astype(np.int64), logits.device)
    chosen = distributions.gather(1, wanted.unsqueeze(1))
    ranks = (distributions > chosen).sum(dim=1, dtype=torch.int32) + 1
    return Scores(_fetch(chosen.squeeze(1)), _fetch(ranks), _fetch(distributions) if whole else None)


def _penalised(sampling: SlotSampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def _put(numbers: Sequence[int] | NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Indices, int64, without waiting: small copies from memory that is not pinned are staged before they return."""
    return torch.as_tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def _fetch(x: torch.Tensor) -> torch.Tensor:
    """`x` on the host, once the device has come so far."""
    return x.to("cpu", non_blocking=True)


def _draw(logits: torch.Tensor, samplings: list[SlotSampling], uniforms: NDArray[np.float64]) -> torch.Tensor:
    """Inverse-CDF sampling, in the order of token ids, over what top-k, top-p and min-p leave of each row."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).unsqueeze(1).to(device, non_blocking=True)

    most = torch.finfo(torch.float32)
    logits = torch.nan_to_num(logits, nan=most.min, posinf=most.max, neginf=most.min)
    logits = logits - logits.amax(dim=-1, keepdim=True)
    weights = torch.softmax(logits / column([max(each.temperature, most.tiny) for each in samplings]), dim=-1)
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


def _least_kept(weights: torch.Tensor, samplings: list[SlotSampling]) -> torch.Tensor:
    """[rows]: the smallest probability that survives a row's filters; equal ones survive together."""
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
    values = torch.log_softmax(row, dim=-1)
    top = torch.topk(values, min(count, len(values)))
    return _fetch(values.gather(0, token)), _fetch(top.indices), _fetch(top.values)
