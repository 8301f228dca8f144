"""TCAConfig: its presets and every error on its fields."""

import dataclasses

import numpy as np
import pytest

from tca_jax.methods.config import TCAConfig


def test_the_paper_preset_is_the_papers():
    paper = TCAConfig.paper()
    assert (paper.block_size, paper.window, paper.alpha, paper.tau) == (128, 4096, 0.5, 0.9)
    assert (paper.density, paper.criterion) == ("paper", "column_mean")
    assert (paper.reserve_tokens, paper.num_queries) == (0, 1)
    assert TCAConfig.paper(window=512).window == 512


def test_the_reserve_follows_the_window_unless_it_is_given():
    assert (TCAConfig().reserve_tokens, TCAConfig(window=512).reserve_tokens) == (512, 64)
    assert TCAConfig(window=512, reserve=7).reserve_tokens == 7
    assert TCAConfig(observation=9).num_queries == 9
    assert TCAConfig(observation=9, reserve=0).num_queries == 1  # nobody looks at the others


def test_it_is_hashable_and_takes_numpy_numbers():
    assert TCAConfig(window=512, alpha=np.float64(0.5)) == TCAConfig(window=512, alpha=0.5)
    assert hash(TCAConfig()) == hash(dataclasses.replace(TCAConfig()))


@pytest.mark.parametrize(
    ("length", "blocks"), [(1, 0), (4096 + 127, 0), (4096 + 128, 1), (4096 + 255, 1), (131072, 992)]
)
def test_ranked_blocks_are_the_whole_blocks_beyond_the_window(length, blocks):
    assert TCAConfig().num_ranked_blocks(length) == blocks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 96}, r"TCAConfig.block_size = 96: must be a power of two"),
        ({"block_size": 0}, r"TCAConfig.block_size = 0: must be a power of two"),
        ({"block_size": True}, r"TCAConfig.block_size = True: must be an integer"),
        ({"window": 4000}, r"TCAConfig.window = 4000: must be a positive multiple of block_size = 128"),
        ({"window": 0}, r"TCAConfig.window = 0"),
        ({"num_candidates": 1}, r"num_candidates = 1: must lie in \[2, 1024\]"),
        ({"sigma": 0.0}, r"TCAConfig.sigma = 0.0: must be positive"),
        ({"alpha": 1.5}, r"TCAConfig.alpha = 1.5: must lie in \[0, 1\]"),
        ({"sigma": 10**400}, r"TCAConfig.sigma = 10+: must be a finite number"),
        ({"density": "random", "seed": 2**32}, r"TCAConfig.seed = 4294967296: must lie in \[0, 2\^32\)"),
        ({"alpha": float("nan")}, r"TCAConfig.alpha = nan: must be a finite number"),
        ({"reserve": -1}, r"TCAConfig.reserve = -1: must be at least 0, or None for window // 8"),
        ({"reserve": True}, r"TCAConfig.reserve = True: must be an integer"),
        ({"observation": 0}, r"TCAConfig.observation = 0: must be at least 1"),
        ({"spread": 0}, r"TCAConfig.spread = 0: must be at least 1"),
        ({"fetch": 0}, r"TCAConfig.fetch = 0: must be at least 1"),
        ({"fetch": True}, r"TCAConfig.fetch = True: must be an integer"),
        ({"fetch_stride": 0}, r"TCAConfig.fetch_stride = 0: must be a power of two, at least 1"),
        ({"fetch_stride": 12}, r"TCAConfig.fetch_stride = 12: must be a power of two"),
        ({"read_tolerance": -0.1}, r"TCAConfig.read_tolerance = -0.1: must lie in \[0, 1\)"),
        ({"read_tolerance": 1.0}, r"TCAConfig.read_tolerance = 1.0: must lie in \[0, 1\)"),
        ({"keep_tolerance": -0.1}, r"TCAConfig.keep_tolerance = -0.1: must be at least 0"),
        ({"keep_tolerance": float("inf")}, r"TCAConfig.keep_tolerance = inf: must be a finite number"),
        ({"tau": 0.0}, r"TCAConfig.tau = 0.0: must lie in \(0, 1\]"),
    ],
)
def test_a_field_out_of_range_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        TCAConfig(**fields)


@pytest.mark.parametrize("field", ["density", "index", "criterion"])
def test_an_unknown_choice_lists_the_choices(field):
    config = TCAConfig()
    object.__setattr__(config, field, "best")  # past the tests' own type checks
    with pytest.raises(ValueError, match=rf"TCAConfig.{field} = 'best': must be one of \["):
        config.__post_init__()
