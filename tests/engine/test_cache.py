"""The KV cache in pages: static layout, what tables name, what prompts leave, idle rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import kept_tokens, local_tokens, read_layer

import tca_jax
from tca_jax import methods
from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.decode import decode_layer
from tca_jax.methods.base import Heads

CONFIG = tca_jax.TCAConfig(block_size=8, window=16)
DENSE, D = CONFIG.num_candidates, 16
HEADS = Heads.all(2)


def method_of(candidates, config=CONFIG):
    return methods.configured(config, [candidates])


def plan(candidates, batch, prompt_tokens, fed_tokens=0, config=CONFIG):
    """The layout of one layer under given candidates."""
    policy = method_of(candidates, config).cache
    return CacheLayout.plan(policy, 1, len(candidates), batch, prompt_tokens, fed_tokens)


def _qkv(seed, batch, tokens, heads=4, kv_heads=2, d=D):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(batch, tokens, h, d)).astype(np.float32) for h in (heads, kv_heads, kv_heads))


@functools.partial(jax.jit, static_argnums=(0, 1))
def read(method, layout, lengths, qkv):
    """The cache of one layer behind prompts."""
    return read_layer(method, layout, lengths, qkv)[1]


@pytest.mark.parametrize("batch", [1, 3])
def test_every_page_is_named_once(batch):
    policy = methods.configured(CONFIG, [(0, 7, DENSE), (DENSE, 0, 0)]).cache
    layout = CacheLayout.plan(policy, 2, 3, batch, 1000, 0)
    named = np.concatenate([np.asarray(table).ravel() for table in layout.tables()])
    named = named[named < layout.num_pages]
    assert sorted(named.tolist()) == list(range(layout.num_pages))
    assert np.all(np.diff(layout.kept_pages[0][0]) > 0)  # sparse, denser, dense


def test_idle_rows_are_not_written():
    method, lengths = method_of((7, DENSE)), jnp.array([45, 30, 37])
    cache = CacheLayout.plan(method.cache, 1, 2, 3, 64, 8).empty(D, jnp.float32, lengths - lengths % 8)
    step = jax.jit(lambda *x: decode_layer(method.cache, 0, HEADS, *x[:3], None, cache, lengths, None, fed=x[3])[1])
    fed, of_all = (step(*_qkv(1, 3, 1), np.array(rows)) for rows in ([True, False, True], [True] * 3))
    kept = np.asarray(cache.window_pages(0, lengths // 8))[1]
    np.testing.assert_array_equal(fed.k[kept], cache.k[kept])
    assert np.asarray(of_all.k[kept]).any()
    np.testing.assert_array_equal(fed.k.at[kept].set(0), of_all.k.at[kept].set(0))
    np.testing.assert_array_equal(fed.v.at[kept].set(0), of_all.v.at[kept].set(0))


def test_heads_that_share_pages_have_their_own():
    share = {"share": 0.3, "block_size": 8, "window": 16, "observation": 8}
    adaptive, same = (methods.get(name, **share).cache for name in ("adakv", "snapkv"))
    layout, fed = CacheLayout.plan(adaptive, 2, 3, 2, 1200, 40), 5
    assert layout.num_pages < 0.5 * layout.batch * np.sum(layout.kept_pages)
    assert layout.num_pages <= CacheLayout.plan(same, 2, 3, 2, 1200, 40).num_pages + 2 * 2 * 3 * 2 * 128 // 8
    most = adaptive.shared_capacities(1200, 1, 3)[0]
    held = [[most - 7, 7, 0], [most // 3, most // 3 - 1, most // 3]]
    tables = [np.asarray(table) for table in layout.tables(held=[jnp.array(held)] * 2)]
    named = np.concatenate([table[table < layout.num_pages] for table in tables])
    windows = 2 * 2 * 3 * (layout.window_columns - layout.num_window_pages)  # entries that serve a page again
    assert len(np.unique(named)) == len(named) - windows
    pages = (tables[1][..., : layout.kept_columns[1]] < layout.num_pages).sum(axis=-1)
    assert (pages >= -(-np.array(held) // 8) + fed).all()


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
    behind = CacheLayout.plan_following(full, 1, 2, 1, 1000, 100)
    assert behind.num_window_pages == 2  # the first block may begin with 127 tokens of what was before


def test_pages_of_a_million_tokens_fit_int32():
    policy = tca_jax.methods.configured(tca_jax.TCAConfig(), [(14,) * 8] * 32).cache
    layout = CacheLayout.plan(policy, 32, 8, 1, 2**20, 4096)
    assert layout.num_pages * 128 * 128 > 2**31
    assert layout.num_pages < 2**31
    assert int(layout.tables()[31].max()) < layout.num_pages


@pytest.mark.parametrize("length", [5, 40, 71, 72])
def test_pages_hold_local_and_selected_tokens(length):
    q, k, v = _qkv(0, 1, 72)
    candidates = (0, 9)
    lengths = np.array([length], np.int32)
    cache = read(method_of(candidates), plan(candidates, 1, 72, 29), lengths, (q, k, v))
    positions = np.arange(8 * CONFIG.num_ranked_blocks(length), length)
    expected = np.stack([np.asarray(x)[0, positions].swapaxes(0, 1) for x in (k, v)])
    np.testing.assert_array_equal(local_tokens(cache, 0, positions), expected)
    mask = np.asarray(tca_jax.select(q[:, max(0, length - 64) : length], k, jnp.array(candidates), lengths, CONFIG))[0]
    for head in range(2):
        chosen = np.flatnonzero(mask[head])
        np.testing.assert_array_equal(
            kept_tokens(cache, 0, head), np.stack([np.asarray(x)[0, chosen, head] for x in (k, v)])
        )
