"""Pairs of methods, streamed: the pieces join to the answers, of a batch and over a context."""

import pytest
from tiny import write_checkpoint

import tca_jax

GEOMETRY = {"block_size": 16, "window": 32}
PARTS = {
    "minference": {"blocks": 2, "block_size": 16, "dense_tokens": 16},
    "flexprefill": {"min_budget": 32, "block_size": 16},
    "xattention": {"threshold": 0.6, "stride": 4, "block_size": 16, "dense_tokens": 16},
    "snapkv": {"share": 0.3, "observation": 4, **GEOMETRY},
    "cake": {"preferences": [0.3, 0.7], "share": 0.3, "observation": 4, **GEOMETRY},
    "tca": {"candidates": 3, "config": tca_jax.TCAConfig(**GEOMETRY)},
}
PROMPTS = ["for i in range(3):\n    print(i)\n" * 4, "a word " * 20]


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return tca_jax.load(write_checkpoint(tmp_path_factory.mktemp("streams") / "tiny"))


@pytest.mark.parametrize("pair", ["minference+snapkv", "flexprefill+cake", "flexprefill+tca", "xattention+snapkv"])
def test_the_pieces_of_a_pair_join_to_its_answers(lm, pair):
    model = lm.with_method(pair, **{part: PARTS[part] for part in pair.split("+")})
    options = {"max_new_tokens": 20, "stop_token_ids": ()}
    pieces = tca_jax.stream(model, PROMPTS, **options)
    out = tca_jax.generate(model, PROMPTS, **options)
    assert ["".join(row) for row in zip(*pieces, strict=True)] == out.text
    context = tca_jax.prefill(model, PROMPTS[0])
    over = {"context": context, **options}
    assert ["".join(tca_jax.stream(model, " and?", **over))] == tca_jax.generate(model, " and?", **over).text
