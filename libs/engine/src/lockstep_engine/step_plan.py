"""Makes the plan of a step from what the scheduler has chosen: the arrays that all ranks get. It chooses nothing."""

from array import array

import numpy as np

from lockstep_engine.block_tables import BlockTables
from lockstep_engine.chunk import Chunk, masks_of, targets_of
from lockstep_engine.draws import uniform
from lockstep_engine.plan import LAST_SAMPLED, Plan, RowSampling
from lockstep_engine.request import PromptScores
from lockstep_engine.sequence import Sequence


def make_plan(
    step: int, chunks: list[Chunk], added: list[Sequence], blocks: BlockTables, eos_ids: frozenset[int]
) -> Plan:
    """The plan of a step. It takes from the tables what the step copies and moves.

    Args:
        step: its number.
        chunks: what it computes; not empty.
        added: sequences whose sampling rows are new to the ranks.
        blocks: the tables of all sequences; those of the chunks have blocks for their tokens.
        eos_ids: end a text.
    """
    sequences = [chunk.sequence for chunk in chunks]
    rows = [sequence.sampling_row for sequence in sequences]
    emitted = [sequence.emitted + sequence.in_flight for sequence in sequences]
    tables = blocks.tables(rows, max(len(sequence.hot) for sequence in sequences))
    hot_tables = blocks.take_hot_tables(rows, tables)
    moves, late_moves = blocks.take_moves()
    spills, loads = blocks.host.take()
    embeds = any(sequence.request.embeds for sequence in sequences)
    token_ids = array("i")
    uniforms = []
    for chunk, position in zip(chunks, emitted, strict=True):
        known = chunk.sequence.tokens[chunk.start : chunk.start + chunk.tokens]
        token_ids.extend(known)
        if len(known) < chunk.tokens:
            token_ids.append(LAST_SAMPLED)
        if chunk.samples:
            sampling = chunk.sequence.request.sampling
            uniforms.append(uniform(sampling.seed, position) if sampling.temperature else 0.0)
    masked, masks = masks_of(chunks)
    # One array for all of them: to make one takes longer than to fill it.
    starts, lengths, sampling_rows, before = np.array(
        [[chunk.start for chunk in chunks], [chunk.tokens for chunk in chunks], rows, emitted], dtype=np.int32
    )
    return Plan(
        step=step,
        token_ids=np.frombuffer(token_ids, dtype=np.int32),
        starts=starts,
        lengths=lengths,
        sampling_rows=sampling_rows,
        samples=np.array([chunk.samples for chunk in chunks], dtype=np.bool_),
        emitted=before,
        uniforms=np.array(uniforms, dtype=np.float64),
        tables=tables,
        moves=moves,
        late_moves=late_moves,
        added=[_row_sampling(sequence, eos_ids) for sequence in added],
        targets=targets_of(chunks),
        vocabulary_logprobs=any(
            chunk.scored and chunk.sequence.request.sampling.prompt_scores is PromptScores.VOCABULARY
            for chunk in chunks
        ),
        hot_tables=hot_tables,
        pools=np.array([sequence.request.embeds for sequence in sequences], dtype=np.bool_) if embeds else None,
        completes=np.array([chunk.completes for chunk in chunks], dtype=np.bool_) if embeds else None,
        masked=masked,
        masks=masks,
        spills=spills,
        loads=loads,
    )


def _row_sampling(sequence: Sequence, eos_ids: frozenset[int]) -> RowSampling:
    sampling = sequence.request.sampling
    penalized = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1.0, 0, 0)
    past = list(sequence.tokens[len(sequence.request.prompt_ids) :])
    forbidden = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)]
    return RowSampling(
        sampling_row=sequence.sampling_row,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        prompt_ids=list(sequence.request.prompt_ids) if penalized else [],
        emitted_ids=past if penalized else [],
        # With a grammar its masks have regard to min_tokens, so that something is always left to choose.
        forbidden_ids=forbidden if sampling.min_tokens and sampling.grammar is None else [],
        min_tokens=sampling.min_tokens,
    )
