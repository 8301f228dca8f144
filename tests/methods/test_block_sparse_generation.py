"""The block-sparse prefill methods from prompt to answer, against attention by their oracles' masks."""

import numpy as np
import pytest
from sparse_prefill import ORACLES, greedy
from tiny import random_prompt, tiny_lm

import tca_jax

BLOCK, DENSE = 16, 32
PATTERNS = [
    [["vertical_slash", 20, 60], ["a_shape", 5, 20], ["block_sparse", 8, 1], ["vertical_slash", 37, 50]],
    [["a_shape", 3, 40]] * 4,
]
OPTIONS = {
    "xattention": {"threshold": 0.6, "stride": 4, "block_size": BLOCK, "dense_tokens": DENSE},
    "flexprefill": {"gamma": 0.5, "min_budget": BLOCK, "block_size": BLOCK},
    "minference": {"patterns": PATTERNS, "blocks": 3, "block_size": BLOCK, "dense_tokens": DENSE},
}
STREAMING = {"sinks": 3, "block_size": 8, "window": 16}


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def masks(name):
    """The oracle's mask of every layer and head of a model under a method."""

    def mask(layer, head, q, k):
        if len(q) <= DENSE:
            return np.tri(len(q), dtype=bool)
        options = {key: value for key, value in OPTIONS[name].items() if key not in ("dense_tokens", "block_size")}
        if name == "minference":
            kind, columns, diagonals = options.pop("patterns")[layer][head]
            options |= {"kind": kind, "columns": columns, "diagonals": diagonals}
        elif name == "flexprefill":
            options |= {"tau": 0.1}
        return ORACLES[name](q, k, block=BLOCK, **options)

    return mask


@pytest.mark.parametrize("name", OPTIONS)
def test_a_ragged_batch_answers_as_its_oracle(lm, name):
    prompts = [random_prompt(length, length) for length in (140, 20, 97)]
    model = lm.with_method(name, **OPTIONS[name])
    out = tca_jax.generate(model, prompts, max_new_tokens=4, stop_token_ids=())
    assert out.tokens == [greedy(lm, prompt, [], 4, masks(name)) for prompt in prompts]
    assert out.stats.kept_share == 1.0
    exact = tca_jax.generate(lm, prompts, max_new_tokens=4, stop_token_ids=())
    assert out.tokens[1] == exact.tokens[1]
    assert out.tokens != exact.tokens


def test_a_pair_decodes_over_the_cache_of_its_second_part(lm):
    prompt = random_prompt(3, 120)
    options = {"minference": OPTIONS["minference"], "streaming": STREAMING}
    model = lm.with_method("minference+streaming", **options)
    out = tca_jax.generate(model, prompt, max_new_tokens=6, stop_token_ids=())

    def visible(i):
        return {*range(max(0, i // 8 * 8 - 16), i + 1), *range(3)}

    assert out.tokens == [greedy(lm, prompt, [], 6, masks("minference"), visible)]
    assert out.stats.kept_share < 0.5


def test_a_context_is_read_once_and_answers_any_question(lm):
    document, question = random_prompt(4, 130), random_prompt(5, 21)
    model = lm.with_method("flexprefill", **OPTIONS["flexprefill"])
    context = tca_jax.prefill(model, document)
    out = tca_jax.generate(model, question, context=context, max_new_tokens=4, stop_token_ids=())
    assert out.tokens == [greedy(lm, document, question, 4, masks("flexprefill"))]


def test_a_text_is_scored_as_its_prompt_is_read(lm):
    ids = random_prompt(6, 100)
    scores = [
        tca_jax.score(each, ids).logprobs[0] for each in (lm, lm.with_method("xattention", **OPTIONS["xattention"]))
    ]
    np.testing.assert_allclose(scores[0][:BLOCK], scores[1][:BLOCK], atol=1e-4)  # one block sees all that it can
    assert np.abs(scores[0] - scores[1]).max() > 1e-2
