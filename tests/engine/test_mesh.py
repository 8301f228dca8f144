"""A model over a mesh of devices says what it says on one: tokens, logits, drawn tokens, streams and statistics."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import chunks_of, lm_of, mesh_of, needs_8_devices, with_tca
from tiny import random_prompt

import tca_jax
from tca_jax.engine import request
from tca_jax.engine.mesh import ROWS, SAME, OverMesh
from tca_jax.models.rope import RopeConfig
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
def expected(full, prompts, options, changes):
    """What a model on one device says, for all meshes that it is compared with."""
    lm = lm_of(**dict(changes))
    options = {"max_new_tokens": NEW_TOKENS, "logprobs": True, **dict(options)}
    return tca_jax.generate(lm if full else with_tca(lm), PROMPTS[:prompts], **options)


def check_same(many: tca_jax.LM, *, full=False, prompts=4, options=(), changes=()) -> None:
    one = expected(full, prompts, tuple(options), tuple(changes))
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
    program = jax.jit(OverMesh(echoed, (ROWS, SAME), (ROWS, SAME)))
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
