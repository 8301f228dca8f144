"""Masks of the next token: answers are drawn from what is left of the model's distribution."""

import json

import numpy as np
import openai
import pytest
from serving import MODEL, QUESTION, Running, question
from tiny import CONFIG, random_prompt

import tca_jax
from tca_jax.errors import UserError
from tca_jax.serve import Engine, Grammars

VOCABULARY = CONFIG.vocab_size
DOCUMENT = random_prompt(0, 70)
NEW = 12
FREE = [
    {"stop_token_ids": ()},
    {"temperature": 0.8, "seed": 1, "top_k": 9, "stop_token_ids": (3, 5)},
    {"repetition_penalty": 1.4, "temperature": 1.3, "stop_token_ids": ()},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "number": {"type": "integer", "minimum": 0, "maximum": 50},
        "colors": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "number", "colors"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "a-name", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def context(lm):
    return tca_jax.prefill(lm, DOCUMENT)


@pytest.fixture(scope="module")
def engine(lm):
    with Engine(lm, max_rows=3, pages=300, answer_tokens=64) as engine:
        yield engine


def residues(tokens):
    """Tokens whose number has a remainder by 7 that depends on how many there are and on the last one."""
    return np.arange(VOCABULARY) % 7 == (len(tokens) + sum(tokens[-1:])) % 7


def only(*tokens):
    return np.isin(np.arange(VOCABULARY), tokens)


def test_masked_answers_and_their_neighbours(lm, context, engine):
    id_ = engine.read(DOCUMENT)
    calls = []

    def mask(tokens):
        calls.append(list(tokens))
        return residues(tokens)

    ask = {"max_new_tokens": NEW, "stop_token_ids": (), "mask": mask, "logprobs": True}
    free = [engine.ask(id_, question(i), max_new_tokens=24, **FREE[i]) for i in (0, 1)]
    stream = engine.ask(id_, question(5), **ask)
    free.append(engine.ask(id_, question(2), max_new_tokens=24, **FREE[2]))
    out = stream.result(120)
    scores = tca_jax.score(lm, [DOCUMENT + question(5) + out.tokens], top_logprobs=VOCABULARY)
    for place, likeliest in enumerate(scores.top_logprobs[0][-NEW:]):
        allowed = residues(out.tokens[:place])
        assert out.tokens[place] == next(token for token, _ in likeliest if allowed[token])
    assert calls == [out.tokens[:i] for i in range(NEW)]  # one call a token
    np.testing.assert_allclose(
        out.logprobs, scores.logprobs[0][-NEW:], atol=1e-4
    )  # of the model, not of what is allowed
    for i, each in enumerate(free):
        expected = tca_jax.generate(lm, [question(i)], context=context, max_new_tokens=24, **FREE[i])
        assert each.result(120).tokens == expected.tokens[0]


@pytest.mark.parametrize(
    ("mask", "options", "tokens", "reason"),
    [
        (lambda tokens: only(*[9][len(tokens) // 3 :]), {"stop_token_ids": (), "min_new_tokens": 8}, [9] * 3, "stop"),
        (lambda tokens: only(), {}, [], "stop"),
        (lambda tokens: only(4, 9), {"stop_token_ids": (4,), "min_new_tokens": 5}, [9] * 5, "length"),
        (lambda tokens: only(96), {"stop_token_ids": (96,)}, [96], "stop"),
        (lambda tokens: only(96), {"stop_token_ids": (96,), "min_new_tokens": 2}, [], "stop"),
    ],
)
def test_answers_end_where_a_mask_is_empty(engine, mask, options, tokens, reason):
    options = {**options, "max_new_tokens": max(5, options.get("min_new_tokens", 0))}
    out = engine.ask(None, question(2), mask=mask, keep=True, **options).result(60)
    assert (out.tokens, out.finish_reason) == (tokens, reason)
    if len(tokens) > 1:
        assert len(engine.document(out.document).tokens) == len(question(2)) + len(tokens) - 1


def refusing(tokens):
    if len(tokens) == 2:
        raise LookupError("not here")
    return residues(tokens)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [(refusing, LookupError, "not here"), (lambda tokens: [True] * 5, UserError, r"shape \(5,\): must be \(97,\)")],
)
def test_failing_masks_fail_their_answer_alone(lm, engine, mask, error, message):
    ask = {"max_new_tokens": 24, "stop_token_ids": (3,)}
    other = engine.ask(None, question(3), **ask)
    failing = engine.ask(None, question(4), mask=mask, **ask)
    with pytest.raises(error, match=message):
        failing.result(60)
    assert other.result(60).tokens == tca_jax.generate(lm, [question(3)], **ask).tokens[0]
    with pytest.raises(TypeError, match="mask"):
        engine.ask(None, [1], mask={})
    assert engine.idle(60)


# Grammars, by the shipped model


@pytest.fixture(scope="module")
def shipped():
    return tca_jax.load("recall-tiny", "shipped")


@pytest.fixture(scope="module")
def grammars(shipped):
    return Grammars(shipped)


@pytest.fixture(scope="module")
def client(shipped):
    with (
        Engine(shipped, max_rows=4, pages=400, answer_tokens=256) as engine,
        Running(engine) as running,
        running.client() as client,
    ):
        yield client


def text_of(shipped, new, seed):
    """A text that a grammar allows, each byte of it drawn among those that it allows."""
    rng, mask, tokens = np.random.default_rng(seed), new(), []
    while (allowed := mask(tokens)).any() and len(tokens) < 500:
        tokens.append(int(rng.choice(np.flatnonzero(allowed))))
    return shipped.tokenizer.decode(tokens, skip_special_tokens=True)


def require_schema(text):
    value = json.loads(text)
    assert list(value) == ["name", "number", "colors"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert 0 <= value["number"] <= 50
    assert value["colors"]
    assert {*value["colors"]} <= {"red", "green"}


def test_texts_of_grammars(grammars, shipped):
    for seed in range(5):
        require_schema(text_of(shipped, grammars.json(SCHEMA), seed))
        assert text_of(shipped, grammars.regex("[ab]{3}c"), seed).strip("ab") == "c"
        assert text_of(shipped, grammars.lark('start: "x" start | "y"'), seed).strip("x") == "y"
    allowed = grammars.regex("(.|\n)*")()([])
    assert allowed.shape == (shipped.config.vocab_size,)
    assert allowed[ord("a")]
    assert np.flatnonzero(allowed[256:]).tolist() == [token - 256 for token in shipped.eos_token_ids]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "foo"}, "schema: Invalid type: foo"),
        ({"$ref": "#"}, "schema: no token fits"),
        ({"$ref": "http://127.0.0.1/schema"}, "schema: .*does not fetch"),
        ({"const": "x" * 70_000}, "schema has 70,013 bytes: must have at most 65,536"),
        ({"type": "integer", "multipleOf": 982451653}, "schema: fuel exhausted"),
    ],
)
def test_unusable_schemas_are_refused(grammars, schema, message):
    with pytest.raises(UserError, match=message) as raised:
        grammars.json(schema)
    assert len(str(raised.value)) < 1000


def test_clients_get_json_of_their_schema(shipped, client):
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 200, "response_format": FORM, "seed": 3}
    whole = client.chat.completions.create(n=2, temperature=1.0, **asked)
    assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 2
    for choice in whole.choices:
        require_schema(choice.message.content)
    free = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
    assert free.choices[0].message.content == tca_jax.generate(shipped, [QUESTION], max_new_tokens=16).text[0]
    chunks = list(client.chat.completions.create(stream=True, temperature=0, **asked))
    require_schema("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    assert chunks[-1].choices[0].finish_reason == "stop"
    asked["response_format"] = {"type": "json_object"}
    begun = client.chat.completions.create(temperature=0, **(asked | {"max_tokens": 12}))
    assert begun.choices[0].message.content.startswith("{")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**(asked | {"response_format": form}))
    assert raised.value.body["message"] == "response_format.json_schema.schema: Invalid type: foo"
    assert raised.value.body["param"] == "response_format.json_schema.schema"
