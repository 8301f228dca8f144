"""What a call of generation or scoring can be asked for beyond tokens."""

import dataclasses
import re
import weakref
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_decoders import causal
from tiny import CONFIG, random_prompt, tiny_lm, with_candidates

import tca_jax
from tca_jax.engine.generation import AnswerReader
from tca_jax.engine.generation_config import GenerationOptions, option_help
from tca_jax.engine.score import score_answers
from tca_jax.models.decoder import Decoder


@pytest.fixture(scope="module")
def lm():
    return with_candidates(tiny_lm())


@pytest.mark.integration
def test_log_probabilities_are_the_models_own(lm):
    full, prompt = lm.with_profile(None), random_prompt(3, 40)
    out = tca_jax.generate(full, prompt, max_new_tokens=4, temperature=1.5, logprobs=3, stop_token_ids=())
    for number, top in enumerate(out.top_logprobs[0]):
        text = [*prompt, *out.tokens[0][:number]]
        logprobs = [tca_jax.score(full, [*text, token]).logprobs[0][-1] for token, _ in top]
        np.testing.assert_allclose([logprob for _, logprob in top], logprobs, atol=1e-4)
        assert logprobs == sorted(logprobs, reverse=True)
        assert out.logprobs[0][number] <= top[0][1] + 1e-6
        assert out.tokens[0][number] in [token for token, _ in top] or out.logprobs[0][number] <= top[-1][1] + 1e-6
    stop = out.tokens[0][1]
    short = tca_jax.generate(full, prompt, max_new_tokens=4, temperature=1.5, logprobs=3, stop_token_ids=[stop])
    assert len(short.tokens[0]) == len(short.logprobs[0]) == len(short.top_logprobs[0]) < 4


@pytest.mark.integration
def test_a_config_and_keywords_agree(written):
    config = tca_jax.GenerationConfig(max_new_tokens=9, temperature=2.0, seed=1, num_samples=2, logprobs=1)
    out = tca_jax.generate(written, "hello", config, seed=5)
    own = tca_jax.generate(written, "hello", **{**dataclasses.asdict(config), "seed": 5})
    assert (out.tokens, out.top_logprobs) == (own.tokens, own.top_logprobs)
    assert out.tokens != tca_jax.generate(written, "hello", config).tokens
    pieces = list(tca_jax.stream(written, "hello", config, seed=5))
    assert ["".join(of_answer) for of_answer in zip(*pieces, strict=True)] == out.text


def test_type_checkers_see_all_options():
    config, options = map(get_type_hints, (tca_jax.GenerationConfig, GenerationOptions))
    assert options == config
    assert option_help().keys() == config.keys()


@pytest.mark.integration
@pytest.mark.parametrize("method", ["full", "tca"])
def test_score_is_the_log_softmax_of_positions(lm, method, monkeypatch):
    model = lm if method == "tca" else lm.with_method("full")
    prompts = [random_prompt(6, 90), random_prompt(7, 83), [1, 2]]
    scores = tca_jax.score(model, prompts)
    monkeypatch.setattr("tca_jax.engine.score._LOGIT_ELEMENTS", 7 * CONFIG.vocab_size)  # chunks that do not divide
    jax.clear_caches()
    tops = tca_jax.score(model, prompts, top_logprobs=CONFIG.vocab_size).top_logprobs
    for prompt, logprobs, top in zip(prompts, scores.logprobs, tops, strict=True):
        (alone,) = tca_jax.score(model, prompt).logprobs
        np.testing.assert_allclose(logprobs, alone, atol=2e-5)
        assert logprobs.shape == (len(prompt) - 1,)
        for token, logprob, pairs in zip(prompt[1:], logprobs, top, strict=True):
            assert dict(pairs)[token] == pytest.approx(logprob, abs=2e-5)
            assert [value for _, value in pairs] == sorted((value for _, value in pairs), reverse=True)
    assert scores.tokens == prompts
    (first,) = tca_jax.score(lm.with_method("full"), prompts[1]).logprobs
    hidden, _ = lm.decoder(jnp.array([prompts[1]]), jnp.arange(83)[None], causal, (None, None))
    expected = jax.nn.log_softmax(lm.decoder.logits(hidden[0]))[jnp.arange(82), jnp.array(prompts[1][1:])]
    np.testing.assert_allclose(first, expected, atol=2e-5)


