"""Contexts on disk: they come back bit for bit, and what is damaged or foreign is refused by name."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TCA, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.pallas_kernels.kv import CODES, empty, encode

SAVED = Path(__file__).parent / "saved_context_v2"  # as tca_jax 0.1.0 wrote it, of format 2


@pytest.fixture(scope="module")
def context() -> tca_jax.Context:
    return tca_jax.Context.load(SAVED)


def test_a_context_of_format_2_loads(context):
    assert context.token_ids() == random_prompt(0, 60)
    assert (context.layout.window, context.layout.kept_pages) == (16, (((16, 16),), ((16, 16),)))
    assert (context.cache.dtype, context.cache.kept_columns, context.shards) == (np.float32, (16, 16), None)
    assert (context.identity.model, context.identity.method, context.identity.config.head_dim) == ("tiny", "tca", 16)
    assert context.stats.kept_share == pytest.approx(0.6958, abs=1e-4)
    assert context.stats.attended_share == pytest.approx(0.7995, abs=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, CODES])
def test_a_context_comes_back_bit_for_bit(context, tmp_path, dtype):
    k, v = (encode(jnp.asarray(x), empty(x.shape, dtype)) for x in (context.cache.k, context.cache.v))
    saved = dataclasses.replace(context, cache=dataclasses.replace(context.cache, k=k, v=v))
    saved.save(tmp_path)
    loaded = tca_jax.Context.load(tmp_path)
    assert (loaded.identity, loaded.layout, loaded.shards) == (context.identity, context.layout, None)
    for mine, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(saved), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert loaded.cache.dtype == dtype


@pytest.mark.integration
def test_a_context_of_format_2_answers_alike(context):
    lm = with_candidates(tiny_lm(), [[0, 6], [TCA.num_candidates, 3]])
    fresh = tca_jax.prefill(lm, random_prompt(0, 60))
    loaded = dataclasses.replace(
        context, identity=fresh.identity
    )  # weights drawn elsewhere may differ in their last bits
    out, expected = (tca_jax.generate(lm, [1, 2], context=c, max_new_tokens=8, logprobs=True) for c in (loaded, fresh))
    assert out.tokens == expected.tokens
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format_version=4), r"format_version = 4: .* reads \[2, 3\]; read the document again"),
        (lambda m: m.pop("format_version"), r"format_version = None"),
        (lambda m: m.pop("layout"), r"damaged, or of another version of tca_jax: 'layout'"),
        (lambda m: m["layout"].update(colour=1), r"damaged, or of another version of tca_jax: .*colour"),
        (lambda m: m["identity"].pop("config"), r"damaged, or of another version of tca_jax: 'config'"),
    ],
)
def test_damaged_and_newer_contexts_are_refused(tmp_path, change, message):
    shutil.copytree(SAVED, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "context_0" / "metadata" / "metadata"
    metadata = json.loads(file.read_text())
    change(metadata)
    file.write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=f"{tmp_path}/context_0: {message}"):
        tca_jax.Context.load(tmp_path)
