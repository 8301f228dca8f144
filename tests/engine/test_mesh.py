"""A model over a mesh of devices says what it says on one: tokens, contexts, scores, statistics, pools."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from implementations import INTERPRET, implementation
from jax.sharding import AxisType
from meshes import ROWS, chunks_of, lm_of, mesh_of, needs_8_devices, with_tca
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax.engine.read import begin_program
from tca_jax.engine.score import score_answers
from tca_jax.models.rope import RopeConfig
from tca_jax.pallas_kernels import backends

pytestmark = needs_8_devices

PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((70, 23, 55, 90))]
NEW_TOKENS = 25  # with blocks of 8: each row's window is left by three of them


SLOW = pytest.mark.slow
DRAWN = {"temperature": 0.9, "top_p": 0.95, "num_samples": 2, "seed": 3, "repetition_penalty": 1.1}
ROPE = RopeConfig(type="llama3", theta=10000.0, factor=8.0, original_max_positions=64)
REVERSED = {"axes": ("model", "data")}


@functools.cache
def of_one(full, prompts, options, changes):
    """What a model on one device says, for all meshes that it is compared with."""
    lm = lm_of(**dict(changes))
    options = {"max_new_tokens": NEW_TOKENS, "logprobs": True, **dict(options)}
    return tca_jax.generate(lm if full else with_tca(lm), PROMPTS[:prompts], **options)


def check_same(many: tca_jax.LM, *, full=False, prompts=4, options=(), changes=()) -> None:
    one = of_one(full, prompts, tuple(options), tuple(changes))
    many = many if full else with_tca(many)
    out = tca_jax.generate(many, PROMPTS[:prompts], max_new_tokens=NEW_TOKENS, logprobs=True, **dict(options))
    assert out.tokens == one.tokens
    np.testing.assert_allclose(np.concatenate(out.logprobs), np.concatenate(one.logprobs), atol=2e-4)
    assert out.stats.kept_share == pytest.approx(one.stats.kept_share)


@pytest.mark.parametrize(
    ("mesh", "changes", "case"),
    [
        ({"shape": (1, 2)}, {}, {}),
        ({"shape": (2, 4)}, {}, {}),
        ({"shape": (1, 4)}, {}, {"full": True}),
        ({"shape": (2, 2)}, {}, {"prompts": 2, "options": tuple(DRAWN.items())}),
        # axes of any order and type
        ({"shape": (2, 2), "kind": AxisType.Explicit, **REVERSED}, {}, {}),
        pytest.param({"shape": (2, 2), **REVERSED}, {}, {}, marks=SLOW),
        pytest.param({"shape": (4,), "axes": ("model",), "kind": AxisType.Explicit}, {}, {}, marks=SLOW),
        ({"shape": (2,), "axes": ("data",)}, {}, {}),
        # every family, each with another number of query heads to a KV head
        ({"shape": (1, 4)}, {"family": "qwen2", "qkv_bias": True, "group": 7}, {}),
        pytest.param(
            {"shape": (1, 4)}, {"o_bias": True, "mlp_bias": True, "qkv_bias": True, "group": 1}, {}, marks=SLOW
        ),
        pytest.param({"shape": (1, 4)}, {"family": "qwen3", "qk_norm": True, "tie_embeddings": True}, {}, marks=SLOW),
        pytest.param({"shape": (1, 4)}, {"rope": ROPE, "group": 4}, {}, marks=SLOW),
    ],
)
def test_answers_are_those_of_one_device(mesh, changes, case):
    check_same(lm_of(mesh_of(**mesh), **changes), changes=tuple(changes.items()), **case)


def test_small_chunks_say_what_one_device_says(monkeypatch):
    chunks_of(16, lm_of(), monkeypatch)  # of 14 to 18 tokens, four of them in a program
    many = lm_of(mesh_of((1, 2)), name="in chunks")
    assert many.on_device(many.params).decoder.layers[0].chunks == (14, 18, 15, 17)
    check_same(many)


def test_generate_tokens_over_a_mesh_inside_jit():
    one, many = with_tca(lm_of()), with_tca(lm_of(mesh_of((2, 2))))
    tokens, lengths = np.array([random_prompt(0, 40), random_prompt(1, 40)]), np.array([40, 31])

    @jax.jit
    def answer(lm, tokens, lengths):
        return tca_jax.generate_tokens(lm, tokens, lengths, jax.random.key(0), max_new_tokens=20, stop_tokens=())

    np.testing.assert_array_equal(answer(many, tokens, lengths), answer(one, tokens, lengths))
    for call, argument in ((tca_jax.generate, "prompts"), (tca_jax.score, "texts")):
        with pytest.raises(ValueError, match=f"{argument} are 3: must be a multiple of 2, the devices on 'data'"):
            call(many, PROMPTS[:3])


DOCUMENTS = [random_prompt(0, 61), random_prompt(1, 44)]
QUESTIONS = [random_prompt(2, 9), random_prompt(3, 14)]


def sparse_on(shape=None) -> tca_jax.LM:
    return with_tca(lm_of(None if shape is None else mesh_of(shape)))


def ask(lm: tca_jax.LM, context: tca_jax.Context) -> list[list[int]]:
    return tca_jax.generate(lm, QUESTIONS, context=context, max_new_tokens=20, stop_token_ids=()).tokens


@pytest.fixture(scope="module")
def read() -> tca_jax.Context:
    return tca_jax.prefill(sparse_on(), DOCUMENTS)


@pytest.fixture(scope="module")
def expected(read) -> list[list[int]]:
    return ask(sparse_on(), read)


def test_a_saved_context_returns_to_its_mesh_alone(tmp_path, read, expected):
    lm = sparse_on((2, 2))
    context = tca_jax.prefill(lm, DOCUMENTS)
    assert ask(lm, context) == expected
    assert context.stats.devices == 4
    assert context.stats.kept_share == pytest.approx(read.stats.kept_share)
    context.save(tmp_path)
    loaded = tca_jax.Context.load(tmp_path)
    assert ask(lm, loaded) == expected
    there = loaded.on(lm)
    assert there.on(lm) is there
    assert ask(lm, there.to_host()) == expected
    moved = with_tca(lm_of(mesh_of((2, 2)), rows=((14, 0, 0, 14), (14, 0, 14, 0))))
    assert moved.head_orders != lm.head_orders
    for other, context in ((sparse_on(), loaded), (sparse_on((1, 2)), loaded), (moved, loaded), (lm, read)):
        with pytest.raises(ValueError, match=r"context was made on .x., and 'tiny' is on .x. devices on 'data' x 'mod"):
            ask(other, context)


def test_scores_are_those_of_one_device():
    answers = [[random_prompt(6, 5), random_prompt(7, 12)], [random_prompt(8, 3), random_prompt(9, 1)]]
    lms = sparse_on(), sparse_on((2, 2))
    one, many = (np.concatenate(tca_jax.score(lm, DOCUMENTS).logprobs) for lm in lms)
    np.testing.assert_allclose(many, one, atol=2e-4)
    one, many = (score_answers(lm, DOCUMENTS, answers) for lm in lms)
    for i, j in np.ndindex(2, 2):
        np.testing.assert_allclose(many.logprobs[i][j], one.logprobs[i][j], atol=2e-4)
    assert many.greedy == one.greedy


def test_arrays_on_other_devices_move_to_the_mesh():
    lm, tokens, lengths = lm_of(mesh_of((1, 2))).for_programs, np.arange(9)[None], np.full(1, 9)
    given = tokens, jax.device_put(tokens, jax.devices()[5])
    x, moved = (begin_program.run(lm.without_layers, each, lengths, sizes=None)[0] for each in given)
    assert moved.sharding == x.sharding
    np.testing.assert_array_equal(moved, x)


FOUR = 4
#: One dense head of four in each layer, always the same.
DENSE = ((0, 14, 2, 1),) * FOUR
LONG = [random_prompt(0, 330), random_prompt(1, 289)]


def dense_on(mesh=None) -> tca_jax.LM:
    return with_tca(lm_of(mesh, num_layers=FOUR, rows=DENSE), DENSE)


def test_programs_are_those_of_the_default_device():
    first, other = jax.devices()[:2]
    with jax.default_device(other):
        tca_jax.prefill(tiny_lm(), PROMPTS[0])
    lm = tiny_lm()
    assert tca_jax.prefill(lm, PROMPTS[0]).rows.k.devices() == {first}
    with pytest.raises(ValueError, match=r"weights lie on .* and JAX's default device is .*: load with mesh="):
        tca_jax.prefill(dataclasses.replace(lm, params=jax.device_put(lm.params, other)), PROMPTS[0])


def test_devices_allocate_what_statistics_say():
    shared = tca_jax.prefill(dense_on(mesh_of((1, 4))), LONG)
    held = dict.fromkeys(jax.devices()[:4], 0)
    for shard in (*shared.rows.k.addressable_shards, *shared.rows.v.addressable_shards):
        held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {shared.num_bytes // 4}
    assert 0.8 * shared.num_bytes < shared.stats.kv_cache_bytes <= shared.num_bytes
    one = tca_jax.prefill(dense_on(), LONG).stats.kv_cache_bytes
    assert one <= shared.stats.kv_cache_bytes <= 1.1 * one


TWO = [random_prompt(0, 100), random_prompt(1, 61)]
BLOCKS = tca_jax.TCAConfig(block_size=16, window=32)  # the least blocks that the kernels take


def with_blocks(lm: tca_jax.LM) -> tca_jax.LM:
    return lm.with_method("tca", candidates=ROWS, config=BLOCKS)


@pytest.fixture
def triton_on_this_machine(monkeypatch):
    """Every operation's Triton kernels run, interpreted where there is no GPU."""
    if INTERPRET:
        monkeypatch.setattr(backends, "_lacks", lambda backend: None if backend in ("triton", "xla") else "nothing")
        monkeypatch.setattr(backends, "_load", lambda operation, name: implementation(operation, name))


def test_kernels_append_to_a_context_over_a_mesh(triton_on_this_machine):
    answers = []
    for lm, backend in ((with_blocks(lm_of()), "xla"), (with_blocks(lm_of(mesh_of((1, 2)))), "triton")):
        context = tca_jax.prefill(lm, TWO[0], backend=backend)
        out = tca_jax.generate(lm, TWO[1], context=context, max_new_tokens=3, stop_token_ids=(), backend=backend)
        answers.append(out.tokens)
    assert answers[0] == answers[1]
