"""A model over a mesh of devices says what it says on one: tokens, logits, drawn tokens, streams and statistics."""

from __future__ import annotations

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
#: Every family, each with another number of query heads to a KV head.
FAMILIES = {
    "llama, attention with biases": {"o_bias": True, "mlp_bias": True, "qkv_bias": True, "group": 1},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "group": 7},
    "qwen3, tied": {"family": "qwen3", "qk_norm": True, "tie_embeddings": True, "group": 2},
    "llama 3": {
        "rope": RopeConfig(type="llama3", theta=10000.0, factor=8.0, original_max_positions=64),
        "group": 4,
    },
}


_answers: dict[str, tca_jax.Output] = {}


def _answer(lm: tca_jax.LM, prompts: list[list[int]], **options) -> tca_jax.Output:
    """What a model on one device says, for all meshes that it is compared with."""
    key = repr((lm.config, lm.method, prompts, options))
    if key not in _answers:
        _answers[key] = tca_jax.generate(lm, prompts, max_new_tokens=NEW_TOKENS, logprobs=True, **options)
    return _answers[key]


def check_same(one: tca_jax.LM, many: tca_jax.LM, prompts=PROMPTS, **options) -> None:
    expected = _answer(one, prompts, **options)
    out = tca_jax.generate(many, prompts, max_new_tokens=NEW_TOKENS, logprobs=True, **options)
    assert out.tokens == expected.tokens
    np.testing.assert_allclose(np.concatenate(out.logprobs), np.concatenate(expected.logprobs), atol=2e-4)
    assert out.stats.kept_share == pytest.approx(expected.stats.kept_share)


@pytest.mark.parametrize("shape", [(1, 2), (2, 4)], ids=str)
def test_tokens_are_those_of_one_device(shape):
    check_same(with_tca(lm_of()), with_tca(lm_of(mesh_of(shape))))


def test_tokens_of_full_attention_are_those_of_one_device():
    check_same(lm_of(), lm_of(mesh_of((1, 4))))


def test_small_chunks_say_what_one_device_says(monkeypatch):
    one = with_tca(lm_of())
    chunks_of(16, one, monkeypatch)  # 4 x 96 tokens: six steps of four chunks of 14 to 18
    many = with_tca(lm_of(mesh_of((1, 2)), name="in chunks"))
    assert many.on_device(many.params).decoder.layers[0].chunks == (14, 18, 15, 17)
    check_same(one, many)


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "qwen2")]
)
def test_every_family_runs_over_a_mesh(family):
    changes = FAMILIES[family]
    check_same(with_tca(lm_of(**changes)), with_tca(lm_of(mesh_of((1, 4)), **changes)))


@pytest.mark.parametrize(
    ("shape", "axes", "kind"),
    [
        ((2, 2), ("model", "data"), AxisType.Explicit),
        pytest.param((2, 2), ("model", "data"), AxisType.Auto, marks=pytest.mark.slow),
        pytest.param((4,), ("model",), AxisType.Explicit, marks=pytest.mark.slow),
        ((2,), ("data",), AxisType.Auto),
    ],
    ids=str,
)
def test_axes_of_any_order_and_type(shape, axes, kind):
    check_same(with_tca(lm_of()), with_tca(lm_of(mesh_of(shape, axes, kind))))


def test_the_callers_own_mesh_does_not_matter():
    lm = with_tca(lm_of(mesh_of((2, 2))))
    with jax.set_mesh(mesh_of((4,), ("x",), AxisType.Explicit)):
        out = tca_jax.generate(lm, PROMPTS, max_new_tokens=4)
    assert out.tokens == [tokens[:4] for tokens in _answer(with_tca(lm_of()), PROMPTS).tokens]


def test_drawn_tokens_are_those_of_one_device():
    options = {"temperature": 0.9, "top_p": 0.95, "num_samples": 2, "seed": 3, "repetition_penalty": 1.1}
    check_same(with_tca(lm_of()), with_tca(lm_of(mesh_of((2, 2)))), PROMPTS[:2], **options)


