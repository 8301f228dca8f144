"""Prefill attention in eight bits on Pallas Mosaic GPU (Hopper): queries and keys in int8, values in e4m3.

Operands are those of rounding.py. Exact products of int8 are added to the bits of 1.5 2^23: read as a float32, that
plus the product.

The codes of e4m3 are a piecewise linear logarithm: 8 (log2 p + 7), rounded, is the code of nearly p. So probabilities
take a multiply-add and no powers. They are in units of each tile's own largest one, whose codes have 15 octaves below.
Their sums are a product with ones, so that they are sums of what is multiplied. Hopper sums products of e4m3 in 14 bits
alone: a tile's output and sums begin at zero, and are added to those of other tiles in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Array

from tca_jax.pallas_kernels import rounding
from tca_jax.pallas_kernels.kernel_math import LOG2E
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, varying_like
from tca_jax.pallas_kernels.prefill_attention import FarBlocks, mosaic
from tca_jax.pallas_kernels.prefill_attention.mosaic import ONES, ROWS, SCALES, TILE, across, of_rows, transposed

_E4M3 = jnp.float8_e4m3fn
_BASE = 1.5 * 2**23  # products of int8 and 128 entries stay below 2^22
_TOP = 121  # code of a tile's largest probability: 3% too large, where the others are 4% too large on average
_DEEPEST = 60 * 8.0  # a tile whose largest score is further below the row's counts as nothing, and overflows nowhere


class Rounding(NamedTuple):
    """Scales of operands in eight bits."""

    rows: Any  # [B, Hq, L]: of each query, so that products become eighths of powers of two, the step of e4m3's codes
    keys: Any  # [B, Hkv, n, SCALES]: of each tile of the prompt, in all entries; TMA moves 128 bytes
    pool: Any  # [P / TILE, SCALES]
    means: Any  # [B, Hkv, m, SCALES], or None
    values: Any  # [B, Hkv]
    ones: Any  # [ONES, TILE]


@partial(jax.jit, static_argnames=("block_size", "window"))
@jax.named_scope("prefill_attention")
def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    pool: Pool,
    budgets: Array,
    lengths: Array,
    *,
    block_size: int,
    window: int,
    far: FarBlocks | None = None,
) -> Array:
    """See `prefill_attention.prefill_attention`. Values of all means must be finite.

    Biases of means must be at least 0, as an entropy is, or -inf.
    """
    sizes: Any = {"block_size": block_size, "window": window}
    given = q, k, v, pool, budgets, lengths, far
    operands = mosaic.kernel_operands(*given, unit=8 * LOG2E, base=_BASE, backend="mosaic_fp8", **sizes)
    out = mosaic.call_kernel(round_operands(operands), EightBitSoftmax, q.dtype, **sizes)
    return varying_like(out[:, : q.shape[1]], q, k, v, pool, budgets, lengths, far)


def round_operands(operands: mosaic.Operands, interpret: bool = False) -> mosaic.Operands:
    """The operands in eight bits; tiles of keys are those that the kernel reads."""
    q, v, pool_v, far, lengths = operands.q, operands.v, operands.pool_v, operands.far, operands.lengths
    means, v_scales = rounding.mean_key(operands.k, lengths), rounding.scales_of_values(v, lengths)

    def rounded(k: Array, v: Array, tiles: rounding.Tiles) -> tuple[Array, Array, Array]:
        codes, scales = rounding.round_keys(k, tiles, means, TILE, interpret)
        return codes, rounding.round_values(v, tiles, v_scales.reshape(-1), TILE, interpret), scales

    q_codes, q_scales = rounding.round_queries(q, interpret)
    k_codes, v_codes, k_scales = rounded(operands.k, v, rounding.tiles_of_prompt(lengths, v.shape[1], TILE))
    of_pool = rounded(operands.pool_k[None, :, None], pool_v[None, :, None], _tiles_of_pool(operands))
    pool_k, pool_v, pool_scales = of_pool[0][0, :, 0], of_pool[1][0, 0], of_pool[2]
    mean_scales = None
    if far is not None:
        attended = jnp.swapaxes((far.mean_bias > MASKED).any(axis=2), 1, 2)[..., None]  # others widen no scale
        mean_k = jnp.where(attended, far.mean_k, means.reshape(len(v), 1, *v.shape[2:]).astype(v.dtype))
        of_all = rounding.tiles_of_prompt(jnp.full_like(lengths, mean_k.shape[1]), mean_k.shape[1], TILE)
        mean_k, mean_v, mean_scales = rounded(mean_k, far.mean_v, of_all)
        far, mean_scales = far._replace(mean_k=mean_k, mean_v=mean_v), _for_tma(mean_scales)
    of_keys = _for_tma(k_scales), _for_tma(pool_scales)[0, 0], mean_scales
    scales = Rounding(8 * jnp.swapaxes(q_scales, 1, 2), *of_keys, v_scales, jnp.ones((ONES, TILE), _E4M3))
    return operands._replace(q=q_codes, k=k_codes, v=v_codes, pool_k=pool_k, pool_v=pool_v, far=far, rounding=scales)


def _tiles_of_pool(operands: mosaic.Operands) -> rounding.Tiles:
    """The tiles of the pool, a row of one head; those that no query reads are empty."""
    firsts, read = operands.offsets.reshape(-1), operands.prefixes[..., -1].reshape(-1)
    tile = jnp.arange(cdiv(len(operands.pool_k), TILE), dtype=jnp.int32)[:, None] * TILE
    left = jnp.where(firsts <= tile, firsts + read - tile, 0)  # tokens of each region from the tile's first one on
    counts, owners = jnp.clip(left.max(axis=1), 0, TILE), left.argmax(axis=1).astype(jnp.int32)
    return rounding.Tiles(counts[None, :, None], owners[None, :, None])


def _for_tma(scales: Array) -> Array:
    """Scales `[B, n, H]` of tiles, `[B, H, n, SCALES]`."""
    by_head = jnp.swapaxes(scales, 1, 2)[..., None]
    return jnp.broadcast_to(by_head, (*by_head.shape[:3], SCALES))


class EightBitSoftmax(mosaic.Softmax):
    """The state is the unit of each row, in eighths of powers of two, and its largest score; the output has sums last.

    Without turns: a softmax takes less time than its products.
    """

    turns: ClassVar[bool] = False

    def __init__(self, refs: mosaic.Operands, scoped: Any, work: Any, first_row: Any) -> None:
        rows = refs.rounding.rows.at[work.row, work.head, pl.ds(first_row, ROWS)]
        self.rows = mosaic.load(rows, plgpu.Layout.WGMMA.reduce(1))
        self.value_scale, self.head_dim = refs.rounding.values[work.row, work.kv_head], refs.q.shape[3]
        self.key_scales = scoped.key_scales
        plgpu.barrier_wait(scoped.ones_ready)

    def start(self) -> tuple[Any, Any]:
        return mosaic.zeros(self.head_dim + ONES), (of_rows(-jnp.inf), of_rows(-jnp.inf))

    def scale_of(self, slot: Any) -> Any:
        # From a step of an eighth on, rounding to int8 alone decides; past 1.3 the codes would not be exact.
        return jnp.minimum(self.rows * self.key_scales[slot, 0], 1)

    def first_products(self, token_bias: Any, mean_bias: Any) -> Any:
        base = jnp.full((ROWS, TILE), _BASE, jnp.float32) if token_bias is None else token_bias
        return lax.bitcast_convert_type(base, jnp.int32)

    def scores(self, products: Any, mean_bias: Any, scale: Any) -> Any:
        scores = lax.bitcast_convert_type(products, jnp.float32)
        return scores if mean_bias is None else scores + mean_bias * across(1 / scale, scores)

    def update(self, scores: Any, scale: Any, out: Any, state: Any) -> tuple[Any, Any, Any]:
        unit, top = state
        base = _BASE * scale
        bits = lax.bitcast_convert_type(scores, jnp.int32).max(axis=1)  # in their order: scores are positive, or masked
        highest = lax.bitcast_convert_type(bits, jnp.float32) * scale - base
        top = jnp.maximum(top, highest)
        # An integer shift: what it differs by from the largest score counts in the unit.
        shift = jnp.round(jnp.maximum(highest, top - _DEEPEST) + base)
        new_unit = shift - base
        decay = jnp.exp2((unit - new_unit) / 8)
        operand = _to_codes(scores * across(scale, scores) + across(_TOP - shift, scores))
        return out, (new_unit, top, decay), operand

    def multiply_pv(self, operand: Any, v_smem: Any, out: Any, state: Any, meanwhile: Any) -> Any:
        unit, top, decay = state
        nothing = mosaic.zeros(out.shape[1])
        of_tile, _ = super().multiply_pv(operand, transposed(v_smem), nothing, state, meanwhile)
        return out * across(decay, out) + of_tile, (unit, top)

    def finish(self, out: Any, state: Any) -> Any:
        values, sums = out[:, : self.head_dim], out[:, self.head_dim :]
        return values * self.value_scale / across(sums.max(axis=1), values)


def _to_codes(codes: Any) -> Any:
    """The nearest codes as an operand in e4m3, 0 for negative ones: four columns of a thread in a register."""
    layouts = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_8BIT
    asm = "{ .reg .b32 a, b, c, d; " + "".join(f"cvt.rni.s32.f32 {x}, ${i}; " for i, x in enumerate("abcd", 1))
    asm += "cvt.pack.sat.u8.s32.b32 c, d, c, 0; cvt.pack.sat.u8.s32.b32 $0, b, a, c; }"  # two instructions in all

    @plgpu.inline_mgpu(arg_types=layouts[:1], return_type=plgpu.ShapeDtypeStruct(codes.shape, _E4M3, layout=layouts[1]))
    def pack(_: Any, codes: Any) -> Any:
        word, layout = ir.IntegerType.get_signless(32), mgpu.fragmented_array.WGMMA_LAYOUT_8BIT
        vector_type = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
        pairs = codes.registers.reshape(-1, 2, 2)  # 16 columns, 8 of them, half of the rows
        packed = np.empty(pairs.shape[::2], dtype=object)
        for columns, half in np.ndindex(packed.shape):
            four = [vector.extract(pairs[columns, part, half], [], [i]) for part in range(2) for i in range(2)]
            register: Any = llvm.inline_asm(word, four, asm, "=r,f,f,f,f", asm_dialect=0)
            packed[columns, half] = mgpu.utils.bitcast(register, vector_type)
        registers = packed.reshape(layout.registers_shape(codes.shape))
        return mgpu.fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return pack(codes)
