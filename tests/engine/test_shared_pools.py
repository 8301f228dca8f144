"""One pool for all layers on each device of a mesh: as large as it must be, and answers as on one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import operations
from implementations import INTERPRET, implementation
from jax.sharding import PartitionSpec
from meshes import lm_of, mesh_of, needs_8_devices, with_tca
from tiny import random_prompt

import tca_jax
from tca_jax.engine import request
from tca_jax.engine.answers import score_answers
from tca_jax.engine.layouts import total_bytes
from tca_jax.engine.mesh_pools import SharedPool, apart, balanced_orders, balanced_together, plan_shared_pools, together
from tca_jax.lab.benchmarks.common import free_bytes
from tca_jax.lab.evaluation import text_tasks
from tca_jax.methods.regions import Regions
from tca_jax.pallas_kernels import backends
from tca_jax.pallas_kernels.kv import Pool

LAYERS = 4
#: One dense head of four in each layer, always the same.
DENSE = [[0, 14, 2, 1]] * LAYERS
DOCUMENTS = [random_prompt(0, 330), random_prompt(1, 289)]
QUESTIONS = [random_prompt(2, 9), random_prompt(3, 14)]
SHAPES = {"1x4": (1, 4), "2x2": (2, 2)}
OPTIONS = {"max_new_tokens": 20, "stop_token_ids": ()}


def dressed(shape: tuple[int, int] | None = None, layers: int = LAYERS) -> tca_jax.LM:
    return with_tca(lm_of(None if shape is None else mesh_of(shape), num_layers=layers), DENSE[:layers])


def pair() -> tuple[tca_jax.LM, tca_jax.LM]:
    """A shallower model on one device and on four."""
    return dressed(None, 2), dressed((1, 4), 2)


def ask(lm: tca_jax.LM, context: tca_jax.Context, **options) -> list[list[int]]:
    return tca_jax.generate(lm, QUESTIONS, context=context, **OPTIONS, **options).tokens


def shares(context: tca_jax.Context) -> bool:
    """Whether the layers of a context share a pool."""
    return all(layout.shared is not None for layout in context.layouts)


def held_by_devices(arrays) -> set[int]:
    """Bytes of arrays on each device that has any."""
    held: dict[jax.Device, int] = {}
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return set(held.values())


def keys_and_values(context: tca_jax.Context) -> list[jax.Array]:
    return jax.tree.leaves([(cache.pool.k, cache.pool.v, *cache.ring) for cache in context.caches])


@pytest.fixture(scope="module")
def read() -> tca_jax.Context:
    """The documents on one device."""
    return tca_jax.prefill(dressed(), DOCUMENTS)


@pytest.fixture(scope="module")
def shared() -> tca_jax.Context:
    """The same on four devices."""
    context = tca_jax.prefill(dressed((1, 4)), DOCUMENTS)
    assert shares(context)
    return context


@pytest.fixture(scope="module")
def expected(read) -> list[list[int]]:
    return ask(dressed(), read)


def test_heads_of_all_layers_are_dealt_so_that_devices_hold_as_much():
    loads = np.tile([1000, 50, 40, 30, 20, 900, 10, 60], (6, 1))
    orders = balanced_together(loads, 4)
    assert all(sorted(order) == list(range(8)) for order in orders)
    by_device = np.take_along_axis(loads, np.asarray(orders), axis=1).reshape(6, 4, 2)
    totals = by_device.sum(axis=(0, 2))
    assert totals.max() <= 1.02 * totals.mean()
    assert by_device.sum(axis=2).max() == 1010  # the two largest of a layer are never on one device
    assert (np.diff(by_device, axis=2) <= 0).all()  # the largest of a device first
    assert apart(by_device) > 1.5 * together(by_device)


def test_heads_stay_where_they_are_while_no_other_place_is_better():
    policy = with_tca(lm_of(num_layers=LAYERS), DENSE).method.cache
    own = (tuple(range(4)),) * LAYERS
    dealt = balanced_orders(policy, LAYERS, 4, 4, 4096, None)
    assert sorted(order.index(1) for order in dealt) == [0, 1, 2, 3]  # each device has the dense head of one layer
    assert balanced_orders(policy, LAYERS, 4, 4, 4096, dealt) == dealt
    uniform = tca_jax.methods.get("tca", candidates=3, config=policy.config).cache
    assert balanced_orders(uniform, LAYERS, 4, 4, 4096, dealt) == dealt
    assert balanced_orders(uniform, LAYERS, 4, 4, 4096, None) == own


def test_regions_of_all_layers_lie_side_by_side_on_each_device():
    capacities = np.array([[[700, 100], [300, 0]], [[1, 128], [900, 129]], [[400, 10], [0, 0]]])
    planned = plan_shared_pools(capacities, 3)
    assert planned is not None
    for device in range(2):
        starts = np.concatenate([shared.offsets[device].ravel() for shared in planned])
        sizes = np.concatenate([np.tile(shared.capacities[device], 3) for shared in planned])
        np.testing.assert_array_equal(starts[1:], (starts + sizes)[:-1])
        assert starts[-1] + sizes[-1] <= planned[0].tokens
    assert planned[0].tokens == 3 * max(768 + 128 + 128 + 128 + 512 + 128, 384 + 1024 + 256)
    assert [shared.first for shared in planned] == [True, False, False]
    for shared, of_layer in zip(planned, capacities, strict=True):
        assert (np.asarray(shared.capacities) >= of_layer).all()
        assert not np.asarray(shared.capacities).any(where=of_layer == 0)


@pytest.mark.parametrize(
    "capacities",
    [np.full((3, 2, 2), 640), np.array([[[640, 128], [640, 0]]] * 9), np.array([[[640, 128], [512, 640]]])],
    ids=["all alike", "nearly alike", "one layer that balances"],
)
def test_layers_have_pools_of_their_own_where_these_balance(capacities):
    pays = apart(capacities) > 1.05 * together(capacities)
    assert (plan_shared_pools(capacities, 1) is not None) == pays
    assert pays == (len(capacities) == 1)


def test_a_pool_that_int32_cannot_address_is_none():
    capacities = np.array([[[2**20], [0]], [[0], [2**20]]])
    assert plan_shared_pools(capacities, 2**9) is not None
    assert plan_shared_pools(capacities, 2**10) is None


@needs_8_devices
def test_what_passes_a_region_does_not_reach_the_next():
    capacities = np.array([[[256], [128]], [[128], [256]]])
    planned, mesh = plan_shared_pools(capacities, 1), mesh_of((1, 2))
    assert planned is not None
    own = Regions.plan(1, (256,))
    rows = jnp.arange(1, 257, dtype=jnp.float32)[:, None] * jnp.ones(16)

    def write() -> tuple[jax.Array, jax.Array]:
        kept, pool = Pool(rows, -rows, jnp.zeros((1, 1), jnp.int32), jnp.array([[200]])), None
        for shared in planned:
            pool = shared.write(own, kept, pool)
            kept = kept._replace(k=kept.k + 1000, v=kept.v - 1000)
        return pool.k[None, :, 0], pool.lengths[None]

    specs = PartitionSpec("model"), PartitionSpec("model")
    k, lengths = jax.shard_map(write, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False)()
    first, second = np.arange(1, 201), np.arange(1001, 1201)
    np.testing.assert_array_equal(k[0], [*first, *np.zeros(56), *second[:128]])
    np.testing.assert_array_equal(k[1], [*first[:128], *second, *np.zeros(56)])
    assert lengths.ravel().tolist() == [128, 200]  # of the last layer


big = pytest.mark.skipif(
    jax.default_backend() != "gpu" or free_bytes() < 20e9, reason="needs a GPU with 20 GB of free memory"
)


@pytest.mark.parametrize("tokens", [2**12, pytest.param(2**25, marks=big, id="past int32")])
def test_tokens_go_where_they_belong_at_the_end_of_a_pool(tokens):
    shared = SharedPool(tokens, 1, (0,), ((tokens,),), first=True)
    own = jax.random.normal(jax.random.key(0), (1000, 128), jnp.bfloat16)
    places = tokens - 1000 + jnp.arange(1000, dtype=jnp.int32)
    pool = jax.jit(lambda own, places: shared._put(None, own, places))(own, places)
    np.testing.assert_array_equal(pool[tokens - 1000 :], own)
    assert not jnp.any(pool[: tokens - 1000])


@needs_8_devices
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tokens_and_logprobs_are_those_of_one_device(shape):
    one, many = (tca_jax.generate(lm, DOCUMENTS, **OPTIONS, logprobs=True) for lm in (dressed(), dressed(shape)))
    layouts = dressed(shape).cache_layouts(2, 384, 32)
    assert all(layout.shared is not None for layout in layouts)
    assert many.tokens == one.tokens
    np.testing.assert_allclose(np.concatenate(many.logprobs), np.concatenate(one.logprobs), atol=2e-4)
    assert many.stats.kept_share == pytest.approx(one.stats.kept_share)
    apart_bytes = 4 * sum(layout.num_bytes(16, jnp.float32) for layout in map(_with_own_pool, layouts))
    assert many.stats.kv_cache_bytes < 0.8 * apart_bytes


def _with_own_pool(layout):
    return dataclasses.replace(layout, shared=None)


@needs_8_devices
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_answers_from_a_context_are_those_of_one_device(shape, read, expected):
    lm = dressed(shape)
    context = tca_jax.prefill(lm, DOCUMENTS)
    assert shares(context)
    assert ask(lm, context) == expected
    assert context.stats.kept_share == pytest.approx(read.stats.kept_share)


@needs_8_devices
def test_samples_share_a_context_of_one_row():
    options = {"temperature": 0.8, "num_samples": 2, "seed": 5}
    one, many = (ask(lm, tca_jax.prefill(lm, DOCUMENTS[0]), **options) for lm in pair())
    assert many == one


@needs_8_devices
def test_every_device_allocates_what_statistics_say(shared):
    assert held_by_devices(keys_and_values(shared)) == {shared.stats.kv_cache_bytes_per_device}
    one = tca_jax.prefill(dressed(), DOCUMENTS).stats.kv_cache_bytes
    assert one <= shared.stats.kv_cache_bytes <= 1.1 * one


@needs_8_devices
def test_every_device_allocates_what_statistics_of_an_answer_say():
    lm = dressed((1, 4))
    asked = request.Request.create(
        lm, DOCUMENTS, sampling=tca_jax.Sampling(), seed=0, stop=(), backend="auto", **OPTIONS
    )
    state = asked.start()
    parts = [(cache.growth and (cache.growth.k, cache.growth.v), cache.ring) for cache in state.caches]
    pools = [(pool.k, pool.v) for pool in asked._pools]
    assert held_by_devices((parts, pools)) == {asked.kv_cache_bytes(lm)}
    assert asked.kv_cache_bytes(lm) == total_bytes(asked.layouts(lm), 16, jnp.float32)


@needs_8_devices
def test_a_context_grows_as_on_one_device_in_one_pool():
    parts = random_prompt(4, 30), random_prompt(5, 150)
    answers = []
    for lm in pair():
        context = tca_jax.prefill(lm, DOCUMENTS[0])
        for part in parts:
            context = tca_jax.prefill(lm, part, context=context)
        answers.append(ask(lm, context))
    assert answers[0] == answers[1]
    assert shares(context)
    assert held_by_devices(keys_and_values(context)) == {context.stats.kv_cache_bytes_per_device}


@needs_8_devices
def test_a_context_goes_to_disk_to_other_meshes_and_to_one_device(tmp_path, shared, read, expected):
    shared.save(tmp_path)
    loaded = tca_jax.Context.load(tmp_path)
    assert loaded.layouts == read.layouts
    for before, after in zip(read.caches, loaded.caches, strict=True):
        for mine, theirs in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4)
    assert ask(dressed(), loaded) == expected
    back = loaded.on(dressed((1, 4)))
    assert back.layouts == shared.layouts
    for before, after in zip(jax.tree.leaves(shared.caches), jax.tree.leaves(back.caches), strict=True):
        np.testing.assert_array_equal(before, after)
        assert before.sharding.is_equivalent_to(after.sharding, before.ndim)
    elsewhere = back.on(dressed((2, 2)))
    assert shares(elsewhere)
    assert ask(dressed((2, 2)), elsewhere) == expected


@needs_8_devices
def test_another_method_leaves_the_shared_pool_and_comes_back():
    lm = dressed((1, 4))
    full = lm.with_method(tca_jax.methods.BASELINE)
    assert full.head_orders == lm.head_orders
    assert not any(layout.shared for layout in full.cache_layouts(1, 384, 32))
    assert with_tca(full, DENSE).head_orders == lm.head_orders
    crowded = [[14 if head == order[0] else 1 for head in range(4)] for order in lm.head_orders]
    assert with_tca(lm, crowded).head_orders != lm.head_orders  # the first device had all that is dense
    one = tca_jax.generate(lm_of(num_layers=LAYERS), DOCUMENTS[0], **OPTIONS)
    assert tca_jax.generate(full, DOCUMENTS[0], **OPTIONS).tokens == one.tokens


@needs_8_devices
def test_scores_of_answers_are_those_of_one_device():
    answers, documents = [[random_prompt(6, 5), random_prompt(7, 12)]], DOCUMENTS[:1]
    one, many = (score_answers(lm, documents, answers) for lm in pair())
    for mine, theirs in zip(many.logprobs[0], one.logprobs[0], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-4)


@needs_8_devices
def test_distributions_behind_a_passage_are_those_of_one_device():
    logits = []
    for lm in pair():
        logits.append(text_tasks._continue(lm, [DOCUMENTS[0]])[0])
    np.testing.assert_allclose(logits[1], logits[0], atol=5e-4)


@needs_8_devices
def test_generate_tokens_runs_in_the_callers_jit():
    tokens, lengths = np.array([DOCUMENTS[0], DOCUMENTS[0][::-1]]), np.array([330, 297])

    @jax.jit
    def answer(lm, tokens, lengths):
        return tca_jax.generate_tokens(lm, tokens, lengths, jax.random.key(0), max_new_tokens=12, stop_tokens=())

    np.testing.assert_array_equal(*(answer(lm, tokens, lengths) for lm in pair()))


@needs_8_devices
def test_no_program_over_a_context_copies_the_pool(shared):
    lm = dressed((1, 4))
    asked = request.Request.create(
        lm, QUESTIONS, shared, sampling=tca_jax.Sampling(), seed=0, stop=(), backend="auto", **OPTIONS
    )
    program, _ = asked._prepare_start()
    state = asked._split(request.results_of(program))
    step = asked._prepare_step(state, jnp.int32(9))
    shape = (shared.layouts[0].shared.tokens, 16)
    for executable in (program, step):
        text = executable._executable.as_text()
        found = operations(text, {shape, (1, 1, *shape)})
        assert "parameter" in found
        assert found <= {"parameter", "get-tuple-element", "bitcast"}


@needs_8_devices
def test_kernels_read_the_shared_pool(monkeypatch):
    if INTERPRET:
        monkeypatch.setattr(backends, "_lacks", lambda backend: None if backend in ("triton", "xla") else "nothing")
        monkeypatch.setattr(backends, "_load", lambda operation, name: implementation(operation, name))
    config = tca_jax.TCAConfig(block_size=16, window=32)  # the least blocks that the kernels take
    answers = []
    for shape, backend in ((None, "xla"), ((1, 4), "triton")):
        mesh = None if shape is None else mesh_of(shape)
        lm = lm_of(mesh).with_method("tca", candidates=DENSE[:2], config=config)
        context = tca_jax.prefill(lm, DOCUMENTS[0], backend=backend)
        assert shares(context) == (shape is not None)
        out = tca_jax.generate(lm, QUESTIONS[0], context=context, max_new_tokens=3, stop_token_ids=(), backend=backend)
        answers.append(out.tokens)
    assert answers[0] == answers[1]
