"""The model that ships: its files, its answers under full attention and under TCA, parity with transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tca_jax
from tca_jax.loading import checkpoint_folder
from tca_jax.needles import build_document, is_correct

FOLDER = checkpoint_folder("recall-tiny")


@pytest.fixture(scope="module")
def lm():
    return tca_jax.load("recall-tiny", profile="shipped")


def _full_hidden(lm, ids):
    """Hidden states under plain causal attention of JAX's own."""

    def attention(layer, q, k, v, state):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), None

    positions = jnp.arange(len(ids))[None]
    return lm.decoder(jnp.array([ids]), positions, attention, (None,) * lm.config.num_layers)[0]


def test_it_fits_twelve_megabytes_and_names_no_path_of_the_machine_that_trained_it():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12e6
    for path in files:
        assert b"/recall-tiny" not in path.read_bytes(), path


def test_its_card_tells_the_command_the_log_and_the_accuracy():
    card = (FOLDER / "README.md").read_text()
    result = json.loads((FOLDER / "evaluation.json").read_text())
    assert "python examples/train_recall_model.py --out recall-tiny" in card
    assert result["questions"] == 200
    assert result["tokens"] == 8192
    assert result["full_accuracy"] >= 0.99
    assert result["full_accuracy"] - result["tca_accuracy"] <= 0.02
    assert result["kv_cache_share"] <= 0.4
    assert f"{result['tca_accuracy']:.1%}" in card


def test_it_answers_fresh_questions_at_8192_tokens_with_full_attention_and_with_less_cache_under_tca(lm):
    # Two of the evaluation's kind: on a CPU each costs seconds.
    assert lm.method.cache.config == tca_jax.TCAConfig(window=512)
    for seed in (101, 102):
        document = build_document(np.random.default_rng(seed), 8191, 8, "held-out")
        question = document.questions[0]
        for model in (lm, lm.with_profile(None)):
            out = tca_jax.generate(model, document.prompt(question), max_new_tokens=8)
            assert out.stats.prompt_tokens == [8192]
            assert is_correct(question, out.text[0]), out.text
            assert out.finish_reasons == ["stop"]
            if model is lm:
                assert out.stats.kv_cache_bytes <= 0.4 * out.stats.full_kv_cache_bytes


def test_the_question_must_be_in_the_prompt_when_tokens_are_selected(lm):
    """Selection is query-aware: a cache that was compressed before the question is asked may lack its answer. Here the
    question's own tokens come in the prompt, so the needle's block is among those that keep most in some layer."""
    document = build_document(np.random.default_rng(7), 8191, 8, "held-out")
    question = document.questions[0]
    kept = tca_jax.kept_tokens(lm, document.prompt(question))
    start = question.needle.position + 1  # the bos token comes first
    needle = kept[:, :, start : start + len(question.needle.line)].mean(axis=-1)
    assert (needle - kept.mean(axis=-1)).max() > 0.3


def test_transformers_loads_the_same_folder_and_gives_the_same_logits(lm):
    torch = pytest.importorskip("torch", reason="parity with transformers needs PyTorch")
    from transformers import AutoModelForCausalLM

    ids = lm.tokenizer(build_document(np.random.default_rng(3), 700, 2).text)["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    ours = lm.decoder.logits(_full_hidden(lm, ids))[0]
    assert float(jnp.abs(ours - expected).max()) < 2e-4


def test_theorem_1_bounds_the_error_of_every_layer_on_real_text(lm):
    """|Att - Att~| <= 2 gamma max|V| with the model's own queries, keys and values."""
    ids = lm.tokenizer(build_document(np.random.default_rng(4), 1500, 2).text)["input_ids"]
    lengths = jnp.array([len(ids)], jnp.int32)
    config, candidates = lm.method.cache.config, lm.method.cache.candidates
    dense = jnp.full(lm.config.num_kv_heads, config.num_candidates, jnp.int32)
    slack = []

    def attention(layer, q, k, v, state):
        rows = jnp.array(candidates[layer], jnp.int32)
        full = tca_jax.attend(q, k, v, dense, lengths, config)
        sparse = tca_jax.attend(q, k, v, rows, lengths, config)
        gamma = tca_jax.diagnostics.dropped_mass(q, k, rows, lengths, config)
        bounds = tca_jax.diagnostics.error_bounds(gamma, v, lengths)
        error = jnp.abs(full - sparse).transpose(0, 2, 1, 3)  # [B, H_q, L, d]
        slack.append(float((bounds.max_norm - error.max(axis=-1)).min()))
        slack.append(float((bounds.l1_norm - error.sum(axis=-1)).min()))
        assert float(gamma.max()) > 0.01  # else the bound would hold for want of an error
        return full, None

    positions = jnp.arange(len(ids))[None]
    lm.decoder(jnp.array([ids]), positions, attention, (None,) * lm.config.num_layers)
    assert min(slack) > -1e-4
