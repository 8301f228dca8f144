"""Block mass through Triton against the XLA oracle: on a GPU for real, else in interpret mode."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import poison
from cuda_lowering import kernels
from implementations import INTERPRET, implementation
from jax.experimental import pallas as pl

from tca_jax.pallas_kernels.block_mass import triton as block_mass_triton
from tca_jax.pallas_kernels.block_mass import xla as block_mass_xla
from tca_jax.pallas_kernels.block_mass.triton import BlockMassConfig, default_config
from tca_jax.pallas_kernels.kernel_math import shared_memory
from tca_jax.pallas_kernels.triton_call import DEPRECATION

# The filter that `triton_call` sets is lost between tests, and what an earlier test traced is not traced again.
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATION}:DeprecationWarning")

gpu = pytest.mark.skipif(INTERPRET, reason="needs an NVIDIA GPU; interpret mode takes too long at this size")

mass_of = implementation("block_mass", "triton")


def _operands(lengths, tokens, heads, kv_heads, head_dim, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    q, k = (1.5 * rng.standard_normal((len(lengths), tokens, n, head_dim)) for n in (heads, kv_heads))
    return *(jnp.asarray(poison(x, lengths), dtype) for x in (q, k)), jnp.array(lengths, jnp.int32)


def _check(operands, block_size=16, stride=4, tolerance=1e-4, **options):
    sizes = {"block_size": block_size, "stride": stride}
    actual, expected = mass_of(*operands, **sizes, **options), block_mass_xla.block_mass(*operands, **sizes)
    assert bool(jnp.isfinite(expected).all())
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * float(expected.max()))


@pytest.mark.parametrize(
    ("config", "block_size", "stride"),
    [
        pytest.param((1, 16, 4, 1), 16, 4, id="one tile"),
        pytest.param((3, 16, 4, 2), 16, 8, id="tiles off the powers of two and off the number of tiles"),
        pytest.param((4, 16, 4, 3), 32, 8, id="four tiles, blocks of two tiles of keys"),
        pytest.param((16, 32, 8, 3), 32, 16, id="more tiles than there are"),
    ],
)
def test_tile_sizes_do_not_matter(config, block_size, stride):
    _check(_operands((150, 82, 33, 3), 150, 6, 2, 16), block_size, stride, config=BlockMassConfig(*config))


@pytest.mark.parametrize(("config", "parts"), [((1, 16, 4, 1), 3), ((2, 16, 4, 1), 2)], ids=["one tile", "two tiles"])
def test_parts_of_the_tiles_do_not_matter(config, parts, monkeypatch):
    monkeypatch.setattr(block_mass_triton, "_MOST_BYTES", 4 * 2 * 2 * 8 * 16 * 3)  # three programs of 16 rows
    jax.clear_caches()
    operands, options = _operands((115, 40), 115, 4, 2, 16), {"block_size": 16, "stride": 8}
    function = partial(mass_of, config=BlockMassConfig(*config), **options)
    assert f"length={parts}" in str(jax.make_jaxpr(function)(*operands))
    _check(operands, 16, 8, config=BlockMassConfig(*config))
    jax.clear_caches()


@gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 1e-3), (jnp.float16, 1e-3), (jnp.float32, 1e-4)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "stride"), [(8, 2, 16), (7, 1, 8), (2, 2, 32)])
def test_equals_the_oracle_at_real_sizes(heads, kv_heads, stride, head_dim, dtype, tolerance):
    operands = _operands((9001, 63, 5000), 9001, heads, kv_heads, head_dim, dtype)
    _check(operands, 128, stride, tolerance=tolerance)


@gpu
@pytest.mark.parametrize(
    ("block_size", "heads", "head_dim"), [(256, 7, 128), (512, 4, 128), (1024, 1, 64), (512, 1, 256)]
)
def test_blocks_of_several_tiles_fit_in_shared_memory(block_size, heads, head_dim):
    _check(_operands((2500,), 2500, heads, 1, head_dim, jnp.bfloat16), block_size, 16, tolerance=1e-3)


def _avals(batch, tokens, heads, kv_heads, head_dim, dtype):
    of = jax.ShapeDtypeStruct
    q, k = (of((batch, tokens, n, head_dim), dtype) for n in (heads, kv_heads))
    return q, k, of((batch,), jnp.int32)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((1, 131072, 4, 1, 128, jnp.bfloat16), id="one head of LLaMA"),
        pytest.param((1, 131072, 7, 1, 64, jnp.bfloat16), id="a group of 7, d 64"),
        pytest.param((1, 131072, 4, 1, 128, jnp.float32), id="float32"),
        pytest.param((1, 131072, 1, 1, 64, jnp.float32), id="float32, d 64"),
        pytest.param((1, 2**20 + 64, 28, 4, 128, jnp.bfloat16), id="Qwen2.5, a million tokens"),
        pytest.param((1, 1000, 4, 1, 256, jnp.float16), id="d 256"),
    ],
)
@pytest.mark.parametrize("stride", [8, 16, 32])
def test_lowers_for_cuda_as_one_kernel(sizes, stride):
    function = partial(block_mass_triton.block_mass, block_size=128, stride=stride)
    assert kernels("triton", function, *_avals(*sizes)) == 1


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_lowers_for_cuda_with_several_tiles_of_a_program(tiles):
    config = BlockMassConfig(tiles, 64, 4, 3)
    function = partial(block_mass_triton.block_mass, block_size=128, stride=16, config=config)
    assert kernels("triton", function, *_avals(1, 131072, 4, 1, 128, jnp.bfloat16)) == 1


@pytest.mark.parametrize("block_size", [16, 48, 128, 256])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, jnp.bfloat16), (256, jnp.bfloat16), (128, jnp.float32)])
def test_default_tiles_of_keys_divide_blocks(block_size, head_dim, dtype):
    for rows in (1, 7, 32, 64, 896):
        config = default_config(rows, block_size, head_dim, dtype)
        assert block_size % config.keys == 0
        assert config.keys >= 16
        assert config.keys & (config.keys - 1) == 0
        assert config.tiles >= 1


@pytest.mark.parametrize("block_size", [64, 128, 256, 512, 1024])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_in_flight_fit_in_shared_memory(block_size, head_dim):
    for rows in (8, 32, 112, 256):
        config = default_config(rows, block_size, head_dim, jnp.bfloat16)
        held = max(16, pl.next_power_of_2(config.tiles * rows))
        in_flight = config.stages * block_size if config.stages > 1 else config.keys
        assert 2 * head_dim * (held + in_flight) <= shared_memory()


def test_refuses_what_it_does_not_take():
    q, k, lengths = _operands((32,), 32, 2, 1, 16)
    with pytest.raises(NotImplementedError, match="head dimension 12"):
        mass_of(q[..., :12], k[..., :12], lengths, block_size=16, stride=4)
    with pytest.raises(NotImplementedError, match="types"):
        mass_of(q, k.astype(jnp.bfloat16), lengths, block_size=16, stride=4)
    with pytest.raises(NotImplementedError, match="block_size = 24: must be a multiple of 16"):
        mass_of(q, k, lengths, block_size=24, stride=4)
