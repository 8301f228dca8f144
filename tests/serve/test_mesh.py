"""An engine over a mesh: each device has pages of its own heads, and answers are those of one device."""

import dataclasses

import jax
import pytest
from tiny import CONFIG, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.errors import UserError
from tca_jax.models.decoder import Decoder
from tca_jax.serve import Engine

OPTIONS = {"max_new_tokens": 20, "stop_token_ids": ()}


def over(lm: tca_jax.LM, shape: tuple[int, int]) -> tca_jax.LM:
    mesh = jax.make_mesh(shape, ("data", "model"), devices=jax.devices()[: shape[0] * shape[1]])
    assert isinstance(lm.decoder, Decoder)
    return tca_jax.LM.from_decoder(lm.decoder, name="tiny", mesh=mesh)


@pytest.mark.parametrize("part_tokens", [pytest.param(2**17, marks=pytest.mark.slow), 1])
def test_answers_are_those_of_one_device_also_of_documents_that_are_read_a_layer_at_a_time(
    tmp_path, monkeypatch, part_tokens
):
    monkeypatch.setattr("tca_jax.serve.reading._PART_TOKENS", part_tokens)
    candidates = [[0, 5], [9, 13], [14, 2]]
    lm = tiny_lm(config=dataclasses.replace(CONFIG, num_layers=len(candidates)))
    one, two = (with_candidates(each, candidates) for each in (lm, over(lm, (1, 2))))
    documents = [random_prompt(i, length) for i, length in enumerate((101, 77))]
    pages = 2 * two.cache_layout(1, 112).num_pages - 1
    with Engine(two, max_rows=2, pages=pages, answer_tokens=64, disk=tmp_path) as engine:
        ids = [engine.read(document) for document in documents]
        for id_ in ids:
            engine.wait(id_, 120, stored=True)
        for number in (0, 1, 0):
            context = tca_jax.prefill(one, documents[number])
            kept = engine.ask(ids[number], [3, 4, 5], keep=True, **OPTIONS).result(120)
            assert kept.tokens == tca_jax.generate(one, [[3, 4, 5]], context=context, **OPTIONS).tokens[0]
            turn = tca_jax.prefill(one, [[3, 4, 5, *kept.tokens[:-1]]], context=context)
            out = engine.ask(kept.document, [7], **OPTIONS).result(120)
            assert out.tokens == tca_jax.generate(one, [[7]], context=turn, **OPTIONS).tokens[0]
    with Engine(two, max_rows=2, pages=pages, answer_tokens=64, disk=tmp_path) as engine:
        again = engine.ask(ids[0], [3, 4, 5], **OPTIONS).result(120)
        context = tca_jax.prefill(one, documents[0])
        assert again.tokens == tca_jax.generate(one, [[3, 4, 5]], context=context, **OPTIONS).tokens[0]


def test_rows_on_several_devices_are_refused():
    assert CONFIG.num_kv_heads == 2
    with pytest.raises(UserError, match="2 devices along 'data'"):
        Engine(over(tiny_lm(), (2, 1)), pages=8)
