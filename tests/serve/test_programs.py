"""Programs of an engine: a step lets the device run on."""

import functools

import jax
import numpy as np
import pytest
from cuda_lowering import lowered_for_cuda
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax.pallas_kernels import backends
from tca_jax.serve import Engine, programs

CONFIG = tca_jax.TCAConfig(block_size=16, window=32)
SAMPLED = {"temperature": 0.9, "top_k": 4, "repetition_penalty": 1.1, "logprobs": 2}


@pytest.mark.parametrize(
    ("method", "drawn"),
    [("tca", {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("tca", SAMPLED), ("quest", {})))],
)
def test_a_step_asks_the_host_nothing_on_a_gpu(method, drawn, monkeypatch):
    """A loop or a branch would: its condition is brought to the host, and the device waits for the answer."""
    lm = tiny_lm()
    options = {"tca": {"candidates": np.asarray([[0, 5], [9, 13]]), "config": CONFIG}, "quest": {"block_size": 16}}
    lm, taken = lm.with_method(method, **options[method]), {}
    with Engine(lm, max_rows=2, answer_tokens=64, backend="xla") as engine:
        own = engine._scheduler._batch._step_program

        def noted(arguments, evicts):
            taken[evicts] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
            return own(arguments, evicts)

        monkeypatch.setattr(engine._scheduler._batch, "_step_program", noted)
        document = engine.read(random_prompt(0, 60))
        engine.ask(document, [1, 2, 3], max_new_tokens=20, stop_token_ids=(), **drawn).result(120)
    assert set(taken) == {False, True}
    monkeypatch.setattr(backends, "_lacks", lambda name: None)
    for evicts, arguments in taken.items():
        step = functools.partial(programs._step, evicts=evicts, backend="triton")
        text = lowered_for_cuda(step, lm.for_programs(), *arguments)
        assert "__gpu$xla.gpu.triton" in text
        assert not any(each in text for each in ("stablehlo.while", "stablehlo.case", "stablehlo.if"))
