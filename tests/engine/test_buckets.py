"""Prompt buckets."""

import pytest

from tca_jax.engine.prompts import bucket_length


def test_buckets_hold_every_length_with_little_padding():
    for length in [*range(128, 5000), 2**17 - 1, 2**17, 2**17 + 1, 10**6]:
        bucket = bucket_length(length)
        assert length <= bucket <= length + bucket / 8
        assert bucket_length(bucket) == bucket
    assert len({bucket_length(length) for length in range(1, 2**20, 37)}) < 120
    with pytest.raises(ValueError, match="length = 0: must be at least 1"):
        bucket_length(0)
