"""The registry's members, from prompt to answer, against attention by masks without any cache."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import masked_greedy, random_prompt, tiny_lm

import tca_jax
from tca_jax import methods
from tca_jax.lab.plots import inspection
from tca_jax.methods.base import Heads

B, W = 8, 16
GEOMETRY = {"block_size": B, "window": W}


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def local(position):
    return set(range(max(0, position // B * B - W), position + 1))


def sinks(count):
    return lambda layer, head, position: local(position) | set(range(min(count, position + 1)))


def drawn(policy):
    """What the random policy keeps of the blocks left of a query's window, by its draws."""

    draws = [np.asarray(policy._draw(layer, Heads.all(2), jnp.arange(16))) for layer in range(2)]

    def visible(layer, head, position):
        left = range(max(0, position // B - W // B))
        best = [block * B + int(i) for block in left for i in np.argsort(-draws[layer][head][block])[: policy.budget]]
        return local(position) | set(best)

    return visible


@pytest.mark.parametrize(
    ("prompt", "count"),
    [(60, 19), (71, 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, 3), (40, 3), (64, 0)))],
)
def test_streaming_sees_its_sinks_and_its_window(lm, prompt, count):
    ids = random_prompt(prompt, prompt)
    model = lm.with_method("streaming", sinks=count, **GEOMETRY)
    out = tca_jax.generate(model, ids, max_new_tokens=30, stop_token_ids=())
    assert out.tokens == [masked_greedy(lm, ids, 30, sinks(count))]
    held = min(count, max(0, (prompt + 28) // B * B - W))  # sinks that have left the window
    assert out.stats.kept_share == pytest.approx((held + len(local(prompt + 28))) / (prompt + 29))


@pytest.mark.parametrize(("lengths", "share"), [((64, 40), 0.5), ((71,), 0.01)])
def test_random_sees_the_same_number_of_drawn_tokens_of_every_block(lm, lengths, share):
    prompts = [random_prompt(length, length) for length in lengths]
    model = lm.with_method("random", share=share, seed=3, **GEOMETRY)
    out = tca_jax.generate(model, prompts, max_new_tokens=20, stop_token_ids=())
    visible = drawn(model.method.cache)
    assert out.tokens == [masked_greedy(lm, prompt, 20, visible) for prompt in prompts]
    other = lm.with_method("random", share=share, seed=4, **GEOMETRY)
    kept = [inspection.kept_tokens(each, prompts[0]) for each in (model, other)]
    assert kept[0].sum() == kept[1].sum()
    assert not np.array_equal(*kept)


def test_uniform_is_tca_with_one_candidate_for_all_heads(lm):
    config = tca_jax.TCAConfig(**GEOMETRY)
    ids = random_prompt(9, 90)
    one = tca_jax.generate(lm.with_method("uniform", candidate=5, config=config), ids, max_new_tokens=20)
    rows = tca_jax.generate(lm.with_method("tca", candidates=[[5, 5]] * 2, config=config), ids, max_new_tokens=20)
    assert one.tokens == rows.tokens
    assert one.stats.kv_cache_bytes == rows.stats.kv_cache_bytes
    assert one.stats.kept_share == rows.stats.kept_share < 0.7


def test_capacities_hold_what_is_kept_whatever_the_length(lm):
    config = tca_jax.TCAConfig(**GEOMETRY)
    policies = [
        methods.get("streaming", sinks=19, **GEOMETRY).cache,
        methods.get("random", share=0.3, **GEOMETRY).cache,
        methods.get("uniform", candidate=6, config=config).cache,
    ]
    rng = np.random.default_rng(0)
    for policy, length in itertools.product(policies, (16, 24, 31, 100)):
        q, k, v = (jnp.asarray(rng.normal(size=(1, 104, 2, 16)), jnp.float32) for _ in range(3))
        if policy.num_ranked_blocks(104):
            selection = policy.select(
                0, Heads.all(k.shape[2]), q[:, length - 1 : length], k, v, jnp.array([length]), "xla"
            )
            assert selection.budgets[0, 0].sum() <= policy.capacities(0, 104)
            assert not selection.budgets[..., policy.num_ranked_blocks(length) :].any()
