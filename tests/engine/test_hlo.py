"""What compiled programs do with memory on a GPU: decoding copies no cache, prefill keeps no layer's keys beside it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hlo import operations
from tiny import CONFIG, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.engine.decode import decode, prefill, resume, row_keys
from tca_jax.engine.sampling import Sampling
from tca_jax.models.decoder import Decoder

gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU; XLA does otherwise on a CPU")


def arguments(lm: tca_jax.LM, tokens: int) -> tuple[Any, ...]:
    """What `prefill` takes for a prompt of whole length."""
    prompt, stops = jnp.zeros((1, tokens), jnp.int32), jnp.zeros(0, jnp.int32)
    return lm, prompt, jnp.array([tokens]), row_keys(jax.random.key(0), 1), Sampling(), stops


@gpu
@pytest.mark.parametrize("candidates", [None, [[3, 14], [5, 9]]])
def test_decoding_copies_no_pool(candidates):
    lm = dataclasses.replace(tiny_lm(), eos_token_ids=())
    if candidates is not None:
        lm = with_candidates(lm, candidates)
    state, shared = jax.eval_shape(lambda *args: prefill(*args, new_tokens=40), *arguments(lm, 200))
    program = jax.jit(decode, donate_argnums=1).lower(lm, state, shared, jnp.int32(40), Sampling()).compile()
    found = operations(program.as_text(), {state.cache.k.shape})
    assert "dynamic-update-slice" in found  # the new token's key, or this test looks at the wrong shapes
    assert not {name for name in found if name.startswith("copy")}


@pytest.mark.integration
@pytest.mark.parametrize("candidates", [None, [[3, 14], [5, 9]]])
def test_programs_over_a_context_copy_no_pool(candidates):
    lm = tiny_lm() if candidates is None else with_candidates(tiny_lm(), candidates)
    context = tca_jax.prefill(lm, random_prompt(0, 1300))
    reader, keys = lm.for_programs(), row_keys(jax.random.key(0), 2)
    tokens = jnp.zeros((2, context.cache.block_size), jnp.int32)
    where = (None, tokens, context.lengths, jnp.array([2, 3]), context.prompt_lengths)
    arguments = (reader, context.cache, *where, keys, Sampling(), jnp.zeros(0, jnp.int32))
    start = functools.partial(resume, context_tokens=1408, new_tokens=40)
    state = jax.eval_shape(start, *arguments)
    step = jax.jit(decode, donate_argnums=1)
    programs = jax.jit(start).lower(*arguments), step.lower(reader, state, context.cache, jnp.int32(40), Sampling())
    shape = context.cache.k.shape
    assert state.cache.k.shape != shape
    for program in programs:
        found = operations(program.compile().as_text(), {shape})
        assert "parameter" in found
        assert found <= {"parameter", "get-tuple-element", "bitcast"}


@gpu
@pytest.mark.parametrize("candidates", [None, (1, 2)])
def test_prefill_memory_is_that_of_one_layer(candidates, monkeypatch):
    tokens, layers = 8192, (4, 8)  # the first and the last are not as those between them
    monkeypatch.setattr("tca_jax.models.decoder._CHUNK_ELEMENTS", 1024 * CONFIG.intermediate_size)

    def temporaries(num_layers: int) -> int:
        config = dataclasses.replace(CONFIG, num_layers=num_layers, max_positions=2 * tokens)
        decoder = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)))
        lm = tca_jax.LM.from_decoder(decoder)
        if candidates is not None:
            lm = with_candidates(lm, [candidates] * num_layers, tca_jax.TCAConfig(window=256))
        program = jax.jit(prefill, static_argnames="new_tokens").lower(*arguments(lm, tokens), new_tokens=9)
        return program.compile().memory_analysis().temp_size_in_bytes

    few, many = map(temporaries, layers)
    keys_and_values = 2 * tokens * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    assert many - few < (layers[1] - layers[0]) * keys_and_values / 4
