"""The shipped model over several GPUs of this machine, with the real kernels: tokens and logits are those of one."""

import functools
import math

import jax
import numpy as np
import pytest
from meshes import mesh_of

import tca_jax
from tca_jax import programs
from tca_jax.lab.recall.documents import draw_documents
from tca_jax.lab.recall.tasks import completion
from tca_jax.serve import Engine

devices = jax.device_count() if jax.default_backend() == "gpu" else 1
pytestmark = pytest.mark.skipif(devices == 1, reason="needs several GPUs; meshes of CPUs run in test_mesh.py")
SHAPES = [(1, 2), (2, 1), (1, 4), (2, 2)]


@functools.cache
def answers(method, mesh):
    """Of ragged prompts, longer than those that are read in full."""
    documents = draw_documents((0, 2), 4, 6000, "digits")
    texts = [completion(document.text, document.questions[0]) for document in documents]
    prompts = [text[cut:] for text, cut in zip(texts, (0, 1000, 0, 300), strict=True)]
    lm = tca_jax.load("recall-tiny", profile=method and "shipped", dtype="float32", mesh=mesh)
    return tca_jax.generate(lm, prompts, max_new_tokens=64, logprobs=True, stop_token_ids=())


@pytest.mark.parametrize("method", ["worth", None])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if math.prod(shape) <= devices] or [(1, 2)], ids=str)
def test_answers_are_those_of_one_gpu(shape, method):
    out, expected = answers(method, mesh_of(shape)), answers(method, None)
    assert out.tokens == expected.tokens
    np.testing.assert_allclose(np.concatenate(out.logprobs), np.concatenate(expected.logprobs), atol=2e-4)


@pytest.mark.parametrize("method", ["worth", None])
def test_an_engine_copies_no_pool(method):
    lm = tca_jax.load("recall-tiny", profile=method and "shipped", mesh=mesh_of((1, 2)))
    programs.forget_programs()
    with Engine(lm, max_rows=2, answer_tokens=300, pages=2**16) as engine:
        engine.ask(engine.read([5] * 1000), [6] * 100, max_new_tokens=200, stop_token_ids=()).result(300)
        pool = engine._pool.arrays.k.nbytes / 2  # of a device
    assert all(kept.wait().memory_analysis().temp_size_in_bytes < pool / 2 for kept in programs._kept.values())
