"""KVzip against a NumPy transcription of its rule; its form by heads, and DuoAttention: which heads keep what."""

import functools

import compressing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import masked_greedy, random_prompt, tiny_lm, write_checkpoint

import tca_jax
from tca_jax import methods
from tca_jax.engine.read import Calls
from tca_jax.lab import plots
from tca_jax.lab.rivals.duoattention import load_gates
from tca_jax.lab.rivals.kvzip import CONTINUING, OPENING
from tca_jax.lab.rivals.kvzip_heads import repetition_scores
from tca_jax.lab.rivals.repetition import Repetition, repeat
from tca_jax.methods.base import Heads
from tca_jax.methods.full import FullCache
from tca_jax.pallas_kernels.select_tokens import selection_mask

B, W = 8, 16
GEOMETRY = {"block_size": B, "window": W}
OPTIONS = {"chunk": 24, "sinks": 3, **GEOMETRY}
PASSAGE = random_prompt(5, 13)
#: A random prompt, one that repeats itself, and one without a ranked block.
PROMPTS = [random_prompt(0, 90), [*PASSAGE, *random_prompt(6, 20), *PASSAGE, *[7] * 15], random_prompt(1, 19)]
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return tca_jax.load(write_checkpoint(tmp_path_factory.mktemp("worded"), chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def words(lm):
    texts = {"opening": OPENING, "continuing": CONTINUING, "answer": "]A:"}
    return {name: tuple(lm.tokenizer(text, add_special_tokens=False)["input_ids"]) for name, text in texts.items()}


@pytest.fixture(scope="module")
def scores(lm, words):
    return [compressing.kvzip_scores(lm, prompt, 24, 3, **words) for prompt in PROMPTS]


def ranked_tokens(length):
    return max(0, length // B - W // B) * B


def decoded(lm, prompt, kept, new_tokens):
    """Greedy answer: the prompt reads everything, and what follows sees what is held and each other."""

    def visible(layer, head, position):
        return {*np.flatnonzero(kept[layer, head]).tolist(), *range(len(prompt), position + 1)}

    def visible_in_prompt(layer, head, position):
        return set(range(position + 1))

    return masked_greedy(lm, prompt, new_tokens, visible, visible_in_prompt=visible_in_prompt)


def test_the_models_tokenizer_words_the_request(lm, words):
    model = lm.with_method("kvzip", **OPTIONS)
    assert model.method.cache.repetition == Repetition(24, 3, **words)
    bare = tiny_lm().with_method(model.method)  # of another model, which has no tokenizer
    assert bare.method.cache.repetition == Repetition(24, 3)


@pytest.mark.parametrize("page_size", [16, 128])
def test_scores_are_attention_of_repeated_chunks(lm, scores, page_size, monkeypatch):
    monkeypatch.setattr(FullCache, "block_size", page_size)
    model = lm.with_method("kvzip", **OPTIONS)
    tokens = jnp.array([np.pad(prompt, (0, 96 - len(prompt))) for prompt in PROMPTS], jnp.int32)
    lengths = jnp.array([len(p) for p in PROMPTS])
    found = np.stack(repeat(model, model.method.cache.repetition, tokens, lengths, Calls())[1])
    for row, expected in enumerate(scores):
        length = expected.shape[-1]
        np.testing.assert_allclose(found[:, row, :, :length], expected, rtol=5e-3, atol=2e-5)
        assert not found[:, row, :, length:].any()
        assert expected[..., 3:].max() > 2 * np.median(expected[..., 3:])


@pytest.mark.parametrize("level", ["pair", "layer", "uniform"])
def test_selections_are_the_highest_sharing_a_budget(level):
    """Random scores, scores of few values, all alike, and all zero but a few, in ragged rows."""
    rng, shape = np.random.default_rng(0), (3, 2, 72)
    tables = [rng.random(shape), rng.integers(0, 4, shape) / 4, np.full(shape, 0.25)]
    tables += [np.zeros(shape), rng.random(shape)]
    tables[3][1, 0, [5, 40]] = 1e-3
    tables[4] **= np.array([1.0, 9.0, 40.0])[:, None, None]  # nearly nothing of the last layer
    lengths = (72, 67, 72, 72, 41)
    scores, heads = jnp.asarray(np.stack(tables, axis=1), jnp.float32), [Heads.all(2)] * 3
    for share in (0.3, 0.71, 1.0):
        policy = methods.get("kvzip", share=share, level=level, **GEOMETRY).cache
        selections = jax.jit(functools.partial(policy.select_repeated, heads))(scores, np.array(lengths))
        marks = np.asarray(jax.vmap(functools.partial(selection_mask, block_size=B))(*selections))
        for row, length in enumerate(lengths):
            ranked = ranked_tokens(length)
            expected = compressing.kvzip_kept(np.asarray(scores)[:, row, :, :ranked], share, level)
            np.testing.assert_array_equal(marks[:, row, :, :ranked], expected)
            assert not marks[:, row, :, ranked:].any()


def test_head_scores_are_the_most_of_all_texts(lm, scores):
    found = repetition_scores(lm, PROMPTS[:2], chunk=24, sinks=3)
    expected = np.max([each[..., 3:].max(axis=-1) for each in scores[:2]], axis=0)
    np.testing.assert_allclose(found, expected, rtol=5e-3)


def test_heads_keep_the_prompt_or_its_window():
    lm = tiny_lm()
    model = lm.with_method("kvzip-heads", head_scores=[[0.2, 0.9], [0.7, 0.1]], share=0.5, sinks=3, **GEOMETRY)
    out = tca_jax.generate(model, PROMPTS[0], max_new_tokens=30, stop_token_ids=())
    kept = np.ones((2, 2, 90), bool)
    for layer, head in ((0, 0), (1, 1)):
        kept[layer, head, 3 : ranked_tokens(90)] = False
    assert out.tokens == [decoded(lm, PROMPTS[0], kept, 30)]
    np.testing.assert_array_equal(plots.kept_tokens(model, PROMPTS[0]), kept)


GATES = [[0.9, 0.1], [0.2, 0.8]]


@pytest.mark.parametrize(
    ("method", "options", "gates", "prompt"),
    [
        ("duoattention", {"gates": GATES}, GATES, 5),
        ("duoattention", {"gates": GATES}, GATES, 71),
        ("streaming", {}, np.zeros((2, 2)), 60),
    ],
)
def test_heads_see_what_their_kind_sees(method, options, gates, prompt):
    """Retrieval heads see everything, the others 3 sinks and the window, as all heads of streaming."""

    def visible(layer, head, position):
        edge = max(0, position // B * B - W) if gates[layer][head] < 0.5 else 0
        return {*range(min(3, position + 1)), *range(edge, position + 1)}

    lm, ids = tiny_lm(), random_prompt(prompt, prompt)
    model = lm.with_method(method, **options, sinks=3, **GEOMETRY)
    out = tca_jax.generate(model, ids, max_new_tokens=30, stop_token_ids=())
    assert out.tokens == [masked_greedy(lm, ids, 30, visible)]
    seen = [len(visible(layer, head, prompt + 28)) for layer, head in np.ndindex(2, 2)]
    assert out.stats.kept_share == pytest.approx(np.mean(seen) / (prompt + 29))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.72, 1.0])
def test_the_highest_gates_are_retrieval_heads(share):
    gates = np.random.default_rng(0).uniform(-0.1, 1.1, (5, 8))
    retrieval = np.array(methods.get("duoattention", gates=gates, share=share).cache.retrieval)
    assert retrieval.sum() == round(share * 40)
    clipped = np.clip(gates, 0, 1)
    assert clipped[retrieval].min() >= clipped[~retrieval].max(initial=0)
    tied = methods.get("duoattention", gates=[[1, 1, 0], [2, 1, 1]], share=0.5).cache
    assert tied.retrieval == ((True, True, False), (True, False, False))


def test_published_gates_load(tmp_path):
    gates = np.random.default_rng(1).uniform(-1e-4, 1, (4, 2))
    path = tmp_path / "full_attention_heads.tsv"
    np.savetxt(path, gates, delimiter="\t")
    np.testing.assert_array_equal(load_gates(path), gates)
    assert methods.get("duoattention", gates=path) == methods.get("duoattention", gates=gates)
    for text in ("1\t2\nx\t3\n", "1\t2\n3\n", "\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"heads\.tsv: must hold rows of one length, of numbers with tabs between"):
            load_gates(path)
