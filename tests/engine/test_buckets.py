"""Prompt buckets."""

import pytest

from tca_jax.engine.prompts import bucket_length


def test_every_length_fits_and_at_most_an_eighth_is_padding():
    for length in [*range(128, 5000), 2**17 - 1, 2**17, 2**17 + 1, 10**6]:
        bucket = bucket_length(length)
        assert length <= bucket
        assert bucket - length <= bucket / 8


def test_a_bucket_is_its_own_bucket():
    buckets = {bucket_length(length) for length in range(1, 20000)}
    assert buckets == {bucket_length(bucket) for bucket in buckets}


def test_a_million_lengths_need_about_a_hundred_buckets():
    assert len({bucket_length(length) for length in range(1, 2**20, 37)}) < 120


def test_an_empty_prompt_has_no_bucket():
    with pytest.raises(ValueError, match="length = 0: must be at least 1"):
        bucket_length(0)
