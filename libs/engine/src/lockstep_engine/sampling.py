"""From logits to tokens, on rank 0. One uniform number a row comes with the plan; a row's token depends on its own
logits, its own settings and its own number, never on the other rows.
"""

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


class Sampler:
    """Sampling state of all slots: their settings, and which tokens they have seen as far as penalties ask for it."""

    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: list[_Slot | None] = [None] * max_seqs
        self._counts = torch.zeros((max_seqs, vocab_size), dtype=torch.int32, device=device)
        """How often each token is in the output."""
        self._in_prompt = torch.zeros((max_seqs, vocab_size), dtype=torch.bool, device=device)

    def add(self, sampling: SlotSampling) -> None:
        """A slot has a new occupant. If there is no memory for its settings, its next tokens mean nothing.

        Raises:
            MemoryError: likewise torch's errors of this kind.
        """
        self._slots[sampling.slot] = _Slot(sampling, greedy=True, plain=True)
        penalised = _penalised(sampling)
        if penalised:
            counts = np.bincount(np.array(sampling.emitted_ids, dtype=np.int64), minlength=self._vocab_size)
            self._counts[sampling.slot] = torch.from_numpy(counts.astype(np.int32)).to(self._device)
            self._in_prompt[sampling.slot] = False
            self._in_prompt[sampling.slot, torch.tensor(sampling.prompt_ids, device=self._device)] = True
        self._slots[sampling.slot] = _Slot(
            sampling,
            greedy=sampling.temperature == 0,
            plain=not (penalised or sampling.logit_bias or sampling.forbidden_ids),
        )

    def sample(
        self, logits: torch.Tensor, slots: NDArray[np.int32], emitted: NDArray[np.int32], uniforms: NDArray[np.float64]
    ) -> tuple[list[int], list[StepLogprobs | None]]:
        """Choose a token for each row.

        Args:
            logits: [rows, vocabulary], any float type.
            slots: [rows]
            emitted: [rows], output tokens so far.
            uniforms: [rows], in [0, 1).

        Returns:
            The ids, and for rows that ask for them the log probabilities of the model's own distribution.
        """
        states = [self._state(int(slot)) for slot in slots]
        raw = logits.float()
        adjusted = raw
        for row, state in enumerate(states):
            if not state.plain:
                if adjusted is raw:
                    adjusted = raw.clone()
                self._adjust(adjusted[row], state.sampling, int(emitted[row]))
        ids: list[int] = adjusted.argmax(dim=-1).tolist()
        random = [row for row, state in enumerate(states) if not state.greedy]
        if random:
            drawn = _draw(adjusted[random], [states[row].sampling for row in random], uniforms[random])
            for row, token in zip(random, drawn, strict=True):
                ids[row] = token
        logprobs: list[StepLogprobs | None] = [None] * len(ids)
        for row, state in enumerate(states):
            if state.sampling.logprobs >= 0:
                logprobs[row] = _logprobs(raw[row], ids[row], state.sampling.logprobs)
            if not state.plain and _penalised(state.sampling):
                self._counts[state.sampling.slot, ids[row]] += 1
        return ids, logprobs

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
            tokens = torch.tensor(list(sampling.logit_bias), device=row.device)
            row[tokens] += torch.tensor(list(sampling.logit_bias.values()), device=row.device)
        if emitted < sampling.min_tokens:
            row[torch.tensor(sampling.forbidden_ids, device=row.device, dtype=torch.long)] = float("-inf")


def score(logits: torch.Tensor, targets: NDArray[np.int32], *, whole: bool) -> tuple[bytes, bytes, bytes]:
    """What the model's own distributions say of tokens that are given.

    Args:
        logits: [rows, vocabulary], any float type.
        targets: [rows], a token each.
        whole: give the distributions, too.

    Returns:
        The targets' log probabilities (float32 [rows]) and ranks (int32 [rows], 1: the most likely); the log
        probabilities of the vocabulary (float32 [rows, vocabulary]) if `whole`, else nothing.
    """
    distributions = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    wanted = torch.from_numpy(targets.astype(np.int64)).to(logits.device)
    chosen = distributions.gather(1, wanted.unsqueeze(1))
    ranks = (distributions > chosen).sum(dim=1, dtype=torch.int32) + 1
    return (
        chosen.cpu().numpy().tobytes(),
        ranks.cpu().numpy().tobytes(),
        distributions.cpu().numpy().tobytes() if whole else b"",
    )


def _penalised(sampling: SlotSampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def _draw(logits: torch.Tensor, samplings: list[SlotSampling], uniforms: NDArray[np.float64]) -> list[int]:
    """Inverse-CDF sampling, in the order of token ids, over what top-k, top-p and min-p leave of each row."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    most = torch.finfo(torch.float32)
    logits = torch.nan_to_num(logits, nan=most.min, posinf=most.max, neginf=most.min)
    logits = logits - logits.amax(dim=-1, keepdim=True)
    weights = torch.softmax(logits / column([max(each.temperature, most.tiny) for each in samplings]), dim=-1)
    filtered = [row for row, each in enumerate(samplings) if each.top_k > 0 or each.top_p < 1 or each.min_p > 0]
    if filtered:
        least = _least_kept(weights[filtered], [samplings[row] for row in filtered])
        weights[filtered] = weights[filtered].masked_fill(weights[filtered] < least.unsqueeze(1), 0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    targets = torch.from_numpy(np.ascontiguousarray(uniforms)).to(device).unsqueeze(1) * total
    # The first id whose cumulative weight is above the target; rounding must not lead past the last id with weight.
    chosen = torch.searchsorted(cumulative, targets, right=True)
    last = torch.searchsorted(cumulative, total, right=False)
    ids: list[int] = torch.minimum(chosen, last).squeeze(1).tolist()
    return ids


def _least_kept(weights: torch.Tensor, samplings: list[SlotSampling]) -> torch.Tensor:
    """[rows]: the smallest probability that survives a row's filters; equal ones survive together."""
    ordered = _descending(weights)
    vocabulary = weights.shape[1]
    least = torch.zeros(len(samplings), dtype=weights.dtype, device=weights.device)
    for row, each in enumerate(samplings):
        values = ordered[row]
        if 0 < each.top_k < vocabulary:
            values = values[: each.top_k]
        if each.top_p < 1:
            cumulative = values.cumsum(0, dtype=torch.float64)
            kept = int((cumulative - values < each.top_p * cumulative[-1]).sum())
            values = values[: max(1, kept)]
        least[row] = torch.maximum(values[-1], values[0] * each.min_p)
    return least


def _descending(weights: torch.Tensor) -> torch.Tensor:
    if weights.device.type == "cpu":  # numpy's vector sort takes a tenth of torch's time
        return torch.from_numpy(np.ascontiguousarray(np.sort(weights.numpy(), axis=-1)[:, ::-1]))
    return weights.sort(dim=-1, descending=True).values


def _logprobs(row: torch.Tensor, token: int, count: int) -> StepLogprobs:
    values = torch.log_softmax(row, dim=-1)
    top = torch.topk(values, min(count, len(values))) if count else None
    return StepLogprobs(
        chosen=float(values[token]),
        top_ids=[] if top is None else top.indices.tolist(),
        top_logprobs=[] if top is None else top.values.tolist(),
    )
