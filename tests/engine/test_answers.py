"""Given answers have the log-probabilities that generation would give them."""

import numpy as np
import pytest
from tiny import TCA, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.engine.score import score_answers

PROMPTS = [random_prompt(0, 61), random_prompt(1, 40)]
OPTIONS = {"max_new_tokens": 11, "stop_token_ids": (), "logprobs": True}


@pytest.fixture(scope="module")
def full():
    return tiny_lm()


@pytest.fixture(scope="module")
def sparse(full):
    return with_candidates(full, [[0, 6], [TCA.num_candidates, 3]])


@pytest.mark.integration
@pytest.mark.parametrize("name", ["full", "sparse"])
def test_greedy_answers_have_their_log_probabilities(name, request):
    lm = request.getfixturevalue(name)
    out = tca_jax.generate(lm, PROMPTS, **OPTIONS)
    other = [(token + 1) % 97 for token in out.tokens[0]]
    scores = score_answers(lm, PROMPTS, [[out.tokens[0], other], [other[:4], out.tokens[1]]])
    np.testing.assert_allclose(scores.logprobs[0][0], out.logprobs[0], atol=2e-4)
    np.testing.assert_allclose(scores.logprobs[1][1], out.logprobs[1], atol=2e-4)
    assert scores.greedy == [[True, False], [False, True]]
    single = score_answers(lm, PROMPTS, [[out.tokens[0][:1]], [out.tokens[1][:1]]])
    np.testing.assert_allclose([row[0][0] for row in single.logprobs], [row[0] for row in out.logprobs], atol=2e-4)
    assert single.greedy == [[True], [True]]
    assert [[len(of_answer) for of_answer in row] for row in scores.logprobs] == [[11, 11], [4, 11]]


def test_answers_score_as_the_end_of_texts(full):
    answers = [[random_prompt(2, 9)], [random_prompt(3, 20)]]
    scores = score_answers(full, PROMPTS, answers)
    texts = [prompt + answer for prompt, (answer,) in zip(PROMPTS, answers, strict=True)]
    *scored, shortest = tca_jax.score(full, [*texts, [1, 2]]).logprobs
    assert len(shortest) == 1
    for got, text, prompt in zip(scores.logprobs, scored, PROMPTS, strict=True):
        np.testing.assert_allclose(got[0], text[len(prompt) - 1 :], atol=2e-4)


def test_answers_score_behind_a_context(sparse):
    context = tca_jax.prefill(sparse, random_prompt(4, 101))
    questions = [random_prompt(5, 3), random_prompt(6, 12)]
    out = tca_jax.generate(sparse, questions, context=context, **OPTIONS)
    other = [(token + 1) % 97 for token in out.tokens[0]]
    scores = score_answers(sparse, questions, [[out.tokens[0], other], [out.tokens[1], other]], context=context)
    np.testing.assert_allclose(scores.logprobs[0][0], out.logprobs[0], atol=2e-4)
    np.testing.assert_allclose(scores.logprobs[1][0], out.logprobs[1], atol=2e-4)
    assert scores.greedy == [[True, False], [True, False]]
