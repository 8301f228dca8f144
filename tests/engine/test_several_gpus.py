"""The shipped model over several GPUs of this machine, with the real kernels: tokens and logits are those of one."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from meshes import chunks_of, mesh_of

import tca_jax
from tca_jax.lab.recall.evaluation import draw_documents

several = jax.default_backend() == "gpu" and jax.device_count() > 1
pytestmark = pytest.mark.skipif(not several, reason="needs two GPUs; meshes of CPUs run in test_mesh.py")

NEW_TOKENS = 64


@functools.cache
def prompts() -> list[str]:
    """Ragged ones, far longer than the window."""
    documents = draw_documents((0, 2), 4, 2048, "digits")
    texts = [document.text + "\n\n" + document.questions[0].text for document in documents]
    return [text[cut:] for text, cut in zip(texts, (0, 1000, 0, 300), strict=True)]


def answers(method: str, mesh: Mesh | None = None):
    lm = tca_jax.load("recall-tiny", profile="shipped", dtype="float32", mesh=mesh)
    lm = lm if method == "profile" else lm.with_method(method)
    return tca_jax.generate(lm, prompts(), max_new_tokens=NEW_TOKENS, logprobs=True, stop_token_ids=())


of_one = functools.cache(answers)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("method", ["profile", "full", "xattention", "snapkv", "in chunks"])
def test_answers_are_those_of_one_gpu(shape, method, monkeypatch):
    if jax.device_count() < (count := int(np.prod(shape))):
        pytest.skip(f"needs {count} GPUs")
    name = "profile" if method == "in chunks" else method
    expected = of_one(name)
    if method == "in chunks":  # sums that overlap with the products of long prompts
        chunks_of(1024, tca_jax.load("recall-tiny"), monkeypatch)
        monkeypatch.setattr("tca_jax.models.sharding._OVERLAPPING", (14, 18))  # each size's products take seconds
    out = answers(name, mesh_of(shape))
    assert out.tokens == expected.tokens
    for here, there in zip(out.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(here, there, atol=2e-4)
