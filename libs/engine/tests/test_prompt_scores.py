"""Log probabilities of prompt tokens: each token once, in any division into steps, and equal to `transformers`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make
from lockstep_engine import Engine, PromptScores, SamplingParams
from lockstep_engine.sampling import score
from scripted_ranks import Server, prompt_score, words


def given(server, number):
    """All scores that a request got; their positions follow each other."""
    scores = []
    for output in server.outputs[number]:
        if output.prompt_logprobs is not None:
            assert output.prompt_logprobs.position == 1 + len(scores)
            scores.extend(output.prompt_logprobs.tokens.tolist())
            assert (output.prompt_logprobs.ranks == -output.prompt_logprobs.tokens).all()
    return scores


def expected(prompt):
    return [prompt_score(prompt[: end + 1]) for end in range(1, len(prompt))]


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 100])
def test_each_token_but_the_first_is_scored_once(length):
    server = Server(max_seqs=5)
    prompt = words(length, 1)
    number = server.submit(prompt, prompt_scores=PromptScores.TOKENS)
    server.run()
    assert given(server, number) == expected(prompt)
    assert server.ids(number) == server.expected(number)
    assert all(output.prompt_logprobs is None for output in server.outputs[number][-7:])
    server.assert_idle()


def test_requests_in_one_step_get_their_own_scores():
    """No more tokens are scored in a step than can run at once (the scripted ranks check it); others run on."""
    server = Server(blocks=200, max_seqs=6)
    prompts = [words(30 + 7 * n, n) for n in range(8)]
    kinds = [PromptScores.TOKENS, PromptScores.NONE, PromptScores.VOCABULARY]
    numbers = [server.submit(prompt, prompt_scores=kinds[n % 3]) for n, prompt in enumerate(prompts)]
    server.run()
    for n, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        assert given(server, number) == ([] if n % 3 == 1 else expected(prompt))
        assert server.ids(number) == server.expected(number)
        wholes = [o.prompt_logprobs.vocabulary for o in server.outputs[number] if o.prompt_logprobs is not None]
        assert all((whole is None) == (n % 3 == 0) for whole in wholes)
        if n % 3 == 2:
            assert np.concatenate(wholes)[:, 0].tolist() == expected(prompt)
    server.assert_idle()


def test_a_preempted_prompt_is_computed_again_and_scored_once():
    server = Server(blocks=12, max_seqs=4, max_batch_tokens=16)
    slow = server.submit(words(100, 1), prompt_scores=PromptScores.TOKENS, max_tokens=40)
    for _ in range(5):
        server.step()
    others = [server.submit(words(20, 2 + n), priority=1, max_tokens=60) for n in range(3)]
    server.run()
    assert server.restarts() > 0
    assert given(server, slow) == expected(words(100, 1))
    assert all(server.ids(number) == server.expected(number) for number in (slow, *others))


def test_a_cancelled_request_takes_no_scores_from_the_next():
    server = Server(max_seqs=8)
    first = server.submit(words(5, 1), prompt_scores=PromptScores.TOKENS)
    second = server.submit(words(4, 2), prompt_scores=PromptScores.TOKENS)
    plan = server.scheduler.schedule()
    result = server.ranks.execute(plan)
    server.cancel(first)
    server.finish(result)
    server.run()
    assert given(server, first) == []
    assert given(server, second) == expected(words(4, 2))


def test_a_cached_prefix_is_computed_again():
    server = Server(max_seqs=16)
    prompt = words(64, 3)
    server.submit(prompt)
    server.run()
    number = server.submit(prompt, prompt_scores=PromptScores.TOKENS)
    server.run()
    assert given(server, number) == expected(prompt)


def test_scores_are_log_softmax_in_float32():
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)).bfloat16() * 20
    targets = np.arange(7, dtype=np.int32) * 7
    tokens, ranks, vocabulary = score(logits, targets, vocabulary=True).read()
    wanted = torch.log_softmax(logits.double(), dim=-1).numpy()
    assert np.allclose(vocabulary, wanted, atol=1e-5)
    assert (tokens == vocabulary[np.arange(7), targets]).all()
    order = (-logits.float()).argsort(dim=-1, stable=True).tolist()
    assert ranks.tolist() == [row.index(target) + 1 for row, target in zip(order, targets, strict=True)]
    again = score(logits, targets, vocabulary=False).read()
    assert (again[0] == tokens).all()
    assert (again[1] == ranks).all()
    assert again[2] is None


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_scores_equal_transformers(tmp_path: Path, tp):
    path, reference = make("llama-grouped-untied", tmp_path)
    (path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
    ids = torch.randint(2, 331, (150,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        wanted = torch.log_softmax(reference(ids[None]).logits[0, :-1], dim=-1).numpy()
    with Engine(path, tp=tp, threads=1, max_seqs=40, max_batch_tokens=40, kv_compression="none") as engine:
        scores = engine.score(ids.tolist(), vocabulary=True)
        again = engine.score(ids.tolist())
        one = engine.outputs([ids.tolist()], SamplingParams(max_tokens=1, temperature=0, logprobs=0))
    assert scores.vocabulary is not None
    assert np.abs(scores.vocabulary - wanted).max() < 1e-4
    assert np.abs(scores.tokens - wanted[np.arange(149), ids[1:].numpy()]).max() < 1e-4
    assert (scores.ranks == 1 + (scores.vocabulary > scores.tokens[:, None]).sum(axis=1)).all()
    assert again.vocabulary is None
    assert (again.tokens == scores.tokens).all()
    assert one[0][0].prompt_logprobs is None