@pytest.mark.integration
def test_min_new_tokens_delays_stop_tokens(lm):
    prompts = [random_prompt(i, 40) for i in range(3)]
    options = {"max_new_tokens": 24, "temperature": 2.0}
    stops = list(range(60))  # likely soon
    assert min(tca_jax.generate(lm, prompts, stop_token_ids=stops, **options).stats.new_tokens) < 10
    late = tca_jax.generate(lm, prompts, stop_token_ids=stops, min_new_tokens=10, **options)
    assert min(late.stats.new_tokens) >= 11
    assert not {token for tokens in late.tokens for token in tokens[:10]} & set(stops)
    assert {tokens[-1] for tokens in late.tokens} <= set(stops) or max(late.stats.new_tokens) == 24


@pytest.mark.parametrize("stop", [(), ("e",), ("qq", "z")])
def test_pieces_of_a_batch_join_to_answers(written, stop):
    prompts = ["hello ", "for i in range(3):\n    print(i)\n" * 3, "z"]
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3, "stop": stop}

    def returned(pieces):
        pieces.append((yield from tca_jax.stream(written, prompts, **options)))

    end = []
    pieces = list(returned(end))
    whole = tca_jax.generate(written, prompts, **options)
    assert ["".join(row) for row in zip(*pieces, strict=True)] == whole.text == end[0].text
    assert end[0].stats.new_tokens == whole.stats.new_tokens


