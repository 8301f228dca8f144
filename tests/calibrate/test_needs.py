"""Rounds that find the heads which a probe needs, on models that are written down: tokens are lost unless heads see."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from sharp_lm import make_lm

from tca_jax.calibration import needs
from tca_jax.calibration.needs import ReadProbe, find_needed
from tca_jax.calibration.probes import ProbedText
from tca_jax.methods.config import TCAConfig

CONFIG = TCAConfig(num_candidates=4)
LAYERS, HEADS, TOKENS = 3, 2, 8  # of the probe, whose last token foretells nothing


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of the probe that costs `loss` nats more unless every one of `heads` has a row that is dense `enough`."""

    loss: float
    heads: tuple[tuple[int, int], ...]


class Model:
    """Losses of a probe, and their slopes: a head shows its share only once it is the last that is missing."""

    def __init__(self, tokens: dict[int, Token], noise: np.ndarray, enough: int = 4, gain: float = 3) -> None:
        self.tokens, self.noise, self.enough, self.gain, self.read = tokens, noise, enough, gain, []

    def losses(self, rows):
        self.rows = rows
        self.read.append(rows.copy())
        out = np.ones(TOKENS, np.float32)
        for place, token in self.tokens.items():
            out[place] += token.loss * any(rows[head] < self.enough for head in token.heads)
        return out

    def relief(self, queries):
        found = self.noise * queries.sum()
        for place, token in self.tokens.items():
            missing = [head for head in token.heads if self.rows[head] < self.enough]
            if len(missing) == 1:
                found[missing[0]] += self.gain * token.loss * queries[place]
        return found


FLAT = (0.8, 0.8, 0.8, 0.8, 0.0)  # what the rows drop of each query's attention


def find(monkeypatch, *models: Model, least: float = 0.0, drops=FLAT):
    monkeypatch.setattr(needs, "_Readings", lambda *_: SimpleNamespace(get=lambda number: models[number]))
    masses = np.tile(np.array(drops, np.float32), (HEADS, TOKENS, 1))
    text = ProbedText(list(range(2 * TOKENS)), TOKENS, TOKENS)
    probes = [ReadProbe(text, np.ones(TOKENS, np.float32), [masses] * LAYERS) for _ in models]
    prefill = np.zeros((LAYERS, HEADS), np.int32)
    return find_needed(make_lm(), probes, prefill, CONFIG, least=least, step=lambda: None)


@pytest.fixture
def noise():
    return np.random.default_rng(0).random((LAYERS, HEADS)) * 0.01


def dense(found) -> list[tuple[int, int]]:
    return [tuple(map(int, head)) for head in np.argwhere(found.blame[..., 0] >= 0.5)]


def test_a_head_that_one_token_needs_is_found_behind_one_that_all_need(monkeypatch, noise):
    loud = {place: Token(4.0, ((2, 1),)) for place in range(6)}
    models = [Model(loud, noise) for _ in range(5)]
    models[3] = Model({**loud, 6: Token(1.0, ((0, 0), (2, 1)))}, noise)
    found = find(monkeypatch, *models)
    assert dense(found) == [(0, 0), (2, 1)]
    assert found.blame[2, 1, 0] > found.blame[0, 0, 0] > 0.5  # a kept share takes the loud one first
    assert found.rounds == 2
    assert found.need == pytest.approx(5 * 24 + 1)


def test_heads_that_only_work_together_are_found_one_after_the_other(monkeypatch, noise):
    chain = {0: Token(5.0, ((2, 0),)), 1: Token(5.0, ((2, 0), (1, 1))), 2: Token(5.0, ((2, 0), (1, 1), (0, 1)))}
    found = find(monkeypatch, Model(chain, noise))
    assert dense(found) == [(0, 1), (1, 1), (2, 0)]
    assert found.rounds == 3


def test_texts_that_lose_nothing_any_more_are_not_read_again(monkeypatch, noise):
    done = Model({0: Token(5.0, ((2, 0),))}, noise)
    more = Model({0: Token(5.0, ((2, 0),)), 1: Token(5.0, ((2, 0), (1, 1)))}, noise)
    find(monkeypatch, done, more)
    assert (len(done.read), len(more.read)) == (2, 3)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_what_is_lost_by_no_heads_fault_or_by_a_little_of_all_blames_none(monkeypatch, share):
    found = find(monkeypatch, Model({0: Token(5.0, ((0, 0), (0, 1)))}, np.full((LAYERS, HEADS), share)))
    assert not found.blame.any()
    assert found.rounds == 1


