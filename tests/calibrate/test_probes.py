"""Probes behind texts: the text's own end, hidden facts, copies."""

import dataclasses
import itertools

import numpy as np
import pytest
from tiny import CONFIG as TINY
from transformers import AutoTokenizer

from tca_jax.calibration.facts import draw_facts
from tca_jax.calibration.probes import FOLLOWING, _encode_asked, probed_texts
from tca_jax.loading import checkpoint_folder
from tca_jax.methods.base import num_ranked_blocks

SIZES = {"block_size": 8, "window": 16}
REACH = 24


@dataclasses.dataclass
class Encoder:
    """A model that only encodes."""

    max_context: int = 4096
    tokenizer: object = None
    name: str = "tiny"

    @property
    def config(self):
        return dataclasses.replace(TINY, vocab_size=1000, max_positions=self.max_context)


def distinct(length):
    """Ids that are never the same at 128 tokens' distance."""
    return [position % 997 for position in range(length)]


def lines(length, seed=0):
    """Characters in lines of different lengths, behind a token that begins the text."""
    rng = np.random.default_rng(seed)
    text = "".join(f"{'x' * rng.integers(70)}\n" for _ in range(length // 20))
    return [256, *map(ord, text)][:length]


def shipped_tokenizer(**changes):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder("recall-tiny"))
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def of_kind(text, kind):
    return [segment for segment in text.segments if segment.kind == kind]


def counted(segment):
    """The runs of tokens that count."""
    return [
        [token for token, _ in run]
        for counts, run in itertools.groupby(zip(segment.ids, segment.answers, strict=True), lambda one: one[1])
        if counts
    ]


@pytest.mark.parametrize("length", [REACH, REACH + 1, 100, REACH + FOLLOWING, 1000])
def test_the_last_tokens_are_a_probe(length):
    (text,) = probed_texts(Encoder(), [distinct(length)], **SIZES)
    assert len(text.ids) == max(REACH, length - FOLLOWING)
    ends = of_kind(text, "follow")
    assert len(ends) == (length > REACH)
    assert (*text.ids, *itertools.chain.from_iterable(end.ids for end in ends)) == tuple(distinct(length))
    assert all(all(end.answers) for end in ends)
    assert list(text.segments[: len(ends)]) == ends


def test_copies_are_four_passages():
    (text,) = probed_texts(Encoder(), [list(range(900))], **SIZES)  # no tokenizer
    assert [segment.kind for segment in text.segments] == ["follow", *["copy"] * 4]
    ranked, copies = num_ranked_blocks(len(text.ids), **SIZES) * 8, of_kind(text, "copy")
    for copy in copies:
        np.testing.assert_array_equal(copy.ids, copy.ids[0] + np.arange(128))
        assert copy.ids[-1] < ranked
        assert copy.answers == (False,) * 16 + (True,) * 112
    assert sorted(copy.ids[0] // (ranked // 4) for copy in copies) == list(range(4))  # one in each quarter


@pytest.mark.parametrize("room", [0, 10, 60, 100, 200, 3000])
@pytest.mark.parametrize("length", [0, 1, 40, 300, 3000])
def test_texts_lose_first_tokens_for_their_probes(length, room):
    ids, most = lines(REACH + min(length, room)), REACH + room
    (text,) = probed_texts(Encoder(most, shipped_tokenizer()), [ids], **SIZES)
    assert REACH <= len(text.ids) <= len(ids)
    assert text.ids[0] == ids[0]
    assert all(len(text.ids) + len(segment.ids) <= most for segment in text.segments)
    assert text.ids[-SIZES["window"] :] == tuple(
        ids[: REACH + max(0, len(ids) - REACH - FOLLOWING)][-SIZES["window"] :]
    )
    assert all(any(segment.answers) for segment in text.segments)


@pytest.mark.parametrize("chat", [True, False])
def test_facts_are_lines_whose_values_count(chat):
    tokenizer = shipped_tokenizer(**({} if chat else {"chat_template": None}))
    ids = lines(20_000)
    (text,) = probed_texts(Encoder(32_768, tokenizer), [ids], **SIZES)
    assert len(text.ids) == len(ids) - FOLLOWING
    decoded = tokenizer.decode(text.ids)
    ranked = decoded[: num_ranked_blocks(len(text.ids), **SIZES) * 8]
    asked = of_kind(text, "facts")
    facts = draw_facts(np.random.default_rng([0, 0, 1]))
    assert len(asked) == len(facts) == 14
    for fact, segment in zip(facts, asked, strict=True):
        assert all(decoded.count(value) == 1 for value in fact.values)
        assert all(f"\n{line}\n" in ranked for line in fact.lines)
        answers = [tokenizer.decode(run).strip() for run in counted(segment)]  # a token may begin in front of it
        assert tuple(answers) == fact.values
        before, after = tokenizer.decode(segment.ids).split(fact.answer)
        if chat:
            assert (before, after) == (f"<|user|>{fact.question}<|eos|><|assistant|>", "<|eos|>")
        else:
            assert (before, after) == (f"\nQuestion: {fact.question}\nAnswer: ", "")
    rest = decoded
    for line in (line for fact in facts for line in fact.lines):
        rest = rest.replace(f"{line}\n", "")
    original = tokenizer.decode(ids[1:-FOLLOWING])
    assert original.endswith(rest.removeprefix(tokenizer.bos_token))  # what lacks was cut off the beginning


@pytest.mark.parametrize("length", [300, 1000, 3000, 8000])
def test_facts_take_a_tenth_at_most(length):
    tokenizer = shipped_tokenizer()
    (text,) = probed_texts(Encoder(32_768, tokenizer), [lines(length)], **SIZES)
    decoded = tokenizer.decode(text.ids)
    hidden = [f.lines for f in draw_facts(np.random.default_rng([0, 0, 1])) if f.values[0] in decoded]
    assert len(hidden) == len(of_kind(text, "facts")) <= 14
    assert sum(len(line) + 1 for lines in hidden for line in lines) <= len(text.ids) / 10
    assert bool(hidden) == (length >= 1000)


# A template that strips, one that announces what it then leaves out, one that writes more, one that rewrites.
STRIPS = "<u>{{ messages[0].content }}</u>{% if messages[1] %}{{ messages[1].content | trim }}{% endif %}"
ANNOUNCES = "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
WRITES_MORE = "<u>{{ messages[0].content }}</u>{% if messages[1] %}<t></t>{{ messages[1].content }}{% endif %}"
REWRITES = "{% for m in messages %}{{ m.content | upper }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (..., "She.", "She."),
        (..., "e", "e"),  # the question, the roles and what ends a turn have it too
        (None, "She.", " She."),
        (STRIPS, "S", "S"),
        (ANNOUNCES, "S", "S"),
        (WRITES_MORE, "S", "S"),
        (REWRITES, "She.", "WHO? HE?;SHE.;"),
    ],
)
def test_answer_tokens_count_alone(template, answer, expected):
    tokenizer = shipped_tokenizer(**({} if template is ... else {"chat_template": template}))
    segment = _encode_asked(Encoder(tokenizer=tokenizer), "Who? He?", answer, [answer])
    assert "".join(tokenizer.decode(run) for run in counted(segment)).strip() == expected.strip()
