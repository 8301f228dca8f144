"""A model over a mesh of devices says what it says on one: tokens, contexts, scores, statistics, pools."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import abstract_mesh
from hlo import operations
from implementations import INTERPRET, implementation
from jax.sharding import AxisType, PartitionSpec
from meshes import ROWS, chunks_of, lm_of, mesh_of, needs_8_devices, with_tca
from tiny import random_prompt

import tca_jax
from tca_jax.engine import contexts, request
from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.mesh import SAME, OverMesh, balanced_orders, balanced_together
from tca_jax.engine.score import score_answers
from tca_jax.models.rope import RopeConfig
from tca_jax.models.sharding import DATA
from tca_jax.pallas_kernels import backends
from tca_jax.programs import results_of

pytestmark = needs_8_devices

PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((70, 23, 55, 90))]
NEW_TOKENS = 25  # with blocks of 8: each row's window is left by three of them


_answers: dict[str, tca_jax.Output] = {}


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
    chunks_of(16, lm_of(), monkeypatch)  # 4 x 96 tokens: six steps of four chunks of 14 to 18
    many = lm_of(mesh_of((1, 2)), name="in chunks")
    assert many.on_device(many.params).decoder.layers[0].chunks == (14, 18, 15, 17)
    check_same(many)


def test_rows_that_end_early_change_no_others():
    one, many = lm_of(), lm_of(mesh_of((2, 2)))
    free = tca_jax.generate(one, PROMPTS, max_new_tokens=12)
    stops = [free.tokens[0][2]]  # the first row's device has ended when the others have not
    expected = tca_jax.generate(one, PROMPTS, max_new_tokens=12, stop_token_ids=stops)
    out = tca_jax.generate(many, PROMPTS, max_new_tokens=12, stop_token_ids=stops)
    assert out.tokens == expected.tokens
    assert out.finish_reasons == expected.finish_reasons
    assert "stop" in out.finish_reasons


def test_generate_tokens_over_a_mesh_inside_jit():
    one, many = with_tca(lm_of()), with_tca(lm_of(mesh_of((2, 2))))
    tokens, lengths = np.array([random_prompt(0, 40), random_prompt(1, 40)]), np.array([40, 31])

    @jax.jit
    def answer(lm, tokens, lengths):
        return tca_jax.generate_tokens(lm, tokens, lengths, jax.random.key(0), max_new_tokens=20, stop_tokens=())

    np.testing.assert_array_equal(answer(many, tokens, lengths), answer(one, tokens, lengths))


def test_statistics_count_bytes_of_devices():
    one, many = (
        tca_jax.generate(with_tca(lm), PROMPTS, max_new_tokens=8).stats for lm in (lm_of(), lm_of(mesh_of((2, 2))))
    )
    assert (one.devices, many.devices) == (1, 4)
    assert many.kv_cache_bytes_per_device * 4 == many.kv_cache_bytes
    assert one.kv_cache_bytes_per_device == one.kv_cache_bytes <= many.kv_cache_bytes  # regions of the largest device
    assert many.kv_cache_bytes < 1.3 * one.kv_cache_bytes
    assert one.full_kv_cache_bytes <= many.full_kv_cache_bytes < 1.3 * one.full_kv_cache_bytes


def request_of(lm: tca_jax.LM) -> request.Request:
    """A batch that the mesh's devices share."""
    return request.Request.create(
        lm,
        PROMPTS,
        max_new_tokens=NEW_TOKENS,
        sampling=tca_jax.Sampling(),
        seed=0,
        stop=(),
        stop_token_ids=None,
        backend="auto",
    )


def program_text(lm: tca_jax.LM, program: str = "step") -> str:
    """Its compiled start, or decoding step."""
    one = request_of(lm)
    start = one._prepare_start()[0]
    if program == "start":
        return start._executable.as_text()
    args = request._decode._function.place(
        lm, (one._started(results_of(start)), one.shared, jnp.int32(9), one.sampling)
    )
    step = jax.jit(request._decode._function, static_argnames=("backend",))
    return step.lower(lm, *args, backend=one.backend).compile().as_text()


def collectives(program: str, kind: str) -> int:
    """How many there are of a kind of collective operation, in both its forms."""
    return len(re.findall(rf"= \S+ {kind}(?:-start)?\(", program))


