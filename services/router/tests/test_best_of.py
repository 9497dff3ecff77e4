"""`best_of`: of several answers the client gets those whose tokens were the most likely ones on average."""

import pytest
from router_cluster import events_of
from scripted_worker import Script, token_at


def logprob(token_id):
    """A log probability that differs from token to token."""
    return -1 - (token_id * 37 % 101) / 50


def never(_):
    return float("-inf")


@pytest.fixture
async def scored(cluster):
    for worker in cluster.workers:
        worker.script = Script(logprob=logprob)
    return cluster


def logprobs_of(submit):
    """Those of the tokens that a scripted worker gives."""
    prompt_ids, sampling = list(submit.prompt_ids), submit.sampling
    return [logprob(token_at(prompt_ids, sampling.seed, position)) for position in range(sampling.max_tokens)]


def mean(submit):
    return sum(logprobs_of(submit)) / submit.sampling.max_tokens


def submits_by_choice(cluster):
    submits = [submit for worker in cluster.workers for submit in worker.submits]
    return sorted(submits, key=lambda submit: [int(part) for part in submit.stream_id.split("-")[1:]])


async def test_the_most_likely_answers_are_kept(scored):
    every = (await scored.complete(n=5)).json()["choices"]
    for worker in scored.workers:
        worker.submits.clear()
    best = (await scored.complete(n=2, best_of=5)).json()
    means = [mean(submit) for submit in submits_by_choice(scored)]
    order = sorted(range(5), key=lambda index: -means[index])
    assert order[:2] != [0, 1], "the test would not see an answer that ignores best_of"
    assert [choice["text"] for choice in best["choices"]] == [every[index]["text"] for index in order[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert {choice["logprobs"] for choice in best["choices"]} == {None}


async def test_usage_counts_all_answers(scored):
    body = (await scored.complete(best_of=4, max_tokens=6)).json()
    assert len(body["choices"]) == 1
    assert body["usage"]["completion_tokens"] == 24


async def test_each_prompt_has_its_own_best(scored):
    alone = [(await scored.complete(prompt, best_of=4, echo=True)).json()["choices"] for prompt in ("a", "bb")]
    together = (await scored.complete(["a", "bb"], best_of=4, echo=True)).json()["choices"]
    assert [choice["text"] for choice in together] == [choices[0]["text"] for choices in alone]
    assert [choice["index"] for choice in together] == [0, 1]


async def test_logprobs_are_those_of_the_answer(scored):
    plain = (await scored.complete(best_of=4)).json()["choices"][0]
    (choice,) = (await scored.complete(best_of=4, logprobs=1)).json()["choices"]
    assert choice["text"] == plain["text"]
    best = max(submits_by_choice(scored), key=mean)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs_of(best))


async def test_a_short_answer_is_compared_by_its_mean(cluster):
    # The answers end at different stop strings: sums of log probabilities would prefer the shortest.
    every = (await cluster.complete(n=4, max_tokens=8)).json()["choices"]
    stop = every[2]["text"][:4]
    for worker in cluster.workers:
        worker.script = Script(logprob=lambda _: -1.0)
    kept = (await cluster.complete(best_of=4, max_tokens=8, stop=stop)).json()["choices"]
    assert kept[0]["text"] == every[0]["text"], "of equal means the first is kept"


async def test_tokens_without_probability_do_not_break_the_order(cluster):
    for worker in cluster.workers:
        worker.script = Script(logprob=never)
    assert (await cluster.complete(best_of=3)).status_code == 200


async def test_nothing_is_scored_unless_it_is_needed(scored):
    await scored.complete(n=2, best_of=2)
    assert not any(submit.sampling.HasField("logprobs") for submit in submits_by_choice(scored))
    events = events_of(await scored.complete(n=2, best_of=2, stream=True))
    assert events[-1] == (None, "[DONE]")


@pytest.mark.parametrize("headers", [{"Idempotency-Key": "k"}, {"X-Lockstep-Resumable": "true"}])
async def test_answers_that_can_be_read_again_are_not_chosen(scored, headers):
    error = (await scored.complete(best_of=4, headers=headers)).json()["error"]
    assert error["param"] == "best_of"
    assert (await scored.complete(n=2, best_of=2, headers=headers)).status_code == 200


async def test_answers_of_workers_that_die_count_the_same(scored):
    undisturbed = (await scored.complete(best_of=4)).json()["choices"]
    own, _ = scored.worker_of("user:u")
    own.script = Script(logprob=logprob, die_after=5)
    response = await scored.complete(best_of=4)
    assert response.json()["choices"] == undisturbed
