"""Methods at equal held bytes."""

import pytest
from tiny import tiny_lm

import tca_jax
from tca_jax.lab.equal_bytes import least_share, with_bytes

GATES = [[0, 1], [0.2, 0.3]]
SMALL = {"window": 128, "block_size": 128}
MEMBERS = {
    "snapkv": {},
    "cake": {"preferences": [1, 2]},
    "duoattention": {"gates": GATES, "sinks": 4},
    "expected-attention": {},
    "kvzip": {},
    "kvzip-heads": {"head_scores": GATES},
    "pyramidkv": {},
    "random": SMALL,
    "streaming": {},
    "uniform": {"config": tca_jax.TCAConfig(window=128)},
    "full+random": {"random": SMALL},
    "snapkv+cake": {"cake": {"preferences": [1, 2]}},
}


def share_of(lm, tokens, rows):
    mine, full = (model.cache_layout(rows, tokens).num_bytes(16, "float32") for model in (lm, lm.with_method("full")))
    return mine / full


@pytest.mark.parametrize("name", MEMBERS)
def test_caches_take_nearly_the_asked_share(name):
    model = with_bytes(tiny_lm(), name, 0.55, 16384, **MEMBERS[name])
    taken = share_of(model, 16384, rows=1)
    assert max(taken, share_of(model, 16384, rows=8)) <= 0.55
    knob_steps = {"duoattention": 0.25, "kvzip-heads": 0.25, "uniform": 0.2}  # whole heads; whole candidates
    assert taken > 0.55 - knob_steps.get(name, 0.02)
    assert model.method.name == name


@pytest.mark.parametrize(
    ("name", "share", "options", "message"),
    [
        ("full", 0.5, {}, r"method 'full' has no option that moves its budget"),
        ("snapkv+tca", 0.5, {"tca": {"candidates": 3}}, r"method 'snapkv\+tca' has no option .* \('tca' takes"),
        ("random", 0.25, {}, r"kv_share = 0.25: must be at least 0.5\d*, what 'random' takes .* 8192 tokens"),
        ("random", 0, {}, r"kv_share = 0: must lie in \(0, 1\]"),
        ("nope", 0.5, {}, r"method 'nope' is not registered"),
    ],
)
def test_impossible_shares_are_refused(name, share, options, message):
    with pytest.raises(ValueError, match=message):
        with_bytes(tiny_lm(), name, share, 8192, **options)


def test_least_share_is_rounded_up():
    assert [least_share(share) for share in (0.1, 0.12341, 0.12349, 0.0)] == ["0.1000", "0.1235", "0.1235", "0.0000"]
