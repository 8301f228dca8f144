"""Probes behind texts: copies, the last quarter, questions and answers; and what is refused."""

import dataclasses
import itertools

import numpy as np
import pytest
from cases import unchecked
from transformers import AutoTokenizer

from tca_jax.calibration.probes import probe_kind, probed_texts
from tca_jax.loading import checkpoint_folder
from tca_jax.methods.config import TCAConfig
from tca_jax.models.config import ModelConfig

CONFIG = TCAConfig(block_size=8, window=16)
REACH = CONFIG.window + CONFIG.block_size


class Tokenizer:
    """A character is a token; 1 begins a text."""

    bos_token = "^"
    chat_template = None

    def __call__(self, text, verbose=True, add_special_tokens=True):
        assert not verbose
        return {"input_ids": [1] * add_special_tokens + [ord(char) for char in text]}


class ChatTokenizer(Tokenizer):
    chat_template = "there is one"

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert not tokenize
        if any("refused" in message["content"] for message in messages):
            raise RuntimeError("not\nthis")
        turns = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return f"^{turns}<assistant>" if add_generation_prompt else f"^{turns}"


@dataclasses.dataclass
class Encoder:
    """A model that only encodes."""

    max_context: int = 4096
    tokenizer: object = None
    name: str = "tiny"

    @property
    def config(self) -> ModelConfig:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        return ModelConfig.from_hf(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 1000,
                "num_key_value_heads": 1,
                "max_position_embeddings": self.max_context,
                **sizes,
            }
        )


def distinct(length: int) -> list[int]:
    """Ids that are never the same at 128 tokens' distance."""
    return [position % 997 for position in range(length)]


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_copies_are_eight_passages_spread_over_the_ranked_region_in_another_order():
    ids = list(range(900)) + [0] * 80 + [999] * 20
    (text,) = probed_texts(Encoder(), [ids[:900]], "copy", TCAConfig(block_size=8, window=16, seed=5))
    assert (text.ids[:900], text.text_tokens, text.probe_start) == (ids[:900], 900, 900)
    ranked = CONFIG.num_ranked_blocks(900) * 8
    count = ranked // 128
    assert text.num_probe == 128 * count == 768
    starts = []
    for passage in np.split(np.array(text.ids[900:]), count):
        np.testing.assert_array_equal(passage, passage[0] + np.arange(128))
        assert passage[-1] < ranked
        starts.append(int(passage[0]))
    assert sorted(start // (ranked // count) for start in starts) == list(range(count))  # one in each stratum
    assert starts != sorted(starts)
    (long,) = probed_texts(Encoder(), [distinct(3000)], "copy", CONFIG)
    assert long.num_probe == 1024


def test_copies_depend_on_the_seed_and_on_nothing_that_changes_from_call_to_call():
    texts = [distinct(2000), distinct(2000)]
    first = probed_texts(Encoder(), texts, "copy", CONFIG)
    assert first == probed_texts(Encoder(), texts, "copy", CONFIG)
    assert first[0].ids != first[1].ids  # two texts do not repeat the same places
    for seed in (-1, 1):
        assert probed_texts(Encoder(), texts, "copy", dataclasses.replace(CONFIG, seed=seed)) != first


@pytest.mark.parametrize("length", [REACH, REACH + 1, 40, 100, 500, 512])
@pytest.mark.parametrize("max_context", [512, 530, 4096])
def test_copies_of_short_texts_are_fewer_and_no_probe_passes_the_models_positions(length, max_context):
    (text,) = probed_texts(Encoder(max_context), [distinct(length)], "copy", CONFIG)
    assert REACH <= text.text_tokens <= length
    assert len(text.ids) <= max_context
    assert text.num_probe >= 8
    assert text.ids[: text.text_tokens] == distinct(text.text_tokens)
    if length + text.num_probe < max_context:
        assert text.text_tokens == length


def test_a_model_whose_positions_end_with_the_shortest_text_gets_no_copies():
    (text,) = probed_texts(Encoder(REACH), [distinct(REACH)], "copy", CONFIG)
    assert (text.num_probe, text.text_tokens) == (0, REACH)


def test_the_last_quarter_of_a_text_is_its_own_probe_behind_at_least_one_ranked_block():
    texts = probed_texts(Encoder(), [distinct(100), distinct(REACH + 2), distinct(REACH)], "text", CONFIG)
    assert [text.probe_start for text in texts] == [75, REACH, REACH]
    assert [text.text_tokens for text in texts] == [100, REACH + 2, REACH]
    assert texts[0].ids == distinct(100)


def test_no_probes_leave_the_texts_alone():
    (text,) = probed_texts(Encoder(), [distinct(100)], None, CONFIG)
    assert (text.ids, text.text_tokens, text.probe_start, text.num_probe) == (distinct(100), 100, 100, 0)


def test_pairs_of_text_are_lines_behind_the_text_and_begin_no_second_text():
    lm = Encoder(tokenizer=Tokenizer())
    (text,) = probed_texts(lm, [distinct(100)], [[("Who?", "She."), (b"When?", "Now.")]], CONFIG)
    assert text_of(text.ids[100:]) == "\nWho? She.\n\nWhen? Now.\n"
    assert (text.text_tokens, text.probe_start) == (100, 100)


def test_pairs_of_text_are_turns_of_the_chat_template_where_there_is_one():
    lm = Encoder(tokenizer=ChatTokenizer())
    (text,) = probed_texts(lm, [distinct(100)], [[("Who?", "She."), ("When?", "Now.")]], CONFIG)
    assert text_of(text.ids[100:]) == "<user>Who?<assistant>She.<user>When?<assistant>Now."


def test_pairs_of_token_ids_need_no_tokenizer():
    texts = probed_texts(Encoder(), [distinct(100), distinct(50)], [[([5, 6], [7])], [((1,), np.array([2]))]], CONFIG)
    assert [text.ids[text.probe_start :] for text in texts] == [[5, 6, 7], [1, 2]]


def shipped_tokenizer(**changes):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder("recall-tiny"))
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


