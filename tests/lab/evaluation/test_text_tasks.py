"""Loss by position and agreement: against log-probabilities of whole texts, and of a method with itself."""

import dataclasses

import numpy as np
import pytest
import tiny

import tca_jax
from tca_jax.lab.evaluation.samples import DoesNotFit, Drawing
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.lab.evaluation.text_tasks import POSITIONS, TASKS
from tca_jax.loading import open_checkpoint

LOSS, AGREEMENT = TASKS
LENGTH = 256  # 32 tokens of it are continued


@pytest.fixture(scope="module")
def lm():
    return tiny.tiny_lm()


@pytest.fixture(scope="module")
def passage():
    return tiny.random_prompt(3, LENGTH)


def test_loss_of_full_attention_is_that_of_the_whole_text(lm, passage):
    reading = LOSS.read(lm, [passage], lambda count: None)
    losses = -tca_jax.score(lm, [passage]).logprobs[0]
    assert reading.values["loss"] == pytest.approx(losses[-LENGTH // 8 :].mean(), abs=1e-4)
    assert reading.values["loss_inside"] == pytest.approx(losses.mean(), abs=1e-5)
    by_position = reading.samples[0]["by_position"]
    np.testing.assert_allclose(by_position, [part.mean() for part in np.array_split(losses, POSITIONS)], atol=1e-5)
    assert reading.kv_cache_bytes == reading.full_kv_cache_bytes
    assert reading.attended_share == 1


@pytest.mark.integration
def test_full_attention_agrees_with_itself_and_a_lossy_method_does_not(lm, passage):
    exact = AGREEMENT.read(lm, [passage], lambda count: None)
    assert exact.values["top_1"] == 1
    assert exact.values["kl"] == pytest.approx(0, abs=1e-6)
    lossy = lm.with_method("streaming", sinks=0, window=16, block_size=8)
    told = []
    other = AGREEMENT.read(lossy, [passage, passage], told.append)
    assert other.values["top_1"] < 1
    assert other.values["kl"] > 0.01
    assert other.kv_cache_bytes < exact.kv_cache_bytes
    assert other.attended_share < 0.5
    inside = LOSS.read(lossy, [passage, passage], told.append)
    assert inside.attended_share == pytest.approx(tca_jax.score(lossy, passage).attended_share[0])
    assert told == [1] * 4


def test_a_text_is_encoded_anew_for_a_model_of_the_same_name_with_another_tokenizer(tmp_path):
    (tmp_path / "text.txt").write_text("abc" * 40)
    sources = Sources(text=tmp_path / "text.txt")
    one = open_checkpoint("recall-tiny")
    other = dataclasses.replace(one, tokenizer=lambda text, **_: {"input_ids": [7] * len(text)})
    first, second, again = (LOSS.draw(Drawing(each, sources, 64, 1, 0)) for each in (one, other, one))
    assert second == [[7] * 64]
    assert first == again != second


def test_passages_are_spread_over_the_users_text(tmp_path):
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
