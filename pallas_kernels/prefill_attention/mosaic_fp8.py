"""Prefill attention in eight bits on Pallas Mosaic GPU (Hopper): queries and keys in int8, values in e4m3.

Queries and keys are those of int8.py. Their exact products are added to the bits of 1.5 2^23: read as a float32, that
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
from jaxtyping import Array, Float, Float8e4m3fn

from tca_jax.pallas_kernels.int8 import rotate, round_keys, round_queries, scale_of, to_int8
from tca_jax.pallas_kernels.kernel_math import LOG2E
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.numerics import varying_like
from tca_jax.pallas_kernels.prefill_attention import FarBlocks, mosaic
from tca_jax.pallas_kernels.prefill_attention.mosaic import ONES, ROWS, TILE, across, of_rows, transposed

_E4M3 = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(_E4M3).max)
_BASE = 1.5 * 2**23  # products of int8 and 128 entries stay below 2^22
_TOP = 121  # code of a tile's largest probability: 3% too large, where the others are 4% too large on average
_DEEPEST = 60 * 8.0  # a tile whose largest score is further below the row's counts as nothing, and overflows nowhere


class Rounding(NamedTuple):
    """Scales of operands in eight bits."""

    rows: Any  # [B, Hq, L]: of products of each query, to eighths of powers of two, the step of e4m3's codes
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
    """See `prefill_attention.prefill_attention`. Values among the padding, and of all means, must be finite.

    Biases of means must be at least 0, as an entropy is, or -inf.
    """
    sizes: Any = {"block_size": block_size, "window": window}
    given = q, k, v, pool, budgets, lengths, far
    operands = mosaic.kernel_operands(*given, unit=8 * LOG2E, backend="mosaic_fp8", **sizes)
    out = mosaic.call_kernel(round_operands(operands), EightBitSoftmax, q.dtype, **sizes)
    return varying_like(out[:, : q.shape[1]], q, k, v, pool, budgets, lengths, far)


def round_operands(operands: mosaic.Operands) -> mosaic.Operands:
    """The operands in eight bits."""
    q, v, pool_v, far, offsets = operands.q, operands.v, operands.pool_v, operands.far, operands.offsets
    (batch, length, kv_heads, _), group = v.shape, q.shape[2] // v.shape[2]
    there = (jnp.arange(length)[:, None] < operands.lengths[:, None])[..., None]  # [B, L, Hkv, 1]
    firsts = jnp.where(operands.prefixes[..., -1] > 0, offsets, len(pool_v)).reshape(-1)  # of regions that are read
    begun = firsts <= jnp.arange(len(pool_v))[:, None]
    owner = jnp.where(begun, firsts, -1).argmax(axis=1)  # of each token of the pool: its region

    def of_regions(by_head: Array) -> Array:
        return by_head.reshape(batch * kv_heads, -1)[owner]

    q_codes, q_scale = round_queries(q)
    codes, k_scale, mean = round_keys(operands.k, operands.lengths)
    v_scale = scale_of(jnp.where(there, v, 0), (1, 3), _LARGEST)
    # From a step of an eighth on, rounding to int8 alone decides; past 1.3 the codes would not be exact.
    rows = jnp.minimum(8 * q_scale * jnp.repeat(k_scale[..., 0], group, axis=2), 1)
    pool_k = to_int8(rotate(operands.pool_k, of_regions(mean)), of_regions(k_scale))
    if far is not None:
        mean_k = to_int8(rotate(far.mean_k, mean), k_scale)
        far = far._replace(mean_k=mean_k, mean_v=_for_products(far.mean_v, v_scale))
    return operands._replace(
        q=q_codes,
        k=codes,
        v=_for_products(v, v_scale),
        pool_k=pool_k,
        pool_v=_for_products(pool_v, of_regions(v_scale)),
        far=far,
        rounding=Rounding(jnp.swapaxes(rows, 1, 2), v_scale[:, 0, :, 0], jnp.ones((ONES, TILE), _E4M3)),
    )


def _for_products(v: Float[Array, "*n d"], scale: Float[Array, "*#n 1"]) -> Float8e4m3fn[Array, ...]:
    """Codes of values, `[t, d]` or `[B, t, H, d]`, as an operand of probabilities in their registers, `[..., t]`.

    A thread has the probabilities of tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, and as an operand 4t to 4t + 3.
    """
    axis = v.ndim // 2 - 1  # of tokens
    wide = jnp.moveaxis(v, axis, -1).astype(jnp.float32) / jnp.moveaxis(scale, axis, -1)
    codes = jnp.clip(wide, -_LARGEST, _LARGEST).astype(_E4M3)
    # By words, after a plain transposition: with other axes XLA would transpose an entry at a time.
    words = lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2, 2, 4), jnp.uint32)  # 16 tokens, 8, 4
    first, second = words[..., 0, :], words[..., 1, :]
    low, high = first & 0xFFFF | second << 16, first >> 16 | second >> 16 << 16
    return lax.bitcast_convert_type(jnp.stack([low, high], axis=-1), _E4M3).reshape(codes.shape)


class EightBitSoftmax(mosaic.Softmax):
    """The state is the unit of each row, in eighths of powers of two, and its largest score; the output has sums last.

    Without turns: a softmax takes less time than its products.
    """

    turns: ClassVar[bool] = False

    def __init__(self, refs: mosaic.Operands, scoped: Any, work: Any, first_row: Any) -> None:
        rows = refs.rounding.rows.at[work.row, work.head, pl.ds(first_row, ROWS)]
        self.scale = mosaic.load(rows, plgpu.Layout.WGMMA.reduce(1))
        self.value_scale, self.head_dim = refs.rounding.values[work.row, work.kv_head], refs.q.shape[3]
        plgpu.barrier_wait(scoped.ones_ready)

    def start(self) -> tuple[Any, Any]:
        return mosaic.zeros(self.head_dim + ONES), (of_rows(-jnp.inf), of_rows(-jnp.inf))

    def first_products(self, bias: Any) -> Any:
        return jnp.full((ROWS, TILE), np.float32(_BASE).view(np.int32), jnp.int32)

    def scores(self, products: Any, bias: Any) -> Any:
        scores = lax.bitcast_convert_type(products, jnp.float32)
        return scores if bias is None else scores + bias * across(1 / self.scale, scores)

    def update(self, scores: Any, out: Any, state: Any) -> tuple[Any, Any, Any]:
        unit, top = state
        base = _BASE * self.scale
        bits = lax.bitcast_convert_type(scores, jnp.int32).max(axis=1)  # in their order: scores are positive, or masked
        highest = lax.bitcast_convert_type(bits, jnp.float32) * self.scale - base
        top = jnp.maximum(top, highest)
        # An integer shift: what it differs by from the largest score counts in the unit.
        shift = jnp.round(jnp.maximum(highest, top - _DEEPEST) + base)
        new_unit = shift - base
        decay = jnp.exp2((unit - new_unit) / 8)
        operand = _to_codes(scores * across(self.scale, scores) + across(_TOP - shift, scores))
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
