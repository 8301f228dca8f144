"""What the compiled decoding loop does with the cache on a GPU: it writes in place and copies neither pool nor ring."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from tiny import random_prompt, tiny_lm, with_candidates

from tca_jax.decoding import decode, prefill, row_keys
from tca_jax.sampling import Sampling


def operations(program: str, shapes: set[tuple[int, ...]]) -> set[str]:
    """Names of the operations whose result has one of the shapes."""
    found = re.finditer(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", program)
    return {match[2] for match in found if tuple(map(int, match[1].split(","))) in shapes}


def test_the_operations_of_a_program_are_found_by_shape():
    program = "%a.1 = f32[2,3]{1,0} copy(%b)\n  ROOT %c = (f32[2,3]{1,0}) tuple(%a.1)\n %d = bf16[4]{0} add(%e, %f)"
    assert operations(program, {(2, 3)}) == {"copy"}
    assert operations(program, {(4,), (2, 3)}) == {"copy", "add"}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU; XLA copies what loops write on a CPU")
@pytest.mark.parametrize("candidates", [None, [[3, 14], [5, 9]]])
def test_decoding_copies_neither_pool_nor_ring(candidates):
    lm = dataclasses.replace(tiny_lm(), eos_token_ids=())
    if candidates is not None:
        lm = with_candidates(lm, candidates)
    tokens, sampling = jnp.asarray([random_prompt(0, 200)], jnp.int32), Sampling.create()
    keys, stops = row_keys(jax.random.key(0), 1), jnp.zeros(0, jnp.int32)
    state = jax.eval_shape(
        lambda *args: prefill(*args, max_new_tokens=40), lm, tokens, jnp.array([200]), keys, sampling, stops
    )
    program = jax.jit(decode, donate_argnums=1).lower(lm, state, jnp.int32(40), sampling).compile().as_text()
    shapes = {x.shape for cache in state.caches for x in (cache.k_pool, cache.k_ring)}
    found = operations(program, shapes)
    assert "dynamic-update-slice" in found  # the new token's key, or this test looks at the wrong shapes
    assert not {name for name in found if name.startswith("copy")}