class Letters:
    """A tokenizer whose token i is the i-th of some byte strings, parts of characters or special tokens (<...>)."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts

    def decode(self, tokens, skip_special_tokens=True):
        parts = [[*self.parts, b"a"][token] for token in tokens]
        kept = [part for part in parts if not (skip_special_tokens and part[:1] == b"<")]
        return b"".join(kept).decode(errors="replace")

    def __call__(self, text, **options):
        return {"input_ids": [len(self.parts)]}


def reader_of(lm, parts, stop, least=0, stop_token_ids=()):
    """Reads answers whose i-th token is the i-th part."""
    config = tca_jax.GenerationConfig(stop=stop, min_new_tokens=least, stop_token_ids=stop_token_ids)
    return AnswerReader(dataclasses.replace(lm, tokenizer=Letters(*parts)), config)


@pytest.mark.parametrize(
    ("text", "stop", "least", "tokens", "left"),
    [
        ("-list of the sta", ("list of", "st"), 0, 5, "-li"),  # "st" is complete before "list of"
        ("abcdzz", ("ab", "abcd"), 3, 4, ""),
        ("abcdzz", ("ab", "abcd"), 0, 2, ""),
        ("abab", ("ab",), 2, 4, "ab"),
        ("abab", ("ab",), 4, 4, "abab"),  # no fewer than there may be
        ("aaaa", ("aa",), 2, 3, "a"),
        ("abcabc", ("zz",), 0, 6, "abcabc"),
        ("ab<end>c<end>", ("<end>",), 0, 3, "ab"),
        ("ab<end>c<end>", ("<end>",), 3, 5, "abc"),
        ("ab<end>c", ("b<e",), 0, 3, "a"),
        ("é<end>cd", ("nd>c",), 0, 3, "é"),
        ("a<end>bcd", ("cd",), 0, 5, "ab"),
    ],
)
def test_the_first_complete_stop_string_ends_an_answer(lm, text, stop, least, tokens, left):
    """However often one looks; special tokens are part of the text in which it is sought."""
    parts = [part.encode() for part in re.findall("<[a-z]*>|.", text)]
    for steps in ([len(parts)], [1, 3, len(parts)], range(1, len(parts) + 1)):
        reader = reader_of(lm, parts, stop, least)
        *_, answer = (reader.read(list(range(step))) for step in steps)
        assert (len(answer.tokens), answer.text) == (tokens, left)


@pytest.mark.parametrize(("least", "tokens"), [(0, 3), (2, 3), (3, 4)])
def test_a_stop_token_counts_after_the_least(lm, least, tokens):
    reader = reader_of(lm, [b"a", b"b", b"c", b"d"], (), least, stop_token_ids=(2,))
    assert len(reader.read([0, 1, 2, 3]).tokens) == tokens


@pytest.mark.parametrize(
    ("parts", "stop"),
    [
        ([b"\x80"] * 3 + [b" ok"], ("\n\n",)),
        ([b"a", b"\x80", b"\x80", b"\x80", b" ok"], ("END!",)),
        (["é".encode()[:1], "é".encode()[1:], b"x", b"y"], ("zz",)),
    ],
)
def test_pieces_never_repeat(lm, parts, stop):
    reader, sent = reader_of(lm, parts, stop), ""
    for step in range(1, len(parts) + 1):
        sent += reader.piece(reader.read(list(range(step))), len(sent), finished=step == len(parts))
    assert sent == b"".join(parts).decode(errors="replace")


def test_weights_that_are_not_finite_are_named():
    model = tiny_lm()
    kernel = model.params["layers"][1]["attention"]["qkv"]["kernel"]
    kernel[...] = kernel[...].at[0, 0, 0].set(jnp.nan)
    message = (
        r"tiny computes NaN or infinity for {}\[0\]: the weight model.layers.1.self_attn.q_proj.weight is not finite"
    )
    with pytest.raises(ValueError, match=message.format("prompts")):
        tca_jax.generate(model, [random_prompt(0, 20), random_prompt(1, 30)], max_new_tokens=3)
    with pytest.raises(ValueError, match=message.format("texts")):
        tca_jax.score(model, [random_prompt(0, 20), random_prompt(1, 30)])


def test_a_layer_that_overflows_is_named():
    config = dataclasses.replace(CONFIG, num_layers=3)
    decoder = Decoder(config, dtype=jnp.float16, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    for kernel in (decoder.layers[1].mlp.gate_up.kernel, decoder.layers[1].mlp.down.kernel):
        kernel[...] = jnp.full(kernel.shape, 6e4, jnp.float16)
    model = tca_jax.LM.from_decoder(decoder, name="tiny")
    with pytest.raises(
        ValueError, match=r"weights are finite, the values in layer 2 are not, in dtype float16; try another"
    ):
        tca_jax.generate(model, random_prompt(0, 20), max_new_tokens=3)


PROMPTS = [random_prompt(0, 61), random_prompt(1, 40)]
OPTIONS = {"max_new_tokens": 11, "stop_token_ids": (), "logprobs": 1}


@pytest.mark.parametrize("method", [pytest.param("full", marks=pytest.mark.integration), "tca"])
def test_greedy_answers_have_their_log_probabilities(lm, method):
    lm = lm if method == "tca" else lm.with_method("full")
    out = tca_jax.generate(lm, PROMPTS, **OPTIONS)
    other = [(token + 1) % 97 for token in out.tokens[0]]
    scores = score_answers(lm, PROMPTS, [[out.tokens[0], other], [other[:4], out.tokens[1]]])
    np.testing.assert_allclose(scores.logprobs[0][0], out.logprobs[0], atol=2e-4)
    np.testing.assert_allclose(scores.logprobs[1][1], out.logprobs[1], atol=2e-4)
    assert scores.greedy == [[True, False], [False, True]]
    single = score_answers(lm, PROMPTS, [[out.tokens[0][:1]], [out.tokens[1][:1]]])
    np.testing.assert_allclose([row[0][0] for row in single.logprobs], [row[0] for row in out.logprobs], atol=2e-4)
    assert single.greedy == [[True], [True]]
    assert [[len(of_answer) for of_answer in row] for row in scores.logprobs] == [[11, 11], [4, 11]]


def test_answers_score_behind_a_context(lm):
    context = tca_jax.prefill(lm, random_prompt(4, 104))  # whole blocks
    questions = [random_prompt(5, 1), random_prompt(6, 12)]
    out = tca_jax.generate(lm, questions, context=context, **OPTIONS)
    other = [(token + 1) % 97 for token in out.tokens[0]]
    scores = score_answers(lm, questions, [[out.tokens[0], other], [out.tokens[1], other]], context=context)
    np.testing.assert_allclose(scores.logprobs[0][0], out.logprobs[0], atol=2e-4)
    np.testing.assert_allclose(scores.logprobs[1][0], out.logprobs[1], atol=2e-4)
    assert scores.greedy == [[True, False], [True, False]]


def test_a_model_is_freed_with_its_last_name():
    gone = weakref.ref(tiny_lm().for_programs)
    assert gone() is None
