"""Appending: equal to decoding the same tokens, whatever the edges."""

import numpy as np
import pytest
from tiny import TCA, random_prompt, tiny_lm

import tca_jax
from tca_jax import methods
from tca_jax.engine.extend import num_columns, pass_tokens
from tca_jax.methods.full import FullCache

GEOMETRY = {"window": 16, "block_size": 8}
METHODS = {
    "tca": methods.get("tca", candidates=[[4, TCA.num_candidates]] * 2, config=TCA),
    "streaming": methods.get("streaming", sinks=12, **GEOMETRY),
    "random": methods.get("random", share=0.4, **GEOMETRY),
}
#: Tokens of a prompt, and of what is appended to it.
ROWS = [
    *((5, 1), (13, 2)),  # the window is not full
    (5, 17),  # it fills up on the way
    *((40, 1), (48, 24)),  # from block edges: prefill has dealt with the first block that leaves
    *((39, 2), (47, 17)),  # one token before an edge
    *((33, 24), (7, 23)),  # whole blocks from within a block
]
LATER = 20  # tokens after these, which push out blocks that they filled
OPTIONS = {"stop_token_ids": (), "logprobs": 1}


@pytest.mark.parametrize(
    "name", ["tca", *(pytest.param(name, marks=pytest.mark.integration) for name in ("streaming", "random"))]
)
def test_appended_tokens_equal_decoded_ones(name):
    lm, prompts = tiny_lm().with_method(METHODS[name]), [random_prompt(seed, n) for seed, (n, _) in enumerate(ROWS)]
    out = tca_jax.generate(lm, prompts, max_new_tokens=24 + LATER, **OPTIONS)
    rows = [(n, tokens, logprobs) for (_, n), tokens, logprobs in zip(ROWS, out.tokens, out.logprobs, strict=True)]
    context = tca_jax.prefill(lm, [tokens[:n] for n, tokens, _ in rows], context=tca_jax.prefill(lm, prompts))
    assert context.stats.tokens == [sum(row) for row in ROWS]
    following = [tokens[n : n + 1] for n, tokens, _ in rows]
    later = tca_jax.generate(lm, following, context=context, max_new_tokens=LATER - 1, **OPTIONS)
    assert later.tokens == [tokens[n + 1 : n + LATER] for n, tokens, _ in rows]
    expected = [logprobs[n + 1 : n + LATER] for n, _, logprobs in rows]
    np.testing.assert_allclose(later.logprobs, expected, atol=2e-4)


def test_columns_are_blocks_and_passes_are_of_few_sizes():
    assert [num_columns(n, 128) for n in (*range(1, 129), 127 + 128)] == [128] * 128 + [256]
    assert all(n <= num_columns(n, 128) <= 1.25 * n + 128 for n in range(1, 40_000, 97))
    assert [pass_tokens(FullCache(), n) for n in (1, 256, 257, 1_024, 1_025)] == [128, 128, 512, 512, 2048]
