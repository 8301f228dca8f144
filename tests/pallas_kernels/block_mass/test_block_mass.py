"""Block mass against a float64 oracle, on every backend; what it does with odd prompts, and its checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import poison, unchecked
from implementations import implementation, on_every_backend

from tca_jax.pallas_kernels.block_mass import block_mass
from tca_jax.pallas_kernels.block_mass import xla as block_mass_xla


def _operands(lengths, tokens, heads, kv_heads, head_dim, dtype=jnp.float32, scale=1.5, seed=0):
    """Queries and keys that are NaN past their length, and the lengths."""
    rng = np.random.default_rng(seed)
    q, k = (scale * rng.standard_normal((len(lengths), tokens, n, head_dim)) for n in (heads, kv_heads))
    return *(jnp.asarray(poison(x, lengths), dtype) for x in (q, k)), jnp.array(lengths, jnp.int32)


def _samples(tile, length, block_size, stride):
    """The last query of each run; the prompt's last query for every run that ends past the prompt."""
    ends = range(tile * block_size + stride - 1, (tile + 1) * block_size, stride)
    return [end if end < length else length - 1 for end in ends]


def _expected(q, k, lengths, block_size, stride):
    """By the definition, a sampled query of a head at a time [B, Hkv, N, N]."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    (batch, tokens, kv_heads, head_dim), group = k.shape, q.shape[2] // k.shape[2]
    blocks = -(-tokens // block_size)
    mass = np.zeros((batch, kv_heads, blocks, blocks))
    for row, length in enumerate(lengths.tolist()):
        for tile in range(-(-length // block_size)):
            for position in _samples(tile, length, block_size, stride):
                for head in range(q.shape[2]):
                    logits = k[row, : position + 1, head // group] @ q[row, position, head] / np.sqrt(head_dim)
                    seen = np.pad(logits, (0, blocks * block_size - position - 1), constant_values=-np.inf)
                    peaks = seen.reshape(blocks, block_size).max(axis=1)
                    weights = np.exp(peaks - peaks.max())
                    mass[row, head // group, tile] += weights / weights.sum()
    return mass


def _check(backend, operands, block_size, stride, rtol=1e-4, atol=1e-5):
    mass = implementation("block_mass", backend)(*operands, block_size=block_size, stride=stride)
    assert mass.dtype == jnp.float32
    np.testing.assert_allclose(mass, _expected(*operands, block_size, stride), rtol=rtol, atol=atol)
    return mass


@on_every_backend("block_mass")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "block_size", "stride"),
    [
        (2, 2, 64, jnp.bfloat16, 16, 8),
        (8, 2, 16, jnp.float32, 16, 1),
        (7, 1, 64, jnp.float32, 16, 16),
        (14, 2, 64, jnp.bfloat16, 16, 8),
        (4, 1, 128, jnp.bfloat16, 16, 4),
        (3, 1, 16, jnp.float32, 48, 16),
    ],
)
def test_equals_the_oracle_whatever_is_in_the_padding(heads, kv_heads, head_dim, dtype, block_size, stride, backend):
    lengths = (75, 1, 3, 48, 16, 17, 0)  # off the block, one token, less than a stride, whole blocks, nothing
    operands = _operands(lengths, 75, heads, kv_heads, head_dim, dtype, scale=head_dim**-0.25 * 2.5)
    _check(backend, operands, block_size, stride)


@on_every_backend("block_mass")
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "stride"),
    [(4, 128, jnp.bfloat16, 8), (7, 64, jnp.bfloat16, 32), (1, 128, jnp.float32, 16), (4, 64, jnp.bfloat16, 128)],
)
def test_equals_the_oracle_with_blocks_of_128(heads, head_dim, dtype, stride, backend):
    operands = _operands((393, 130), 393, heads, 1, head_dim, dtype, scale=head_dim**-0.25 * 2.5)
    _check(backend, operands, 128, stride)


@on_every_backend("block_mass")
def test_a_tile_holds_one_per_sample_and_head_and_nothing_right_of_itself_or_past_the_length(backend):
    operands = _operands((70, 33), 90, 6, 2, 16)
    mass = np.asarray(implementation("block_mass", backend)(*operands, block_size=16, stride=4))
    assert mass.shape == (2, 2, 6, 6)
    for row, tiles in enumerate((5, 3)):
        np.testing.assert_allclose(mass[row, :, :tiles].sum(axis=-1), 4 * 3, rtol=1e-5)
        assert not np.any(mass[row, :, tiles:])
    assert not np.any(np.triu(mass, 1))


@on_every_backend("block_mass")
def test_mass_lies_where_queries_look(backend):
    q, k = np.zeros((1, 64, 1, 16), np.float32), np.zeros((1, 64, 1, 16), np.float32)
    q[..., 0], k[0, 21, 0, 0] = 16.0, 16.0
    mass = implementation("block_mass", backend)(
        jnp.asarray(q), jnp.asarray(k), jnp.array([64], jnp.int32), block_size=16, stride=8
    )
    np.testing.assert_allclose(mass[0, 0, :, 1], [0, 2, 2, 2], rtol=1e-5)


@on_every_backend("block_mass")
def test_scores_past_the_range_of_exp_do_not_overflow(backend):
    _check(backend, _operands((50,), 50, 4, 2, 16, scale=25.0), 16, 4, rtol=2e-3, atol=2e-3)


@on_every_backend("block_mass")
def test_array_without_tokens_has_no_mass(backend):
    mass = implementation("block_mass", backend)(*_operands((0,), 0, 2, 1, 16), block_size=16, stride=4)
    assert mass.shape == (1, 1, 0, 0)


@on_every_backend("block_mass")
def test_lengths_may_be_traced(backend):
    q, k, lengths = _operands((60, 23), 60, 2, 1, 16)
    function = implementation("block_mass", backend)
    mass = jax.jit(lambda n: function(q, k, n, block_size=16, stride=8))(lengths)
    np.testing.assert_allclose(mass, _expected(q, k, lengths, 16, 8), rtol=1e-4, atol=1e-5)


def test_plain_jax_takes_any_block_size():
    _check("xla", _operands((75, 14), 75, 4, 2, 12), 6, 3)


def test_memory_of_plain_jax_does_not_grow_with_the_square_of_the_length_but_for_the_result():
    def temporary(length):
        shape = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
        lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
        function = jax.jit(lambda *x: block_mass_xla.block_mass(*x, block_size=128, stride=16))
        return function.lower(shape, shape, lengths).compile().memory_analysis().temp_size_in_bytes

    assert temporary(32768) < 5 * temporary(8192)


def test_shapes_block_size_stride_and_backend_are_checked():
    q, k, lengths = jnp.ones((1, 20, 2, 16)), jnp.ones((1, 20, 1, 16)), jnp.array([20])
    sizes = {"block_size": 16, "stride": 8}
    with pytest.raises(ValueError, match=r"k has shape \(1, 20, 1, 8\)"):
        unchecked(block_mass)(q, k[..., :8], lengths, **sizes)
    with pytest.raises(ValueError, match=r"lengths has shape \(2,\)"):
        unchecked(block_mass)(q, k, jnp.array([20, 20]), **sizes)
    with pytest.raises(ValueError, match="3 query heads and 2 KV heads"):
        unchecked(block_mass)(jnp.ones((1, 20, 3, 16)), jnp.ones((1, 20, 2, 16)), lengths, **sizes)
    with pytest.raises(ValueError, match="block_size = 0: must be at least 1"):
        block_mass(q, k, lengths, block_size=0, stride=8)
    for stride in (0, 3, 32):
        with pytest.raises(ValueError, match=rf"stride = {stride}: must divide block_size = 16"):
            block_mass(q, k, lengths, block_size=16, stride=stride)
    with pytest.raises(ValueError, match="backend = 'cudnn'"):
        block_mass(q, k, lengths, **sizes, backend="cudnn")
