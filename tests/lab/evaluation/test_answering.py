"""Asking: the protocols are the calls that they stand for, whatever the batches."""

from dataclasses import replace

import pytest
import tiny
from meshes import mesh_of, needs_8_devices

import tca_jax
from tca_jax.lab.evaluation import samples

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}<assistant>"
LENGTHS = (30, 28, 29)  # of one bucket: few programs
TASK = samples.Task("t", "s", 6, lambda drawing: [], lambda sample, text, protocol: 0.5)
ASKED = [samples.Prompt("x y " * n, f" Q{n}?") for n in LENGTHS]
SAMPLES = [samples.Sample(samples.by_protocol(replace(each, lead=" A:"), each), ("r",)) for each in ASKED]


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
    monkeypatch.setattr(samples, "PREAMBLE_TOKENS", 4)  # shorter answers
    given = protocol in ("prefix", "late-prefix")
    limit = 6 if given else 6 + 4 + len(" A:")
    counted = []
    found = TASK.measure(lm, SAMPLES, protocol, 2, counted.append)
    assert [sample["prediction"] for sample in found["samples"]] == told(lm, protocol, limit)
    assert [sample["new_tokens"] for sample in found["samples"]] == [limit] * 3
    frame = len("<user></s><assistant>") + len(" Q30?") + (len(" A:") if given else 0)
    assert [sample["prompt_tokens"] for sample in found["samples"]] == [frame + 4 * n for n in LENGTHS]
    assert (counted, found["batch"], found["score"]) == ([2, 1], 2, 50)
    assert found["kv_cache_bytes"] == found["full_kv_cache_bytes"]
    assert found["attended_share"] == found["kept_share"] == 1


@pytest.mark.parametrize(
    ("mesh", "memory", "tokens", "most", "rows"),
    [
        *((None, 100 * 2**20, 3968, 100, 12), (None, 1, 1024, 8, 1), (None, None, 1024, 8, 8)),
        *(((4, 2), 100 * 2**20, 3968, 100, 4 * 24), ((4, 2), 1, 1024, 1, 4), ((4, 2), None, 1024, 6, 8)),
    ],
)
@needs_8_devices
def test_batches_fit_memory_and_devices(lm, mesh, memory, tokens, most, rows, monkeypatch):
    model = lm if mesh is None else tca_jax.LM.from_decoder(lm.decoder, mesh=mesh_of(mesh))
    monkeypatch.setattr(samples, "memory_bytes", lambda: memory)
    assert samples.safe_batch(model, tokens, 128, most) == rows  # 2.1 MB each; on the mesh half of the heads
