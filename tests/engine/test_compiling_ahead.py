"""Programs that are compiled ahead are those that `prefill` and `generate` run."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tiny import TCA, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.engine.contexts import compile_prefill
from tca_jax.engine.generation import compile_generate

DOCUMENT, QUESTION = random_prompt(0, 60), random_prompt(1, 7)


@pytest.fixture(scope="module")
def lm():
    return with_candidates(tiny_lm(), [[0, 6], [TCA.num_candidates, 3]])


@pytest.mark.integration
def test_what_is_compiled_ahead_in_threads_is_not_compiled_again(lm):
    def late():
        context = compile_prefill(lm, DOCUMENT)
        return compile_generate(lm, QUESTION, context=context, max_new_tokens=20) > 0

    def whole():
        return compile_generate(lm, [DOCUMENT, QUESTION], max_new_tokens=20) > 0

    with ThreadPoolExecutor() as pool:
        assert all(pool.map(lambda compile_: compile_(), (late, whole)))
    context = tca_jax.prefill(lm, random_prompt(2, 52))
    after = tca_jax.generate(lm, random_prompt(3, 6), context=context, max_new_tokens=18)
    together = tca_jax.generate(lm, [random_prompt(4, 61), QUESTION], max_new_tokens=19)
    assert [context.stats.compile_seconds, after.stats.compile_seconds, together.stats.compile_seconds] == [0, 0, 0]
    assert np.shape(after.tokens) == (1, 18)


def test_what_generate_refuses_is_refused_before_anything_is_compiled(lm):
    with pytest.raises(ValueError, match=r"prompts\[0\] has 4090 tokens"):
        compile_generate(lm, random_prompt(0, 4090), max_new_tokens=20)
    with pytest.raises(ValueError, match=r"prompts\[0\] has 4097 tokens"):
        compile_prefill(lm, random_prompt(0, 4097))
