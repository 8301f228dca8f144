"""Methods at equal held bytes."""

import pytest
from tiny import random_prompt, tiny_lm

import tca_jax
from tca_jax.lab.equal_bytes import with_bytes

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


def share_of(lm, tokens, new_tokens, rows):
    room = tca_jax.engine.prompts.bucket_length(new_tokens) - 1 if new_tokens else 0
    mine, full = (
        model.cache_layout(rows, tokens, room).num_bytes(16, "float32") for model in (lm, lm.with_method("full"))
    )
    return mine / full


@pytest.mark.parametrize("new_tokens", [64, None])
@pytest.mark.parametrize("name", MEMBERS)
def test_caches_take_nearly_the_asked_share(name, new_tokens):
    lm = tiny_lm()
    model = with_bytes(lm, name, 0.55, 16384, new_tokens, **MEMBERS[name])
    taken = share_of(model, 16384, new_tokens, rows=1)
    assert max(taken, share_of(model, 16384, new_tokens, rows=8)) <= 0.55
    knob_steps = {"duoattention": 0.25, "kvzip-heads": 0.25, "uniform": 0.2}  # whole heads; whole candidates
    assert taken > 0.55 - knob_steps.get(name, 0.02)
    assert model.method.name == name


@pytest.mark.parametrize("document", [1000, 1023])  # a question of 30 tokens ends in one block or in two
def test_contexts_take_the_asked_share(document):
    lm = tiny_lm()
    model = with_bytes(lm, "random", 0.55, document, 64, question_tokens=30, **SMALL)
    context = tca_jax.prefill(model, random_prompt(0, document))
    question = random_prompt(1, 30)
    stats = tca_jax.generate(model, question, context=context, max_new_tokens=64, stop_token_ids=()).stats
    assert 0.45 < stats.kv_cache_bytes / stats.full_kv_cache_bytes <= 0.55


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
        with_bytes(tiny_lm(), name, share, 8192, 16, **options)