def test_rows_that_end_early_do_not_hold_up_others():
    one, many = lm_of(), lm_of(mesh_of((2, 2)))
    free = tca_jax.generate(one, PROMPTS, max_new_tokens=12)
    stops = [free.tokens[0][2]]  # the first row's device has ended when the others have not
    expected = tca_jax.generate(one, PROMPTS, max_new_tokens=12, stop_token_ids=stops)
    out = tca_jax.generate(many, PROMPTS, max_new_tokens=12, stop_token_ids=stops)
    assert out.tokens == expected.tokens
    assert out.finish_reasons == expected.finish_reasons
    assert "stop" in out.finish_reasons


def test_generate_tokens_runs_over_a_mesh_in_the_callers_jit():
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


def program_text(lm: tca_jax.LM) -> str:
    """Its compiled decoding step."""
    one = request_of(lm)
    state = one._started(results_of(one._prepare_start()[0]))
    place = request._decode._function.place
    args = place(lm, (state, one.shared, jnp.int32(9), one.sampling))
    step = jax.jit(request._decode._function, static_argnames=("backend",))
    return step.lower(lm, *args, backend=one.backend).compile().as_text()


def collectives(program: str, kind: str) -> list[str]:
    """Result types of a kind of collective operation, of both its forms."""
    return re.findall(rf"= (\S+) {kind}(?:-start)?\(", program)


def test_a_step_sums_twice_a_layer():
    sums, gathers = [], []
    for layers in (2, 4):
        changed = lm_of(mesh_of((1, 4)), num_layers=layers).with_method("streaming", sinks=0, window=16, block_size=8)
        text = program_text(changed)
        sums.append(len(collectives(text, "all-reduce")))
        gathers.append(len(collectives(text, "all-gather")))
    assert sums[1] - sums[0] == 2 * 2  # in one loop
    assert sums[0] == 2 * 2 + 2  # and one each for the tokens' embeddings and for the logits
    assert gathers == [0, 0]
    for kind in ("all-to-all", "collective-permute", "reduce-scatter"):
        assert not collectives(program_text(with_tca(lm_of(mesh_of((1, 4))))), kind)


def test_prefill_sums_twice_a_layer():
    sums = []
    for layers in (2, 4):
        lm = lm_of(mesh_of((1, 4)), num_layers=layers).with_method("streaming", sinks=0, window=16, block_size=8)
        text = request_of(lm)._prepare_start()[0]._executable.as_text()
        sums.append(len(collectives(text, "all-reduce")))
        assert len(collectives(text, "all-gather")) <= 1  # few embeddings are summed
        for kind in ("all-to-all", "collective-permute", "reduce-scatter"):
            assert not collectives(text, kind)
    assert sums[1] - sums[0] == 2 * 2


def test_no_empty_array_goes_into_a_program_of_a_mesh():
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


def test_one_device_runs_no_collectives():
    lm = lm_of()
    assert lm.head_shards is None
    assert not re.search("all-reduce|all-gather", program_text(lm))


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="model=8 devices, but tiny has 4 KV heads: 1, 2 or 4 fit"):
        lm_of(mesh_of((1, 8)))
    with pytest.raises(ValueError, match="inner width of 90: 1 or 2 fit"):
        lm_of(mesh_of((1, 4)), intermediate_size=90)
    with pytest.raises(ValueError, match="axes must be 'data' and 'model'"):
        lm_of(mesh_of((2, 2), ("x", "model")))


def test_a_batch_that_does_not_divide_is_refused():
    lm = lm_of(mesh_of((2, 2)))
    for prompts in (PROMPTS[:1], PROMPTS[:3]):
        with pytest.raises(
            ValueError, match=f"prompts are {len(prompts)}: must be a multiple of 2, the devices on 'da"
        ):
            tca_jax.generate(lm, prompts, max_new_tokens=4)
        with pytest.raises(ValueError, match="prompts are"):
            tca_jax.prefill(lm, prompts)
        with pytest.raises(ValueError, match="texts are"):
            tca_jax.score(lm, prompts)
    with pytest.raises(ValueError, match="rows of tokens are 1"):
        tca_jax.generate_tokens(lm, np.ones((1, 4), int), np.array([4]), jax.random.key(0), max_new_tokens=4)
