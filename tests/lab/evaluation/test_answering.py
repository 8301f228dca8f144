"""Asking: the protocols are the calls that they stand for, whatever the batches."""

import dataclasses

import pytest
import tiny
from meshes import mesh_of, needs_8_devices

import tca_jax
from tca_jax.lab.evaluation import answering
from tca_jax.lab.evaluation.answering import PREAMBLE_TOKENS, answer, answer_room, safe_batch
from tca_jax.lab.evaluation.samples import Mark, Prompt, Sample, Task, asked_with_lead

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}<assistant>"
LENGTHS = (30, 28, 29)  # of one bucket: few programs
TASK = Task("t", "s", 6, lambda drawing: [], lambda sample, text, protocol: Mark(0.0))
SAMPLES = [Sample(asked_with_lead("x y " * n, f" Q{n}?", " A:"), ("r",)) for n in LENGTHS]


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return tca_jax.load(tiny.write_checkpoint(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE))


def told(lm, protocol, limit):
    """What `generate` says, one sample at a time."""
    texts = []
    for n in LENGTHS:
        document, question = f"<user>{'x y ' * n}", f" Q{n}?</s><assistant>"
        if protocol in ("late", "late-prefix"):
            question += " A:" if protocol == "late-prefix" else ""
            context = tca_jax.prefill(lm, [lm.tokenizer(document)["input_ids"]])
            texts += tca_jax.generate(lm, question, context=context, max_new_tokens=limit).text
        else:
            prompt = document + question + (" A:" if protocol == "prefix" else "")
            texts += tca_jax.generate(lm, prompt, max_new_tokens=limit).text
    return texts


@pytest.mark.parametrize("protocol", ["prefix", "preamble", "late", "late-prefix"])
def test_answers_match_single_calls(lm, protocol, monkeypatch):
    monkeypatch.setattr(answering, "PREAMBLE_TOKENS", 4)  # shorter answers
    given = protocol in ("prefix", "late-prefix")
    limit = 6 if given else 6 + 4 + len(" A:")
    counted = []
    answers = answer(lm, TASK, SAMPLES, protocol, batch=2, report=counted.append)
    assert answers.texts == told(lm, protocol, limit)
    assert answers.new_tokens == [limit] * 3
    frame = len("<user></s><assistant>") + len(" Q30?") + (len(" A:") if given else 0)
    assert answers.prompt_tokens == [frame + 4 * n for n in LENGTHS]
    assert (counted, answers.batch) == ([2, 1], 2)
    assert answers.kv_cache_bytes == answers.full_kv_cache_bytes
    assert answers.attended_share == answers.kept_share == 1
    assert (answers.question_seconds < answers.prefill_seconds) == (protocol in ("late", "late-prefix"))


@pytest.mark.slow
@needs_8_devices
def test_mesh_gives_equal_answers(lm):
    many = dataclasses.replace(tca_jax.LM.from_decoder(lm.decoder, mesh=mesh_of((2, 1))), tokenizer=lm.tokenizer)
    one = answer(lm, TASK, SAMPLES, "prefix", batch=1)
    other = answer(many, TASK, SAMPLES, "prefix", batch=1)
    assert other.texts == one.texts
    assert (one.batch, other.batch) == (1, 2)
    assert other.kv_cache_bytes == one.kv_cache_bytes  # a prompt


@needs_8_devices
def test_mesh_batches_are_multiples_of_devices(lm, monkeypatch):
    many = tca_jax.LM.from_decoder(lm.decoder, mesh=mesh_of((4, 2)))
    assert safe_batch(many, 1024, 128, 6) == 8
    monkeypatch.setattr(answering, "memory_bytes", lambda: 100 * 2**20)
    assert safe_batch(many, 3968, 128, 100) == 4 * 24  # half of the heads: 1.05 MB each
    monkeypatch.setattr(answering, "memory_bytes", lambda: 1)
    assert safe_batch(many, 1024, 128, 1) == 4


def test_room_has_few_sizes():
    assert {answer_room("prefix", limit, 10**6) for limit in (30, 32, 50, 120, 128)} == {128}
    assert {answer_room("late", limit + PREAMBLE_TOKENS + 30, 10**6) for limit in (30, 50, 120, 128)} == {256}
    assert answer_room("prefix", 448, 10**6) == 512
    assert answer_room("prefix", 128, 60) == 60


def test_batches_fit_the_memory(lm, monkeypatch):
    monkeypatch.setattr(answering, "memory_bytes", lambda: 100 * 2**20)
    assert safe_batch(lm, 1024, 128, 8) == 8
    assert safe_batch(lm, 3968, 128, 100) == 12  # 2.1 MB each, a quarter of the memory
    monkeypatch.setattr(answering, "memory_bytes", lambda: 1)
    assert safe_batch(lm, 1024, 128, 8) == 1
    monkeypatch.setattr(answering, "memory_bytes", lambda: None)
    assert safe_batch(lm, 1024, 128, 8) == 8


def test_prompts_without_chat_are_plain(lm):
    prompt = Prompt("ab", "c", " d", chat=False)
    assert lm.tokenizer.decode(prompt.encode(lm)) == "abc d"
    assert [lm.tokenizer.decode(part) for part in prompt.encode_apart(lm)] == ["ab", "c d"]
