"""The registry: names, options, pairs, methods as written, its members, and a method of a user's own."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import masked_greedy, random_prompt, tiny_lm, write_checkpoint

import tca_jax
from tca_jax import methods
from tca_jax.lab.plots import inspection
from tca_jax.methods.base import Heads
from tca_jax.methods.registry import _FACTORIES, current_types, describe_method, with_known
from tca_jax.methods.written import joined, parse_parts
from tca_jax.models.rope import RopeConfig


@pytest.fixture
def registry(monkeypatch):
    """A registry that forgets what a test puts into it."""
    monkeypatch.setattr("tca_jax.methods.registry._FACTORIES", dict(_FACTORIES))


def test_members_are_made_by_name_and_hashable():
    needed = {"tca": {"candidates": 3}, "cake": {"preferences": [1, 2]}, "duoattention": {"gates": [[1, 0], [0, 1]]}}
    needed |= {"kvzip-heads": {"head_scores": [[1, 0], [0, 1]]}}
    for name in methods.names():
        method = methods.get(name, **needed.get(name, {}))
        assert method.name == name
        assert hash(method) == hash(dataclasses.replace(method))


def test_pairs_join_prefill_and_cache():
    pair = methods.get("full+streaming", streaming={"sinks": 9})
    assert pair.name == "full+streaming"
    assert pair.prefill == methods.get("full").prefill
    assert pair.cache == methods.get("streaming", sinks=9).cache
    assert not pair.prefill_reads_cache
    assert methods.get("full").prefill_reads_cache
    assert methods.get("streaming").prefill_reads_cache
    assert not methods.get("uniform+streaming").prefill_reads_cache


def test_known_values_fill_options_not_given():
    known = {"window": 32, "candidates": [[1]], "share": 0.5}
    assert with_known("random", known, {"share": 0.25}) == {"window": 32, "share": 0.25}
    assert with_known("full+random", known, {"random": {"seed": 1}}) == {
        "full": {},
        "random": {"window": 32, "share": 0.5, "seed": 1},
    }
    assert with_known("tca", known, {}) == {"candidates": [[1]]}
    with pytest.raises(ValueError, match="has no part \\['window'\\]"):
        with_known("full+random", known, {"window": 8})


def test_a_registered_method_is_found_by_name(registry):
    mine = dataclasses.replace(methods.get("random"), name="mine")
    methods.register("mine", lambda: mine)
    assert methods.get("mine") is mine
    assert methods.get("full+mine").cache == mine.cache
    assert tiny_lm().with_method("mine").method is mine


def test_models_give_their_rotation_to_methods():
    lm = tiny_lm()
    bare = methods.get("expected-attention")
    with pytest.raises(ValueError, match=r"frequencies = None: must be the model's; lm.with_method puts them in"):
        bare.cache.select(0, Heads.all(2), *[jnp.zeros((1, 256, 2, 16))] * 3, jnp.array([256]), "xla")
    given = lm.with_method(bare).method.cache.frequencies
    np.testing.assert_allclose(given, 10_000.0 ** -(np.arange(8) / 8), rtol=1e-6)
    sparse = methods.Method("sparse", methods.SparsePrefill(bare.cache), methods.get("full").cache)
    assert lm.with_method(sparse).method.prefill.selector.frequencies == given
    rope = RopeConfig(type="dynamic", factor=2.0, original_max_positions=4096)
    dynamic = dataclasses.replace(lm, config=dataclasses.replace(lm.config, rope=rope))
    with pytest.raises(ValueError, match=r"this model's RoPE changes with the length \(dynamic\)"):
        dynamic.with_method(bare)


def test_descriptions_of_moved_methods_stay_readable():
    pair = methods.get("tca+kvzip", tca={"candidates": 3}, kvzip={"share": 0.5})
    described = describe_method(pair)
    before = described.replace("tca_jax.lab.rivals", "tca_jax.methods")
    assert before != described == current_types(before) == current_types(described)


# As written on a command line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("full", (("full", {}),)),
        ("streaming:window=512,sinks=8", (("streaming", {"window": 512, "sinks": 8}),)),
        ("full+random:share=0.25", (("full", {}), ("random", {"share": 0.25}))),
        ("snapkv:pooling=max,capacity=null", (("snapkv", {"pooling": "max", "capacity": None}),)),
        ("mine+full", (("mine", {}), ("full", {}))),
    ],
)
def test_parts_have_names_and_option_values(text, parts):
    assert parse_parts(text, "--method", ["mine"]) == parts


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("random:share=0.5", "random", {"share": 0.5}),
        ("full+random:share=0.5", "full+random", {"random": {"share": 0.5}}),
        ("random:share=0.5+random:share=0.5", "random+random", {"random": {"share": 0.5}}),
    ],
)
def test_pairs_have_options_by_part_names(text, name, options):
    assert joined(parse_parts(text, "--method"), "--method") == (name, options)


B, W = 8, 16
GEOMETRY = {"block_size": B, "window": W}


@pytest.fixture(scope="module")
def plain():
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


@pytest.mark.integration
@pytest.mark.parametrize(
    ("prompt", "count"),
    [(60, 19), (71, 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, 3), (40, 3), (64, 0)))],
)
def test_streaming_sees_its_sinks_and_its_window(plain, prompt, count):
    ids = random_prompt(prompt, prompt)
    model = plain.with_method("streaming", sinks=count, **GEOMETRY)
    out = tca_jax.generate(model, ids, max_new_tokens=30, stop_token_ids=())
    assert out.tokens == [masked_greedy(plain, ids, 30, sinks(count))]
    held = min(count, max(0, (prompt + 28) // B * B - W))  # sinks that have left the window
    assert out.stats.kept_share == pytest.approx((held + len(local(prompt + 28))) / (prompt + 29))


@pytest.mark.integration
@pytest.mark.parametrize(("lengths", "share"), [((64, 40), 0.5), ((71,), 0.01)])
def test_random_sees_its_draws_of_every_block(plain, lengths, share):
    prompts = [random_prompt(length, length) for length in lengths]
    model = plain.with_method("random", share=share, seed=3, **GEOMETRY)
    out = tca_jax.generate(model, prompts, max_new_tokens=20, stop_token_ids=())
    visible = drawn(model.method.cache)
    assert out.tokens == [masked_greedy(plain, prompt, 20, visible) for prompt in prompts]
    other = plain.with_method("random", share=share, seed=4, **GEOMETRY)
    kept = [inspection.kept_tokens(each, prompts[0]) for each in (model, other)]
    assert kept[0].sum() == kept[1].sum()
    assert not np.array_equal(*kept)


@dataclasses.dataclass(frozen=True)
class LoudKeys(methods.CachePolicy):
    """Keeps keys of a large norm: more of them in even layers, and as many of a block as stand out there."""

    threshold: float = 1.0
    block_size: int = 8
    window: int = 16

    def capacities(self, layer, prompt_tokens):
        blocks = self.num_ranked_blocks(prompt_tokens)
        return (blocks * self.most(layer), blocks)  # KV heads may differ

    def most(self, layer):
        return 6 if layer % 2 == 0 else 2

    def select(self, layer, heads, q, k, v, lengths, backend):
        norms = jnp.linalg.norm(k.astype(jnp.float32), axis=-1).swapaxes(1, 2)  # [B, Hkv, L]
        batch, heads, tokens = norms.shape
        blocks = tokens // self.block_size
        by_block = norms[..., : blocks * self.block_size].reshape(batch, heads, blocks, self.block_size)
        loud = (by_block > self.threshold * by_block.mean(axis=-1, keepdims=True)).sum(axis=-1)
        most = jnp.array([self.most(layer), 1])[:, None]
        ranked = jnp.arange(blocks) < self.num_ranked_blocks(lengths)[:, None, None]
        return methods.Selection(norms, jnp.where(ranked, jnp.minimum(loud, most), 0).astype(jnp.int32))


def loud_keys(threshold: float = 1.0) -> methods.Method:
    policy = LoudKeys(threshold)
    return methods.Method("loud-keys", methods.SparsePrefill(policy), policy)


@pytest.fixture(scope="module", autouse=True)
def registered():
    methods.register("loud-keys", loud_keys, replace=True)
    yield
    del methods.registry._FACTORIES["loud-keys"]  # of tests in the same process


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("own") / "tiny")
    return tca_jax.load(folder)


def test_kept_tokens_depend_on_layer_head_data():
    mine = tiny_lm().with_method("loud-keys")
    counts = [inspection.kept_tokens(mine, random_prompt(seed, 120)).sum(axis=-1) - 16 for seed in range(3)]
    assert all((count[:, 1] == 13).all() for count in counts)  # one of each ranked block
    assert all(count[0, 0] > count[1, 0] for count in counts)
    assert len({int(count[0, 0]) for count in counts}) > 1


def test_text_is_scored_under_it(lm):
    text = "for i in range(10): print(i)\n" * 6
    full = tca_jax.score(lm, text).logprobs[0]
    mine = tca_jax.score(lm.with_method("loud-keys"), text).logprobs[0]
    assert mine.shape == full.shape == (len(text) - 1,)
    np.testing.assert_allclose(mine[:15], full[:15], atol=1e-4)  # inside the window nothing is dropped
    assert np.abs(mine - full).max() > 1e-3


def test_capacities_of_another_number_of_heads_are_refused():
    lm = tiny_lm()

    class Three(LoudKeys):
        def capacities(self, layer, prompt_tokens):
            return (1, 1, 1)

    model = lm.with_method(methods.Method("three", methods.SparsePrefill(Three()), Three()))
    with pytest.raises(ValueError, match=r"Three.capacities\(0, .*\) = \(1, 1, 1\): must be one number, or 2"):
        tca_jax.generate(model, random_prompt(0, 50), max_new_tokens=2)
