"""Contexts on disk: they come back bit for bit, and what is damaged or foreign is refused by name."""

import dataclasses
import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIG, TCA, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.models.decoder import Decoder


@pytest.fixture(scope="module")
def lm():
    """In bfloat16, which NumPy does not know."""
    decoder = Decoder(CONFIG, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    return with_candidates(tca_jax.LM.from_decoder(decoder, name="tiny"), [[0, 6], [TCA.num_candidates, 3]])


@pytest.fixture(scope="module")
def context(lm):
    return tca_jax.prefill(lm, [random_prompt(0, 100), random_prompt(1, 61)])


@pytest.fixture
def saved(context, tmp_path):
    context.save(tmp_path / "c")
    return tmp_path / "c"


def test_a_context_comes_back_bit_for_bit(lm, context, saved):
    loaded = tca_jax.Context.load(saved)
    assert loaded.identity == context.identity
    assert loaded.layout == context.layout
    for mine, theirs in zip(jax.tree.leaves(loaded.cache), jax.tree.leaves(context.cache), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert [loaded.token_ids(row) for row in (0, 1)] == [random_prompt(0, 100), random_prompt(1, 61)]
    assert loaded.stats.kv_cache_bytes == context.stats.kv_cache_bytes
    options = {"max_new_tokens": 12, "stop_token_ids": ()}
    out, expected = (tca_jax.generate(lm, [[1, 2], [3]], context=c, **options) for c in (loaded, context))
    assert out.tokens == expected.tokens
    assert out.stats.compile_seconds == 0.0 or expected.stats.compile_seconds == 0.0


def test_a_save_replaces_the_context_before_it(lm, saved):
    other = tca_jax.prefill(lm, [random_prompt(2, 100), random_prompt(3, 61)])
    other.save(saved)
    assert tca_jax.Context.load(saved).token_ids() == random_prompt(2, 100)
    assert [path.name for path in saved.iterdir()] == ["context_1"]


def test_a_loaded_context_of_others_is_refused(lm, saved):
    loaded = tca_jax.Context.load(saved)
    generate = inspect.unwrap(tca_jax.generate)
    decoder = Decoder(CONFIG, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(1))
    other = tca_jax.LM.from_decoder(decoder, name="other").with_method(lm.method)
    with pytest.raises(ValueError, match=r"made by model 'tiny', whose weights or shape are not those of 'other'"):
        generate(other, [[1], [2]], context=loaded)
    with pytest.raises(ValueError, match=r"made under method 'tca', and 'tiny' runs under 'streaming'"):
        generate(lm.with_method("streaming", window=16, block_size=8), [[1], [2]], context=loaded)
    wide = Decoder(CONFIG, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    wide = tca_jax.LM.from_decoder(wide, name="wide").with_method(lm.method)
    with pytest.raises(
        ValueError, match=r"context holds bfloat16 and the cache of 'wide' float32: load the model in dtype"
    ):
        generate(wide, [[1], [2]], context=loaded)


def test_a_context_of_format_2_answers_alike():
    lm = with_candidates(tiny_lm(), [[0, 6], [TCA.num_candidates, 3]])
    loaded = tca_jax.Context.load(Path(__file__).parent / "saved_context_v2")
    fresh = tca_jax.prefill(lm, random_prompt(0, 60))
    assert loaded.token_ids() == fresh.token_ids()
    np.testing.assert_allclose(loaded.attended_share, fresh.attended_share, atol=1e-6)
    loaded = dataclasses.replace(
        loaded, identity=fresh.identity
    )  # weights drawn elsewhere may differ in their last bits
    out, expected = (tca_jax.generate(lm, [1, 2], context=c, max_new_tokens=8, logprobs=True) for c in (loaded, fresh))
    assert out.tokens == expected.tokens
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format_version=4), r"format_version = 4: .* reads \[2, 3\]; read the document again"),
        (lambda m: m.pop("layout"), r"damaged, or of another version of tca_jax: 'layout'"),
        (lambda m: m["layout"].update(colour=1), r"damaged, or of another version of tca_jax: .*colour"),
        (lambda m: m["identity"].pop("config"), r"damaged, or of another version of tca_jax: 'config'"),
    ],
)
def test_damaged_and_newer_contexts_are_refused(saved, change, message):
    file = saved / "context_0" / "metadata" / "metadata"
    metadata = json.loads(file.read_text())
    change(metadata)
    file.write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=f"{saved}/context_0: {message}"):
        tca_jax.Context.load(saved)
