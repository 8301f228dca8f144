"""Sizes of rows, planned before anything is compiled, and the tokens of prompts in pages; idle rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import qkv
from paged import read_layer

import tca_jax
from tca_jax import methods
from tca_jax.engine.cache import CacheLayout

CONFIG = tca_jax.TCAConfig(block_size=8, window=16)
DENSE = CONFIG.num_candidates


def method_of(candidates, config=CONFIG):
    return methods.get("tca", candidates=[candidates], config=config)


def plan(candidates, batch, prompt_tokens, fed_tokens=0, config=CONFIG):
    """The layout of one layer under given candidates."""
    policy = method_of(candidates, config).cache
    return CacheLayout.plan(policy, 1, len(candidates), batch, prompt_tokens, fed_tokens)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="fed")
def read(method, layout, lengths, inputs, fed=0):
    """Rows of one layer that hold prompts."""
    return read_layer(method, layout, lengths, inputs, fed)[1]


@pytest.mark.parametrize("batch", [1, 3])
def test_every_page_is_named_once(batch):
    """Windows take one page a block, kept tokens one for each b of a head; none is left of a full plan."""
    candidates, lengths = (DENSE, DENSE), np.full(batch, 1000)
    layout = plan(candidates, batch, 1000, 24)
    rows = read(method_of(candidates), layout, lengths, qkv(0, batch, 1000, 4, 2, 16), fed=24)
    named = np.asarray(rows.pages).ravel()
    assert len(np.unique(named[named < rows.num_pages])) == (named < rows.num_pages).sum() == int(rows.free.taken)
    assert int(rows.free.taken) == 2 * batch * (3 + 123)
    layout = CacheLayout.plan(methods.get("tca", candidates=[(0, 7, DENSE)], config=CONFIG).cache, 1, 3, batch, 1000, 0)
    assert np.all(np.diff(layout.kept_pages[0][0]) > 0)  # sparse, denser, dense


def test_idle_rows_are_not_written():
    candidates, lengths = (7, DENSE), np.array([45, 30, 37])
    rows = read(method_of(candidates), plan(candidates, 3, 64, 8), lengths, qkv(0, 3, 64, 4, 2, 16), fed=8)
    _, k, v = map(jnp.asarray, qkv(1, 3, 1, 4, 2, 16))

    def write(fed):
        return rows.with_tokens(0, k, v, lengths[:, None], np.array(fed)[:, None], rows.start)

    fed, of_all = write([True, False, True]), write([True] * 3)
    idle = np.asarray(rows.pages)[0, 1, :, rows.columns :].ravel()
    np.testing.assert_array_equal(fed.k[idle], rows.k[idle])
    assert (np.asarray(of_all.k)[idle] != np.asarray(rows.k)[idle]).any()
    for one, other in ((fed.k, of_all.k), (fed.v, of_all.v)):
        np.testing.assert_array_equal(one.at[idle].set(0), other.at[idle].set(0))


def test_heads_that_share_pages_have_enough():
    share = {"share": 0.3, "block_size": 8, "window": 16, "observation": 8}
    adaptive, same = (methods.get(name, **share).cache for name in ("adakv", "snapkv"))
    layout = CacheLayout.plan(adaptive, 2, 3, 2, 1200, 40)
    assert layout.num_pages < 0.5 * layout.batch * np.sum(layout.kept_pages)
    assert layout.num_pages <= CacheLayout.plan(same, 2, 3, 2, 1200, 40).num_pages + 2 * 2 * 3 * 2 * 128 // 8
    most = adaptive.shared_capacities(1200, 1, 3)[0]
    for held in ([most - 7, 7, 0], [most // 3, most // 3 - 1, most // 3]):
        needed = sum(-(-tokens // 8) + 5 for tokens in held)  # and 5 blocks that are fed
        assert needed <= layout.shared_by_row(0) == layout.shared_by_row(1)


def test_layers_that_share_pages_have_enough():
    policy = methods.get("kvzip", share=0.3, block_size=8, window=16).cache
    layout = CacheLayout.plan(policy, 4, 3, 1, 1200, 40)
    (together, of_head), *more = layout.shared_pages
    assert not more
    assert layout.pool_layers == 4
    assert of_head >= 5  # of what is fed
    assert layout.shared_by_row(0) == together + of_head * 3 * 4


def test_windows_are_no_longer_than_needed():
    short = plan((3, 3), 2, 300, 20, tca_jax.TCAConfig())
    assert (short.num_window_pages, short.window_columns, short.kept_pages) == (3, 3, (((0, 0),),))
    assert short.num_bytes(64, jnp.float32) == 2 * 4 * 64 * 3 * 128 * 2 * 2
    full = methods.get("full").cache
    layout = CacheLayout.plan(full, 1, 2, 1, 1000, 100)
    assert (layout.num_window_pages, layout.window_columns, layout.has_ranked_blocks) == (9, 9, False)
    behind = CacheLayout.plan(full, 1, 2, 1, 1000, 100, following=True)
    assert behind.num_window_pages == 2  # the first block may begin with 127 tokens of what was before


def test_pages_of_a_million_tokens_fit_int32():
    policy = tca_jax.methods.get("tca", candidates=[(14,) * 8] * 32, config=tca_jax.TCAConfig()).cache
    layout = CacheLayout.plan(policy, 32, 8, 1, 2**20, 4096)
    assert layout.num_pages * 128 * 128 > 2**31
    assert layout.num_pages < 2**31