LOUD = {place: Token(5.0, ((2, 1),)) for place in range(5)}


@pytest.mark.parametrize(("probes", "rounds"), [(1, 2), (33, 3)])
def test_where_little_is_left_heads_are_found_one_by_one(monkeypatch, noise, probes, rounds):
    models = [Model(LOUD, noise / 100) for _ in range(probes)]
    quiet = {5: Token(0.4, ((2, 1), (0, 0))), 6: Token(0.3, ((2, 1), (1, 1)))}
    models[-1] = Model({**LOUD, **quiet}, noise / 100, gain=1)
    found = find(monkeypatch, *models)
    assert dense(found) == [(0, 0), (1, 1), (2, 1)]
    assert found.rounds == rounds


@pytest.mark.parametrize(("probes", "needed"), [(1, [(0, 0), (2, 1)]), (60, [(2, 1)])])
def test_what_is_left_to_a_token_or_two_of_many_probes_is_chance(monkeypatch, noise, probes, needed):
    models = [Model(LOUD, noise) for _ in range(probes)]
    models[-1] = Model({**LOUD, 6: Token(0.2, ((2, 1), (0, 0)))}, noise)
    assert dense(find(monkeypatch, *models)) == needed


@pytest.mark.parametrize(("probes", "needed"), [(33, [(0, 0), (2, 1)]), (34, [(2, 1)])])
def test_what_fewer_than_three_probes_in_a_hundred_go_on_losing_finds_no_head(monkeypatch, noise, probes, needed):
    models = [Model(LOUD, noise) for _ in range(probes)]
    models[-1] = Model({**LOUD, 5: Token(5.0, ((2, 1), (0, 0))), 6: Token(5.0, ((2, 1), (0, 0)))}, noise)
    assert dense(find(monkeypatch, *models)) == needed


def test_small_rises_are_a_need_but_find_no_head(monkeypatch, noise):
    found = find(monkeypatch, Model({place: Token(0.05, ((0, 0),)) for place in range(7)}, noise))
    assert found.need == pytest.approx(0.35)
    assert found.rounds == 0
    assert not found.blame.any()


def test_too_little_need_ends_the_search(monkeypatch, noise):
    model = Model({0: Token(5.0, ((0, 0),))}, noise)
    assert dense(find(monkeypatch, model, least=5.0 / (TOKENS - 1))) == [(0, 0)]
    model.read.clear()
    assert not find(monkeypatch, model, least=5.1 / (TOKENS - 1)).blame.any()
    assert len(model.read) == 1


FALLING = (0.8, 0.8, 0.3, 0.1, 0.0)


def test_a_row_that_drops_less_than_half_of_what_the_head_drops_is_tried_first(monkeypatch, noise):
    model = Model({0: Token(5.0, ((2, 0),))}, noise, enough=2)
    found = find(monkeypatch, model, drops=FALLING)
    np.testing.assert_allclose(found.blame[2, 0], [1, 1, 0.375, 0.125, 0], atol=1e-6)
    assert [rows[2, 0] for rows in model.read] == [0, 2]
    assert found.rounds == 1


def test_where_that_row_is_not_enough_a_denser_one_follows(monkeypatch, noise):
    model = Model({0: Token(5.0, ((2, 0),))}, noise, enough=4)
    found = find(monkeypatch, model, drops=FALLING)
    assert [rows[2, 0] for rows in model.read] == [0, 2, 3, 4]
    np.testing.assert_array_equal(found.blame[2, 0], [1, 1, 1, 1, 0])


@pytest.mark.parametrize(("probes", "row"), [(10, 2), (11, 4)])
def test_a_head_that_few_probes_find_is_made_dense(monkeypatch, noise, probes, row):
    models = [Model(LOUD, noise, enough=2) for _ in range(probes)]
    models[-1] = Model({**LOUD, 6: Token(5.0, ((2, 1), (0, 0)))}, noise, enough=2)
    find(monkeypatch, *models, drops=FALLING)
    assert [rows[0, 0] for rows in models[-1].read] == [0, 0, row]
    assert [rows[2, 1] for rows in models[-1].read] == [0, 2, 2]


def test_a_model_that_computes_nan_is_named(monkeypatch, noise):
    with pytest.raises(ValueError, match="model 'tiny' computes NaN or infinity in the logits of a probe"):
        find(monkeypatch, Model({0: Token(float("nan"), ((0, 0),))}, noise))
