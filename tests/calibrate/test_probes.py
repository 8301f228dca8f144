"""Probes behind texts: the text's own end, hidden facts, copies, questions and answers; and what is refused."""

import dataclasses
import itertools

import numpy as np
import pytest
from cases import unchecked
from tiny import CONFIG as TINY
from transformers import AutoTokenizer

from tca_jax.calibration.facts import draw_facts
from tca_jax.calibration.probes import FOLLOWING, probed_texts
from tca_jax.loading import checkpoint_folder
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(block_size=8, window=16)
REACH = CONFIG.window + CONFIG.block_size
PAIRS = [("Who?", "She."), (b"When?", "Now.")]


class Tokenizer:
    """A character is a token; 1 begins a text."""

    bos_token = "^"
    chat_template = None

    def __call__(self, text, verbose=True, add_special_tokens=True):
        assert not verbose
        return {"input_ids": [1] * add_special_tokens + [ord(char) for char in text]}

    def decode(self, ids):
        return text_of(ids)


class ChatTokenizer(Tokenizer):
    chat_template = "there is one"

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert not tokenize
        if any("refused" in message["content"] for message in messages):
            raise RuntimeError("not\nthis")
        turns = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return f"^{turns}{'<assistant>' * add_generation_prompt}"


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


def text_of(ids):
    return "".join(map(chr, ids))


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


@pytest.mark.parametrize("probes", ["copy", None, [[([5], [6])]]])
@pytest.mark.parametrize("length", [REACH, REACH + 1, 100, REACH + FOLLOWING, 1000])
def test_the_last_tokens_are_a_probe(length, probes):
    (text,) = probed_texts(Encoder(), [distinct(length)], probes, CONFIG)
    assert len(text.ids) == max(REACH, length - FOLLOWING)
    ends = of_kind(text, "follow")
    assert len(ends) == (length > REACH)
    assert (*text.ids, *itertools.chain.from_iterable(end.ids for end in ends)) == tuple(distinct(length))
    assert all(all(end.answers) for end in ends)
    assert list(text.segments[: len(ends)]) == ends


