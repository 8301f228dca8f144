"""Reading and steps by predicted worth: with everything selected and kept, tokens are those of full attention."""

import jax.numpy as jnp
import numpy as np
import pytest

import tca_jax
from tca_jax.calibration.predicted_worth import SHARES, WorthMaps
from tca_jax.engine.runtime import Runtime, settings_of


@pytest.fixture(scope="module")
def lm():
    return tca_jax.load("recall-tiny", dtype="float32")


def drawn_maps(lm):
    c, rng = lm.config, np.random.default_rng(0)
    maps = rng.normal(size=(c.num_layers, c.num_kv_heads, c.hidden_size + 1)).astype(np.float32)
    zeros = np.zeros(maps.shape[:2], np.float32)
    return WorthMaps(maps, np.quantile(rng.normal(size=999) * 8, 1 - SHARES).astype(np.float32), zeros, zeros, zeros)


def answered(lm, prompts, settings, steps):
    runtime = Runtime.create(lm, settings, rows=len(prompts), pages=2_000, columns=16)
    logits = [runtime.read(row, ids) for row, ids in enumerate(prompts)]
    tokens = [jnp.stack(logits).argmax(axis=-1)]
    for _ in range(steps):
        tokens.append(runtime.step(np.asarray(tokens[-1], np.int32)).argmax(axis=-1))
    return np.stack(tokens, axis=1), runtime


def test_everything_kept_is_full_attention(lm):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(32, 120, length).tolist() for length in (1_000, 300, 7)]
    tokens, runtime = answered(lm, prompts, settings_of(drawn_maps(lm), 1.0, 1.0), 140)
    expected = tca_jax.generate(lm, prompts, max_new_tokens=141, stop_token_ids=()).tokens
    np.testing.assert_array_equal(tokens, expected)
    assert (np.asarray(runtime.table.kept) == np.asarray(runtime.table.start)[:, None]).all()


def test_fewer_tokens_are_kept_of_prompts_and_answers(lm):
    prompt = np.random.default_rng(0).integers(32, 120, 1_000).tolist()
    _, runtime = answered(lm, [prompt], settings_of(drawn_maps(lm), 0.2, 0.1), 140)
    kept, start = np.asarray(runtime.table.kept), int(runtime.table.start[0])
    assert start == (1_139 // 128 - 2) * 128
    assert 0 < kept.sum() < 0.6 * start * kept.size
    assert kept.min() >= 4
    used = 2_000 - runtime.allocator.free
    assert used == (-(-kept // 128)).sum() + kept.size * (3 + 1)  # a window, and means