@pytest.mark.parametrize(("program", "gathers"), [("step", 0), ("start", 1)])  # few embeddings are summed
def test_programs_sum_twice_a_layer(program, gathers):
    sums = []
    for layers in (2, 4):
        lm = lm_of(mesh_of((1, 4)), num_layers=layers).with_method("streaming", sinks=0, window=16, block_size=8)
        text = program_text(lm, program)
        sums.append(collectives(text, "all-reduce"))
        assert collectives(text, "all-gather") <= gathers
        assert not re.search("all-to-all|collective-permute|reduce-scatter", text)
    assert sums[1] - sums[0] == 2 * 2
    if program == "step":
        assert sums[0] == 2 * 2 + 2  # one each for the tokens' embeddings and for the logits
        assert not re.search("all-reduce|all-gather", program_text(lm_of()))
        assert not re.search("all-to-all|collective-permute", program_text(with_tca(lm_of(mesh_of((1, 4))))))


def test_empty_arrays_stay_out_of_mesh_programs():
    def echoed(lm: tca_jax.LM, tokens: jax.Array, stops: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tokens + jnp.isin(tokens, stops), stops + 1

    lm, tokens, stops = lm_of(mesh_of((2, 2))), jnp.arange(4), jnp.zeros(0, jnp.int32)
    program = jax.jit(OverMesh(echoed, (PartitionSpec(DATA), SAME), (PartitionSpec(DATA), SAME)))
    with jax.set_mesh(lm.mesh):
        text = program.lower(lm, tokens, stops).as_text()
        got, still_empty = program(lm, tokens, stops)
    inputs = re.search(r"manual_axes=.*?\((.*)\)", text)
    assert inputs is not None
    assert "tensor<2xi32>" in inputs[1]
    assert "tensor<0x" not in inputs[1]
    assert got.tolist() == [0, 1, 2, 3]
    assert still_empty.shape == (0,)


def test_meshes_that_do_not_fit_are_refused():
    lm = lm_of(mesh_of((2, 2)))
    for call, message in (
        (lambda: lm_of(mesh_of((1, 8))), "model=8 devices, but tiny has 4 KV heads: 1, 2 or 4 fit"),
        (lambda: lm_of(mesh_of((1, 4)), intermediate_size=90), "inner width of 90: 1 or 2 fit"),
        (lambda: lm_of(mesh_of((2, 2), ("x", "model"))), "axes must be 'data' and 'model'"),
        (lambda: tca_jax.generate(lm, PROMPTS[:3]), "prompts are 3: must be a multiple of 2, the devices on 'data'"),
        (lambda: tca_jax.prefill(lm, PROMPTS[:1]), "prompts are 1"),
        (lambda: tca_jax.score(lm, PROMPTS[:1]), "texts are 1"),
        (
            lambda: tca_jax.generate_tokens(
                lm, np.ones((1, 4), int), np.array([4]), jax.random.key(0), max_new_tokens=4
            ),
            "rows of tokens are 1",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


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


def test_contexts_grow_as_on_one_device():
    answers = []
    for lm in (sparse_on(), sparse_on((1, 2))):
        context = tca_jax.prefill(lm, DOCUMENTS[0])
        for part in (random_prompt(4, 30), random_prompt(5, 50)):
            context = tca_jax.prefill(lm, part, context=context)
        answers.append(ask(lm, context))
    assert answers[0] == answers[1]


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


FOUR = 4
#: One dense head of four in each layer, always the same.
DENSE = ((0, 14, 2, 1),) * FOUR
LONG = [random_prompt(0, 330), random_prompt(1, 289)]


def dense_on(mesh=None) -> tca_jax.LM:
    return with_tca(lm_of(mesh, num_layers=FOUR, rows=DENSE), DENSE)


@pytest.fixture(scope="module")
def shared() -> tca_jax.Context:
    """The same on four devices."""
    return tca_jax.prefill(dense_on(mesh_of((1, 4))), LONG)


def test_devices_hold_about_as_much():
    loads = np.tile([1000, 50, 40, 30, 20, 900, 10, 60], (6, 1))
    orders = balanced_together(loads, 4)
    assert all(sorted(order) == list(range(8)) for order in orders)
    by_device = np.take_along_axis(loads, np.asarray(orders), axis=1).reshape(6, 4, 2)
    totals = by_device.sum(axis=(0, 2))
    assert totals.max() <= 1.02 * totals.mean()
    assert by_device.sum(axis=2).max() == 1010  # the two largest of a layer are never on one device
    assert (np.diff(by_device, axis=2) <= 0).all()  # the largest of a device first


def test_balanced_heads_are_not_moved():
    policy = dense_on().method.cache
    own = (tuple(range(4)),) * FOUR
    dealt = balanced_orders(policy, FOUR, 4, 4, 4096)
    assert sorted(order.index(1) for order in dealt) == [0, 1, 2, 3]  # each device has the dense head of one layer
    uniform = tca_jax.methods.get("tca", candidates=3, config=policy.config).cache
    assert balanced_orders(uniform, FOUR, 4, 4, 4096) == own


def test_pages_of_each_device_are_named_once():
    pages = (((4, 1), (2, 0)), ((0, 1), (7, 2)), ((3, 1), (0, 0)))  # [layers][devices][Hkv]
    layout = CacheLayout(8, 16, 3, pages, 5, 100)
    for device, kept in enumerate((10, 11)):
        named = np.concatenate([np.asarray(table).ravel() for table in layout.tables(device)])
        named = np.unique(named[named < layout.num_pages])
        assert len(named) == 3 * (3 * 2 * 3 + kept)
        assert named.max() < layout.num_pages == 3 * (18 + 11)
    assert layout.kept_columns == (4, 7, 3)


def test_devices_allocate_what_statistics_say(shared):
    held = dict.fromkeys(jax.devices()[:4], 0)
    for shard in (*shared.cache.k.addressable_shards, *shared.cache.v.addressable_shards):
        held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {shared.stats.kv_cache_bytes_per_device}
    one = tca_jax.prefill(dense_on(), LONG).stats.kv_cache_bytes
    assert one <= shared.stats.kv_cache_bytes <= 1.1 * one


def test_no_program_over_a_context_copies_the_pool(shared):
    lm = dense_on(mesh_of((1, 4)))
    options = {"max_new_tokens": 20, "seed": 0, "stop": (), "stop_token_ids": (), "backend": "auto"}
    asked = request.Request.create(lm, [[1] * 9, [2] * 14], shared, sampling=tca_jax.Sampling(), **options)
    program, _ = asked._prepare_start()
    state = asked._started(results_of(program))
    step = asked.prepare_step(state)
    shape = shared.cache.k.shape[2:]
    for executable in (program, step):
        text = executable._executable.as_text()
        found = operations(text, {shape, (1, 1, *shape)})
        assert "parameter" in found
        assert found <= {"parameter", "get-tuple-element", "bitcast"}


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


@pytest.mark.slow
@pytest.mark.parametrize("dress", [lambda lm: lm, with_blocks], ids=["full", "tca"])
def test_kernels_over_a_mesh_answer_as_xla(dress, triton_on_this_machine):
    options = {"max_new_tokens": 3, "stop_token_ids": ()}
    expected = tca_jax.generate(dress(lm_of()), TWO, **options, backend="xla")
    out = tca_jax.generate(dress(lm_of(mesh_of((2, 2)))), TWO, **options, backend="triton")
    assert out.tokens == expected.tokens


def test_kernels_append_to_a_context_over_a_mesh(triton_on_this_machine):
    answers = []
    for lm, backend in ((with_blocks(lm_of()), "xla"), (with_blocks(lm_of(mesh_of((1, 2)))), "triton")):
        context = tca_jax.prefill(lm, TWO[0], backend=backend)
        out = tca_jax.generate(lm, TWO[1], context=context, max_new_tokens=3, stop_token_ids=(), backend=backend)
        answers.append(out.tokens)
    assert answers[0] == answers[1]


OF_THE_MESH = pytest.mark.skipif(
    jax.__version_info__ >= (0, 12),
    reason="under shard_map, JAX 0.12 lowers Pallas-Triton for the mesh's devices: a CPU's",
)


@pytest.mark.skipif(not INTERPRET, reason="lowers on a host without a GPU")
@pytest.mark.parametrize(
    ("backend", "method", "call"),
    [
        pytest.param("triton", "tca", "__gpu$xla.gpu.triton", marks=OF_THE_MESH),
        pytest.param("triton", "kvzip", "__gpu$xla.gpu.triton", marks=[OF_THE_MESH, pytest.mark.slow]),
        ("mosaic", "tca", "mosaic_gpu"),
        ("cudnn", "full", "__cudnn"),
    ],
)
def test_a_prefill_over_a_mesh_lowers_for_gpus(backend, method, call, monkeypatch):
    monkeypatch.setattr(backends, "_lacks", lambda name: None if name in (backend, "xla") else "nothing")
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    jax.clear_caches()  # a trace knows the backends that were there
    lm = lm_of(mesh_of((2, 4)), head_dim=128, dtype=jnp.bfloat16)
    options = {"tca": {"candidates": ROWS, "config": tca_jax.TCAConfig(window=128)}}
    lm = lm.with_method(method, **options.get(method, {}))
    args = lm, jnp.ones((2, 1024), jnp.int32), jnp.array([1024, 700])
    program = jax.jit(contexts._read._function, static_argnames=("layout", "backend"))
    static = {"layout": lm.cache_layout(1, 1024), "backend": (backend, "auto")}
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        text = program.trace(*args, **static).lower(lowering_platforms=("cuda",)).as_text()
    assert f"custom_call @{call}" in text
