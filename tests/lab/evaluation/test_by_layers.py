"""Methods by masks, a layer at a time, against the engine: contexts and their answers, whole texts, repetitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax import methods
from tca_jax.engine.prompts import pad_tokens
from tca_jax.engine.score import score_answers
from tca_jax.errors import UserError
from tca_jax.lab.evaluation.by_layers import ask, read_by, read_full, read_losses, repetition_scores
from tca_jax.lab.rivals.repetition import Repetition, attention_to_prompts, read_everything

BLOCK, WINDOW, LENGTH = 16, 32, 227  # 14 blocks and 3 tokens, of which 12 blocks are ranked
SIZES = {"window": WINDOW, "block_size": BLOCK}
DOCUMENT = random_prompt(0, LENGTH)
#: No token of these starts a block behind the document, so none pushes a block out of the window: LENGTH % BLOCK plus
#: the tokens of a question and its answer is at most BLOCK.
SHORT = [(random_prompt(1, 7), random_prompt(2, 5)), (random_prompt(3, 2), random_prompt(4, 11))]
#: Past three edges of blocks, for methods that keep all blocks which leave the window behind a prompt.
LONG = [(random_prompt(5, 30), random_prompt(6, 25)), (random_prompt(7, 3), random_prompt(8, 20))]

CONFIG = tca_jax.TCAConfig(**SIZES, reserve=5, observation=8, spread=2, fetch=2, fetch_stride=4)
CANDIDATES, PREFILL = [[2, 9], [CONFIG.num_candidates, 0]], [[0, 4], [3, 0]]
READINGS = [["sparse", "blocks"], ["dense", "sparse"]]
GATES = [[0.9, 0.1], [0.3, 0.6]]
#: Methods that drop what leaves the window behind a prompt; the others keep it.
LEAVING = ("streaming", "duoattention")
HEAVY = ("adakv", "adakv-expected-attention", "kvzip")
METHODS = {
    "full": {},
    "snapkv": {**SIZES, "share": 0.3, "observation": 8},
    "keydiff": {**SIZES, "share": 0.3},
    "adakv": {**SIZES, "share": 0.3, "observation": 8},
    "adakv-expected-attention": {**SIZES, "share": 0.3},
    "kvzip": {**SIZES, "share": 0.3, "chunk": 90},
    "streaming": {**SIZES, "sinks": 20},
    "duoattention": {**SIZES, "sinks": 20, "gates": GATES, "dense_prefill": True},
}
TCA = {
    "readings": {"config": CONFIG, "prefill_candidates": PREFILL, "readings": READINGS},
    "paper": {"config": tca_jax.TCAConfig.paper(**SIZES)},
}


@pytest.fixture(scope="module")
def model():
    return tiny_lm()


@pytest.fixture(scope="module")
def full(model):
    return read_full(model, DOCUMENT)


def heavy(name):
    return pytest.param(name, marks=pytest.mark.integration)


def rows_of(pairs):
    rows = np.zeros((len(pairs), 64), np.int32)
    for row, (question, answer) in zip(rows, pairs, strict=True):
        row[: len(question) + len(answer)] = [*question, *answer]
    return rows


def check(lm, full, pairs):
    """Compares answers and shares with those of a context; returns the share that is kept."""
    scores = None if lm.method.cache.reader is None else repetition_scores(lm, full)
    read = read_by(lm, full, scores)
    found = ask(lm, read, rows_of(pairs))
    context = tca_jax.prefill(lm, DOCUMENT)
    questions, answers = zip(*pairs, strict=True)
    expected = score_answers(lm, questions, [[answer] for answer in answers], context=context)
    for row, (question, answer) in enumerate(pairs):
        part = slice(len(question) - 1, len(question) + len(answer) - 1)
        np.testing.assert_allclose(-found.losses[row, part], expected.logprobs[row][0], atol=1e-4)
        assert found.right[row, part].all() == expected.greedy[row][0]
    assert read.kept_share == pytest.approx(context.stats.kept_share, abs=1e-6)
    assert read.attended_share == pytest.approx(context.stats.attended_share, rel=1e-5)
    return read.kept_share


@pytest.mark.parametrize("name", [heavy(name) if name in HEAVY else name for name in METHODS])
def test_contexts_answer_as_the_engines(model, full, name):
    kept = check(model.with_method(name, **METHODS[name]), full, SHORT if name in LEAVING else LONG)
    assert kept == pytest.approx(1) if name == "full" else kept < 0.7


@pytest.mark.parametrize("name", [heavy("readings"), "paper"])
def test_tca_contexts_answer_as_the_engines(model, full, name):
    assert check(model.with_method("tca", candidates=CANDIDATES, **TCA[name]), full, SHORT) < 0.7


@pytest.mark.integration
def test_repetition_scores_are_the_engines(model, full):
    method = methods.get("kvzip", **METHODS["kvzip"])
    words = Repetition(90, 4, opening=(5, 6, 7), continuing=(8, 9), answer=(10,))
    cache = dataclasses.replace(method.cache, repetition=words)
    lm = dataclasses.replace(model, method=dataclasses.replace(method, cache=cache))  # the tiny model has no words
    tokens, lengths = map(jnp.asarray, pad_tokens([DOCUMENT]))
    wanted = (LENGTH // BLOCK * BLOCK - WINDOW) * jnp.ones(1, jnp.int32)

    def of_engine(lm, tokens, lengths):
        _, held = read_everything(lm, tokens, lengths)
        return attention_to_prompts(lm, words, held, tokens, lengths, wanted, LENGTH)

    expected = np.asarray(jax.jit(of_engine)(lm.for_programs(), tokens, lengths))
    found = np.asarray(repetition_scores(lm, full))
    assert np.ptp(expected[..., 4 : int(wanted[0])]) > 0.05
    np.testing.assert_allclose(found[..., :LENGTH], expected[..., :LENGTH], atol=1e-5)


@pytest.mark.parametrize("name", ["kvzip", "tca"])
def test_read_losses_are_those_of_score(model, name):
    """The engine reads a text to its end, too, so methods that select by its last queries select the same."""
    options = {"candidates": CANDIDATES, "config": CONFIG} if name == "tca" else METHODS[name]
    lm = model.with_method(name, **options)
    losses, attended = read_losses(lm, DOCUMENT)
    expected = tca_jax.score(lm, DOCUMENT)
    np.testing.assert_allclose(-losses, expected.logprobs[0], atol=1e-4)
    assert attended == pytest.approx(expected.attended_share[0], rel=1e-5)
    assert (attended < 0.9) == (name == "tca")


@pytest.mark.integration
def test_greedy_answers_are_right_to_their_end(model, full):
    """As a fact counts: all tokens of a value are the likeliest exactly if greedy decoding begins with it."""
    (question, _), read = SHORT[0], read_by(model, full)
    context = tca_jax.prefill(model, DOCUMENT)
    (said,) = tca_jax.generate(model, question, context=context, max_new_tokens=4, stop_token_ids=()).tokens
    for place in range(4):
        other = [*said[:place], (said[place] + 1) % 97, *said[place + 1 :]]
        right = ask(model, read, rows_of([(question, said), (question, other)])).right[:, 6:10]
        assert right[0].all()
        assert right[1, : place + 1].tolist() == [True] * place + [False]


def test_rows_do_not_see_each_other(model, full):
    read, (one, other) = read_by(model, full), LONG
    found, beside = (ask(model, read, rows_of([first, other])) for first in (one, SHORT[0]))
    np.testing.assert_allclose(found.losses[1, :22], beside.losses[1, :22], atol=1e-5)


def test_methods_without_masks_are_refused(model, full):
    with pytest.raises(UserError, match="quest chooses what each step attends to"):
        read_by(model.with_method("quest"), full)