@pytest.mark.parametrize(
    ("changes", "answers"),
    [
        ({}, ["She.<|eos|>", "Now.<|eos|>"]),
        ({"chat_template": None}, ["She.\n", "Now.\n"]),
        # A template that says nothing of earlier answers: which tokens are answers cannot be told.
        ({"chat_template": "{{ messages[-1].content }}{% if add_generation_prompt %}?{% endif %}"}, ["Now."]),
    ],
)
def test_the_tokens_of_answers_count_and_those_of_questions_do_not(changes, answers):
    tokenizer = shipped_tokenizer(**changes)
    text_ids = list(range(65, 165))
    (text,) = probed_texts(Encoder(tokenizer=tokenizer), [text_ids], [[("Who?", "She."), ("When?", "Now.")]], CONFIG)
    ids, counts = text.ids[text.probe_start :], text.answers
    runs = [
        [token for token, _ in run]
        for count, run in itertools.groupby(zip(ids, counts, strict=True), lambda one: one[1])
        if count
    ]
    assert [tokenizer.decode(run) for run in runs] == answers
    np.testing.assert_array_equal(text.counted, counts[1:])


def test_of_token_ids_answers_count_and_of_other_probes_all_tokens():
    (text,) = probed_texts(Encoder(), [distinct(100)], [[([5, 6], [7]), ([8], [9, 10])]], CONFIG)
    assert text.answers == (False, False, True, False, True, True)
    for kind in ("copy", "text"):
        (text,) = probed_texts(Encoder(), [distinct(100)], kind, CONFIG)
        assert text.counted.sum() == text.num_probe - 1


@pytest.mark.parametrize(
    ("probes", "error", "message"),
    [
        ("copies", ValueError, r"probes = 'copies': must be 'copy', 'text', a list of \(question, answer\) pairs"),
        (7, TypeError, r"probes is of type int: must be 'copy'"),
        ({"a": "b"}, TypeError, r"probes is of type dict: must be 'copy'"),
        ([], ValueError, r"probes has 0 lists of pairs: must have one for each of 1 texts"),
        ([[("q", "a")]] * 2, ValueError, r"probes has 2 lists of pairs: must have one for each of 1 texts"),
        ([[]], ValueError, r"probes\[0\] is empty: at least one \(question, answer\) pair"),
        ([("q", "a")], TypeError, r"probes\[0\]\[0\] = 'q': must be a pair"),
        ([[("q", "a", "b")]], TypeError, r"probes\[0\]\[0\] = \('q', 'a', 'b'\): must be a pair"),
        ([[("q", "a"), {"q": "a", "b": 1}]], TypeError, r"probes\[0\]\[1\] = .* must be a pair"),
        (["qa"], TypeError, r"probes\[0\] is of type str: must be a list"),
        ([[("q", [1, 2])]], TypeError, r"probes\[0\] holds text and token ids"),
        ([[("q", "")]], ValueError, r"probes\[0\]\[0\] holds an empty question or answer"),
        ([[("q", b"\xff")]], ValueError, r"probes\[0\]\[0\] is not valid UTF-8"),
        ([[("q", "refused")]], ValueError, r"probes\[0\]: the chat template of tiny does not take .*: not this"),
        ([[([1], [1000])]], ValueError, r"probes\[0\]\[0\] \(answer\) holds token id 1000"),
        ([[([], [1])]], ValueError, r"probes\[0\]\[0\] \(question\) is empty"),
        ([[("q" * 4000, "a")]], ValueError, r"texts\[0\] has 100 tokens, its pairs 40..: model 'tiny' has 4096 posit"),
    ],
)
def test_probes_that_cannot_be_used_are_refused_by_name(probes, error, message):
    with pytest.raises(error, match=message):
        unchecked(probed_texts)(Encoder(tokenizer=ChatTokenizer()), [distinct(100)], probes, CONFIG)


def test_pairs_of_text_for_a_model_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match=r"probes\[0\]: tiny was loaded without a tokenizer.* pairs of token ids"):
        probed_texts(Encoder(), [distinct(100)], [[("q", "a")]], CONFIG)


def test_the_kind_of_probes_is_told_by_their_form():
    assert [probe_kind(probes) for probes in ("copy", "text", None, [[("q", "a")]])] == ["copy", "text", None, "pairs"]
