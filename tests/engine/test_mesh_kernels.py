"""The Triton and Mosaic kernels in programs over a mesh: interpreted, and lowered for GPUs on a host without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from cuda_lowering import abstract_mesh
from implementations import INTERPRET, implementation
from meshes import ROWS, lm_of, mesh_of, needs_8_devices
from tiny import random_prompt

import tca_jax
from tca_jax.engine import contexts
from tca_jax.pallas_kernels import backends

pytestmark = needs_8_devices

PROMPTS = [random_prompt(0, 100), random_prompt(1, 61)]
CONFIG = tca_jax.TCAConfig(block_size=16, window=32)  # the least blocks that the kernels take


def with_blocks(lm: tca_jax.LM) -> tca_jax.LM:
    return lm.with_method("tca", candidates=ROWS, config=CONFIG)


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
    expected = tca_jax.generate(dress(lm_of()), PROMPTS, **options, backend="xla")
    out = tca_jax.generate(dress(lm_of(mesh_of((2, 2)))), PROMPTS, **options, backend="triton")
    assert out.tokens == expected.tokens


def test_kernels_append_to_a_context_over_a_mesh(triton_on_this_machine):
    answers = []
    for lm, backend in ((with_blocks(lm_of()), "xla"), (with_blocks(lm_of(mesh_of((1, 2)))), "triton")):
        context = tca_jax.prefill(lm, PROMPTS[0], backend=backend)
        out = tca_jax.generate(lm, PROMPTS[1], context=context, max_new_tokens=3, stop_token_ids=(), backend=backend)
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
