"""Loss of a text against its log-probabilities."""

import dataclasses

import numpy as np
import pytest
import tiny

import tca_jax
from tca_jax.engine.score import score_answers
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.lab.evaluation.text_tasks import POSITIONS, TASKS
from tca_jax.loading import open_checkpoint

(LOSS,) = TASKS
LENGTH = 256  # 32 tokens of it are continued


@pytest.fixture(scope="module")
def lm():
    return tiny.tiny_lm()


@pytest.fixture(scope="module")
def passage():
    return tiny.random_prompt(3, LENGTH)


def test_full_attention_has_the_texts_loss(lm, passage):
    reading = LOSS.read(lm, [passage], lambda count: None)
    losses = -tca_jax.score(lm, [passage]).logprobs[0]
    assert reading.values["loss"] == pytest.approx(losses[-LENGTH // 8 :].mean(), abs=1e-4)
    assert reading.values["loss_inside"] == pytest.approx(losses.mean(), abs=1e-5)
    by_position = reading.samples[0]["by_position"]
    np.testing.assert_allclose(by_position, [part.mean() for part in np.array_split(losses, POSITIONS)], atol=1e-5)
    assert reading.kv_cache_bytes == reading.full_kv_cache_bytes
    assert reading.attended_share == 1


def test_lossy_methods_lose_more(lm, passage):
    lossy = lm.with_method("streaming", sinks=0, window=16, block_size=8)
    counts = []
    reading = LOSS.read(lossy, [passage, passage], counts.append)
    assert reading.kv_cache_bytes < reading.full_kv_cache_bytes
    assert reading.attended_share == pytest.approx(tca_jax.score(lossy, passage).attended_share[0])
    assert reading.attended_share < 0.5
    context = tca_jax.prefill(lossy, [passage[: -LENGTH // 8]])
    assert reading.kept_share == pytest.approx(context.stats.kept_share)
    behind = score_answers(lossy, [passage[: -LENGTH // 8]], [[passage[-LENGTH // 8 :]]])
    assert reading.values["loss"] == pytest.approx(-behind.logprobs[0][0].mean(), abs=1e-5)
    assert counts == [1, 1]


def test_texts_are_encoded_by_tokenizer(tmp_path):
    (tmp_path / "text.txt").write_text("abc" * 40)
    sources = Sources(text=tmp_path / "text.txt")
    one = open_checkpoint("recall-tiny")
    other = dataclasses.replace(one, tokenizer=lambda text, **_: {"input_ids": [7] * len(text)})
    first, second, again = (LOSS.draw(Drawing(each, sources, 64, 1, 0)) for each in (one, other, one))
    assert second == [[7] * 64]
    assert first == again != second


def test_passages_spread_over_the_text(tmp_path):
    (tmp_path / "text.txt").write_text("".join(chr(65 + i % 26) for i in range(1000)))
    encoder, sources = open_checkpoint("recall-tiny"), Sources(text=tmp_path / "text.txt")
    passages = LOSS.draw(Drawing(encoder, sources, 100, 3, 0))
    assert [len(passage) for passage in passages] == [100] * 3
    whole = encoder.tokenizer((tmp_path / "text.txt").read_text())["input_ids"]
    assert passages[0] == whole[:100]
    assert passages[2] == [encoder.tokenizer.bos_token_id, *whole[-99:]]  # as any text begins
    with pytest.raises(DoesNotFit, match=r"^--lengths 2000: loss needs at most 1001, the tokens of --text$"):
        LOSS.draw(Drawing(encoder, sources, 2000, 3, 0))
    with pytest.raises(DoesNotFit, match=r"^--lengths 31: loss needs at least 32 tokens of recall-tiny$"):
        LOSS.draw(Drawing(encoder, sources, 31, 3, 0))
