"""The search for heads on objectives that are written down: what it finds, what it costs, and what it leaves alone."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tca_jax.calibration.search import search

SHAPE = (2, 3)
HEADS = list(np.ndindex(SHAPE))
NONE = np.zeros(SHAPE, bool)


class Written:
    """An objective of a loss that is written down; derivatives are those of its multilinear extension, or noise."""

    def __init__(self, loss, gains=None):
        self._loss, self._gains, self.measured, self.derived = loss, gains, [], []

    def excess(self, more):
        assert more.dtype == bool
        self.measured.append(more.copy())
        return self._loss(more)

    def gains(self, more):
        self.derived.append(more.copy())
        if self._gains is not None:
            return self._gains(more)
        out = np.zeros(SHAPE)
        for head in HEADS:
            without, with_it = more.copy(), more.copy()
            without[head], with_it[head] = False, True
            out[head] = self._loss(without) - self._loss(with_it)
        return out


def sets():
    """All sets of heads, small ones first."""
    for size in range(len(HEADS) + 1):
        for heads in itertools.combinations(HEADS, size):
            more = NONE.copy()
            for head in heads:
                more[head] = True
            yield more


def smallest(loss, allowed=lambda more: True):
    """Fewest heads that reach the tolerance."""
    return next((int(more.sum()) for more in sets() if allowed(more) and loss(more) <= 1), None)


def additive(values):
    values = np.reshape(values, SHAPE)
    return lambda more: float(values[~more].sum())


def needs(*groups, weight=10.0):
    """A loss of `weight` for each group of which no set of heads is all there: group = alternatives of heads."""
    return lambda more: sum(
        weight * (not any(all(more[head] for head in heads) for heads in alternatives)) for alternatives in groups
    )


def check(found, loss):
    assert found.excess == loss(found.more)
    assert found.worth.shape == SHAPE
    assert (found.worth >= 0).all()


@settings(max_examples=80, deadline=None, database=None)
@given(st.lists(st.floats(0.01, 40), min_size=6, max_size=6))
def test_the_fewest_additive_heads_are_found(values):
    loss = additive(values)
    objective = Written(loss)
    found = search(objective, NONE)
    check(found, loss)
    assert found.excess <= 1
    assert found.more.sum() == smallest(loss)
    assert len(objective.measured) <= 1 + 2 * len(HEADS)


def test_derivatives_of_a_second_round_count():
    """The first gives a little alone, the second nothing before the first."""
    loss = lambda more: 30.0 - more[0, 0] - 29.0 * (more[0, 0] and more[1, 1])  # noqa: E731
    objective = Written(loss)
    found = search(objective, NONE)
    assert [tuple(head) for head in np.argwhere(found.more)] == [(0, 0), (1, 1)]
    assert found.excess == 0
    assert (found.worth[0, 0], found.worth[1, 1]) == (1, 29)  # each of the round that saw most of it
    assert [more.sum() for more in objective.derived] == [0, 1]


def test_without_derivatives_every_head_is_tried():
    values = [0.2, 3.0, 0.1, 9.0, 5.0, 0.3]
    loss = additive(values)
    objective = Written(loss, lambda more: np.zeros(SHAPE))
    found = search(objective, NONE)
    check(found, loss)
    assert found.more.tolist() == [[False, True, False], [True, True, False]]
    assert found.more.sum() == smallest(loss)
    assert not found.worth.any()
    assert [more.sum() for more in objective.measured[1:7]] == [1] * 6
    assert len(objective.measured) <= 3 * len(HEADS)


def test_start_heads_of_most_worth_stay():
    loss = additive([1, 5, 3, 4, 0, 2])
    start = ~NONE
    start[1, 0] = False
    found = search(Written(loss), start, lambda more: more.sum() <= 2 and not more[0, 1])
    assert found.more.tolist() == [[False, False, True], [False, False, True]]
    assert found.worth[0].tolist() == [1, 5, 3]
    start = NONE.copy()
    start[1, 2] = start[0, 0] = True  # without use
    found = search(Written(additive([0, 5, 0, 0, 0, 0])), start)
    assert found.more.tolist() == [[True, True, False], [False, False, True]]
    assert found.worth[0, 0] == found.worth[1, 2] == 0  # no head is derived that is more already


@settings(max_examples=60, deadline=None, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    noisy=st.booleans(),
    most=st.integers(0, 6),
)
def test_a_search_takes_three_losses_a_head(seed, noisy, most):
    rng = np.random.default_rng(seed)
    groups = [[[HEADS[i] for i in rng.permutation(6)[: rng.integers(1, 4)]] for _ in range(2)] for _ in range(3)]
    weights = rng.uniform(0, 8, SHAPE)
    loss = lambda more: needs(*groups)(more) + float(weights[~more].sum())  # noqa: E731
    objective = Written(loss, (lambda more: rng.standard_normal(SHAPE)) if noisy else None)
    found = search(objective, NONE, lambda more: more.sum() <= most)
    check(found, loss)
    assert len(objective.measured) == len({more.tobytes() for more in objective.measured})
    assert len(objective.measured) <= 1 + 3 * len(HEADS)
    assert all(more.sum() <= most for more in [found.more, *objective.measured])
    for head in np.argwhere(found.more):
        less = found.more.copy()
        less[tuple(head)] = False
        assert loss(less) > max(1, found.excess)
