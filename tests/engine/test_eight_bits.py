"""Models with caches and weights in eight bits: answers, contexts and their copies, meshes, scores, methods."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx
from meshes import lm_of, mesh_of, needs_8_devices, with_tca
from tiny import CONFIG, random_prompt, tiny_lm

import tca_jax
from tca_jax.models.decoder import Decoder
from tca_jax.models.projections import E4M3
from tca_jax.pallas_kernels.kv import EightBits

QUESTIONS = [random_prompt(1, 21), random_prompt(2, 5)]
OPTIONS = {"max_new_tokens": 20, "stop_token_ids": ()}


@pytest.mark.integration
def test_the_cache_takes_a_quarter():
    contexts = [tca_jax.prefill(tiny_lm(kv=kv), random_prompt(0, 101)) for kv in ("fp8", None)]
    assert isinstance(contexts[0].rows.k, EightBits)
    sizes = [context.stats for context in contexts]
    eight, wide = (each.kv_cache_bytes for each in sizes)
    d = CONFIG.head_dim
    assert eight * 4 * d == wide * (d + 1)
    assert [each.full_kv_cache_bytes for each in sizes] == [eight, wide]


@needs_8_devices
@pytest.mark.parametrize("shape", [pytest.param((1, 2), marks=pytest.mark.slow), (2, 2)])
def test_caches_over_meshes_answer_alike(shape, tmp_path):
    documents = [random_prompt(0, 61), random_prompt(1, 44)]
    one, many = (with_tca(dataclasses.replace(lm_of(mesh), kv="fp8")) for mesh in (None, mesh_of(shape)))
    expected = tca_jax.generate(one, QUESTIONS, context=tca_jax.prefill(one, documents), **OPTIONS).tokens
    there = tca_jax.prefill(many, documents)
    assert tca_jax.generate(many, QUESTIONS, context=there, **OPTIONS).tokens == expected
    there.save(tmp_path)
    back = tca_jax.Context.load(tmp_path)
    assert tca_jax.generate(many, QUESTIONS, context=back, **OPTIONS).tokens == expected


def quantized(mesh=None, kv=None, **sizes) -> tca_jax.LM:
    """A random model with weights in eight bits."""
    config = dataclasses.replace(CONFIG, **sizes)
    decoder = Decoder(config, dtype=jnp.float32, param_dtype=E4M3, rngs=nnx.Rngs(0))
    return tca_jax.LM.from_decoder(decoder, name="tiny", mesh=mesh, kv=kv)


@needs_8_devices
def test_weights_over_meshes_answer_alike():
    sizes = {"num_kv_heads": 4, "num_heads": 8, "hidden_size": 64, "intermediate_size": 96}
    prompts = [random_prompt(0, 15), random_prompt(1, 12)]  # few tokens: activations of a device's own part differ
    answers = []
    for mesh in (None, mesh_of((1, 2)), mesh_of((2, 2))):
        lm = with_tca(quantized(mesh=mesh, kv="fp8", **sizes))
        answers.append(tca_jax.generate(lm, prompts, **OPTIONS).tokens)
    assert answers[0] == answers[1] == answers[2]
