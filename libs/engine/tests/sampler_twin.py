"""The law of sampling, row by row in plain torch and numpy: what the sampler must compute on the CPU, bit for bit."""

import numpy as np
import torch
from lockstep_engine import rowwise
from lockstep_engine.plan import StepLogprobs


class RowByRow:
    """The sampler's twin. Rows are computed one after the other, so that none can depend on another."""

    def __init__(self, samplings, vocabulary):
        self._samplings = {each.sampling_row: each for each in samplings}
        self._emitted = {each.sampling_row: list(each.emitted_ids) for each in samplings}
        self._vocabulary = vocabulary

    def sample(self, logits, sampling_rows, emitted, uniforms):
        ids, logprobs = [], []
        for row, number in enumerate(sampling_rows.tolist()):
            sampling, raw = self._samplings[number], logits[row].float()
            adjusted = self._adjust(raw.clone(), sampling, int(emitted[row]))
            if sampling.temperature == 0:
                id_ = int(adjusted.argmax())
            else:
                id_ = draw(adjusted, sampling, float(uniforms[row]))
            ids.append(id_)
            logprobs.append(None if sampling.logprobs < 0 else listed(raw, id_, sampling.logprobs))
            self._emitted[number].append(id_)
        return ids, logprobs

    def _adjust(self, logits, sampling, emitted):
        counts = torch.bincount(
            torch.tensor(self._emitted[sampling.sampling_row], dtype=torch.int64), minlength=self._vocabulary
        ).int()
        seen = counts > 0
        seen[sampling.prompt_ids] = True
        scaled = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        logits = torch.where(seen, scaled, logits)
        logits = logits - counts * sampling.frequency_penalty - (counts > 0) * sampling.presence_penalty
        for id_, bias in sampling.logit_bias.items():
            logits[id_] += bias
        if emitted < sampling.min_tokens:
            logits[sampling.forbidden_ids] = -torch.inf
        return logits


def draw(logits, sampling, uniform):
    """Inverse-CDF sampling of one row [vocabulary], in the order of token ids."""
    temperature = torch.tensor(max(sampling.temperature, torch.finfo(torch.float32).tiny), dtype=torch.float32)
    weights = rowwise.softmax(((logits - logits.max()) / temperature)[None])[0]
    values = torch.from_numpy(np.sort(weights.numpy())[::-1].copy())
    if sampling.top_k > 0:
        values = values[: sampling.top_k]
    least = values[-1]
    if sampling.top_p < 1:
        sums = values.cumsum(0, dtype=torch.float64)
        kept = int((sums - values < sampling.top_p * sums[-1]).sum())
        least = values[max(kept, 1) - 1]
    least = torch.maximum(least, values[0] * sampling.min_p)
    sums = weights.masked_fill(weights < least, 0).cumsum(0, dtype=torch.float64)
    chosen = torch.searchsorted(sums, uniform * sums[-1:], right=True)
    return int(torch.minimum(chosen, torch.searchsorted(sums, sums[-1:])))


def listed(logits, id_, count):
    """Log probabilities of one row [vocabulary]."""
    values = rowwise.log_softmax(logits[None])[0]
    top = torch.topk(values, min(count, len(values)))
    return StepLogprobs(float(values[id_]), top.indices.tolist(), top.values.tolist())