def test_copies_are_four_passages():
    (text,) = probed_texts(Encoder(), [list(range(900))], None, dataclasses.replace(CONFIG, seed=5))  # no tokenizer
    assert [segment.kind for segment in text.segments] == ["follow", *["copy"] * 4]
    ranked, copies = CONFIG.num_ranked_blocks(len(text.ids)) * 8, of_kind(text, "copy")
    for copy in copies:
        np.testing.assert_array_equal(copy.ids, copy.ids[0] + np.arange(128))
        assert copy.ids[-1] < ranked
        assert copy.answers == (False,) * 16 + (True,) * 112
    assert sorted(copy.ids[0] // (ranked // 4) for copy in copies) == list(range(4))  # one in each quarter


@pytest.mark.parametrize("probes", ["copy", "facts", None])
@pytest.mark.parametrize("room", [0, 10, 60, 100, 200, 3000])
@pytest.mark.parametrize("length", [0, 1, 40, 300, 3000])
def test_texts_lose_first_tokens_for_their_probes(length, room, probes):
    ids, most = lines(REACH + min(length, room)), REACH + room
    (text,) = probed_texts(Encoder(most, shipped_tokenizer()), [ids], probes, CONFIG)
    assert REACH <= len(text.ids) <= len(ids)
    assert text.ids[0] == ids[0]
    assert all(len(text.ids) + len(segment.ids) <= most for segment in text.segments)
    assert text.ids[-CONFIG.window :] == tuple(ids[: REACH + max(0, len(ids) - REACH - FOLLOWING)][-CONFIG.window :])
    assert all(any(segment.answers) for segment in text.segments)


@pytest.mark.parametrize("chat", [True, False])
def test_facts_are_lines_whose_values_count(chat):
    tokenizer = shipped_tokenizer(**({} if chat else {"chat_template": None}))
    ids = lines(20_000)
    (text,) = probed_texts(Encoder(32_768, tokenizer), [ids], "facts", CONFIG)
    assert len(text.ids) == len(ids) - FOLLOWING
    decoded = tokenizer.decode(text.ids)
    ranked = decoded[: CONFIG.num_ranked_blocks(len(text.ids)) * 8]
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
    (text,) = probed_texts(Encoder(32_768, tokenizer), [lines(length)], "facts", CONFIG)
    decoded = tokenizer.decode(text.ids)
    hidden = [f.lines for f in draw_facts(np.random.default_rng([0, 0, 1])) if f.values[0] in decoded]
    assert len(hidden) == len(of_kind(text, "facts")) <= 14
    assert sum(len(line) + 1 for lines in hidden for line in lines) <= len(text.ids) / 10
    assert bool(hidden) == (length >= 1000)


@pytest.mark.parametrize(
    ("tokenizer", "rendered"),
    [
        (Tokenizer(), ["\nWho? She.", "\nWhen? Now."]),
        (ChatTokenizer(), ["<user>Who?<assistant>She.", "<user>When?<assistant>Now."]),
    ],
)
def test_pairs_are_lines_or_turns(tokenizer, rendered):
    (text,) = probed_texts(Encoder(tokenizer=tokenizer), [distinct(100)], [PAIRS], CONFIG)
    assert [segment.kind for segment in text.segments] == ["follow", "pairs", "pairs"]
    assert [text_of(pair.ids) for pair in of_kind(text, "pairs")] == rendered
    # These tokenizers do not say which characters a token is made of.
    assert all(all(pair.answers) for pair in of_kind(text, "pairs"))


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
        (STRIPS, " S\n", "S"),
        (ANNOUNCES, "S", "S"),
        (WRITES_MORE, "S", "S"),
        (REWRITES, "She.", "WHO? HE?;SHE.;"),
    ],
)
def test_answer_tokens_count_alone(template, answer, expected):
    tokenizer = shipped_tokenizer(**({} if template is ... else {"chat_template": template}))
    (text,) = probed_texts(Encoder(tokenizer=tokenizer), [list(range(65, 165))], [[("Who? He?", answer)]], CONFIG)
    (pair,) = of_kind(text, "pairs")
    assert "".join(tokenizer.decode(run) for run in counted(pair)).strip() == expected.strip()


FORMS = r"probes = .*: must be 'facts', 'copy', a list of these, a list of \(question, answer\) pairs for each text"
PAIRED = r": must be a list of \(question, answer\) pairs, at least one, all text or all token ids, none empty"


@pytest.mark.parametrize(
    ("probes", "message"),
    [
        *((probes, FORMS) for probes in ("copies", 7, b"copy", {"a": "b"}, ["copy", "text"], ["copy", [("q", "a")]])),
        ([[("q", "a")]] * 2, r"probes has 2 lists of pairs: must have one for each of 1 texts"),
        *(
            ([pairs], r"probes\[0\]" + PAIRED)
            for pairs in ([], ("q", "a"), [("q", "a", "b")], b"qa", [("q", [1, 2])], [("q", "")], [([], [1])])
        ),
        ([[("q", b"\xff")]], r"probes\[0\]\[0\] is not valid UTF-8"),
        ([[("q", "refused")]], r"probes\[0\]: the chat template of tiny does not take .*: not this"),
        ([[([1], [1000])]], r"probes\[0\]\[0\] \(answer\) holds token id 1000"),
        ([[("q", "a"), ("q" * 4060, "a")]], r"24 tokens without its end, its longest pair 40..: model 'tiny' has 4096"),
    ],
)
def test_wrong_probes_are_refused_by_name(probes, message):
    with pytest.raises(ValueError, match=message):
        unchecked(probed_texts)(Encoder(tokenizer=ChatTokenizer()), [distinct(100)], probes, CONFIG)
