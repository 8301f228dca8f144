"""Prefill attention in eight bits on Pallas Mosaic GPU (Hopper): queries and keys in int8, values in e4m3.

Of keys the mean over the prompt is taken off, which a softmax does not see, and queries and keys are rotated by a
Hadamard matrix, which products do not see and which spreads large channels over all; then int8 has a scale for each
query and one for each head's keys. Exact products of int8 need no conversion: they are added to the bits of 1.5 2^23.

The codes of e4m3 are a piecewise linear logarithm: 8 (log2 p + 7), rounded, is the code of nearly p. So probabilities
take a multiply-add and no powers. They are in units of each tile's own largest one, whose codes have 15 octaves below;
the output is rescaled with every tile. Their sums are a product with ones, so rounding cancels in the mean.
"""

from __future__ import annotations

from functools import partial, reduce
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
from jaxtyping import Array, Float, Float32, Int8

from tca_jax.pallas_kernels.kernel_math import LOG2E
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.numerics import varying_like
from tca_jax.pallas_kernels.prefill_attention import FarBlocks
from tca_jax.pallas_kernels.prefill_attention.mosaic import (
    ROWS,
    TILE,
    Operands,
    Softmax,
    across,
    call_kernel,
    kernel_operands,
    of_rows,
    transposed,
)

_E4M3 = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(_E4M3).max)
_ROTATED = 8.0  # entries of the Hadamard matrix are 1/8: exact in bfloat16
_EIGHTHS = 8 * LOG2E  # scores count eighths of a power of two: the step of e4m3's codes
_BASE = 1.5 * 2**23  # a float32 whose last bits count integers; products of int8 and 128 entries stay below 2^22
_CODES = 2.0**23  # the last byte of a float32 at this size is the integer that was added
_TOP = (
    121  # code of a tile's largest probability. Between powers of two codes overstate by 4% on average; this one, too
)
_DEEPEST = 60 * 8.0  # a tile whose largest score is further below the row's counts as nothing, and overflows nowhere


class Rounding(NamedTuple):
    """Scales of operands in eight bits."""

    rows: Any  # [B, Hq, L]: a score of 1 in units of the products of each query
    values: Any  # [B, Hkv]
    ones: Any  # [8, TILE]


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
    """See `prefill_attention.prefill_attention`. Values among the padding, and of all means, must be finite."""
    sizes = {"block_size": block_size, "window": window}
    operands = round_operands(kernel_operands(q, k, v, pool, budgets, lengths, far, unit=_EIGHTHS, **sizes))
    out = call_kernel(operands, EightBitSoftmax, q.dtype, **sizes)
    return varying_like(out[:, : q.shape[1]], q, k, v, pool, budgets, lengths, far)


def round_operands(operands: Operands) -> Operands:
    """The operands in eight bits."""
    q, k, v, pool_k, pool_v = operands[:5]
    (batch, length, heads, head_dim), kv_heads = q.shape, k.shape[2]
    there = (jnp.arange(length)[:, None] < operands.lengths[:, None])[..., None]  # [B, L, Hkv, 1]
    owners = jnp.where(
        operands.offsets.reshape(-1) <= jnp.arange(len(pool_k))[:, None], operands.offsets.reshape(-1), -1
    )
    owner = owners.argmax(axis=1)  # of each token of the pool: its region

    k, rotated_pool = _rotate(k, jnp.float32), _rotate(pool_k, jnp.float32)
    mean = jnp.where(there, k, 0).sum(axis=1, keepdims=True) / jnp.maximum(operands.lengths, 1)[:, None, :, None]
    k_scale = jnp.maximum(jnp.where(there, jnp.abs(k - mean), 0).max(axis=(1, 3), keepdims=True), 1e-20) / 127
    rotated_q = _rotate(q, q.dtype)
    q_scale = jnp.maximum(jnp.abs(rotated_q).max(axis=-1, keepdims=True).astype(jnp.float32), 1e-20) / 127
    by_query = q_scale[..., 0] * jnp.repeat(k_scale[..., 0], heads // kv_heads, axis=2)  # [B, L, Hq]
    unit = _EIGHTHS * _ROTATED**2 / head_dim * head_dim**-0.5
    v_scale = jnp.maximum(jnp.where(there, jnp.abs(v), 0).max(axis=(1, 3)).astype(jnp.float32), 1e-20) / _LARGEST

    def codes_of_values(v: Array, scale: Array) -> Array:
        wide = jnp.clip(v.astype(jnp.float32) / scale, -_LARGEST, _LARGEST)
        return _for_products(wide.astype(_E4M3))

    def of_regions(by_head: Array) -> Array:
        return by_head.reshape(batch * kv_heads, -1)[owner]

    far = operands.far
    if far is not None:
        mean_k = _int8(_rotate(far.mean_k, jnp.float32) - mean, k_scale)
        mean_v = codes_of_values(jnp.moveaxis(far.mean_v, 2, 1), v_scale[..., None, None])
        far = far._replace(mean_k=mean_k, mean_v=mean_v)
    rounding = Rounding(jnp.swapaxes(by_query * unit, 1, 2), v_scale, jnp.ones((8, TILE), _E4M3))
    return operands._replace(
        q=_int8(rotated_q.astype(jnp.float32), q_scale),
        k=_int8(k - mean, k_scale),
        v=codes_of_values(jnp.moveaxis(v, 2, 1), v_scale[..., None, None]),
        pool_k=_int8(rotated_pool - of_regions(mean), of_regions(k_scale)),
        pool_v=codes_of_values(pool_v, of_regions(v_scale)),
        far=far,
        rounding=rounding,
    )


def _rotate(x: Float[Array, "*n d"], dtype: Any) -> Float[Array, "*n d"]:
    hadamard = reduce(np.kron, [np.array([[1, 1], [1, -1]])] * (x.shape[-1].bit_length() - 1))
    matrix = jnp.asarray(hadamard / _ROTATED, x.dtype)
    return lax.dot_general(x, matrix, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)


def _int8(x: Float32[Array, "*n d"], scale: Float32[Array, "*#n 1"]) -> Int8[Array, "*n d"]:
    return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)


def _for_products(v: Float[Array, "*n t d"]) -> Float[Array, "*n d t"]:
    """Values as an operand of probabilities that stay in their registers: tokens last, in another order within 16."""
    # A thread has the probabilities of tokens 2t, 2t + 1, 2t + 8 and 2t + 9, and as an operand 4t to 4t + 3.
    *lead, tokens, head_dim = v.shape
    v = jnp.moveaxis(v.reshape(*lead, tokens // 16, 2, 4, 2, head_dim), -4, -3)
    return jnp.swapaxes(v.reshape(*lead, tokens, head_dim), -1, -2)


class EightBitSoftmax(Softmax):
    """The state is the unit of each row, in eighths of powers of two, the sum of its codes and its largest score.

    Without turns: a softmax takes less time than its products.
    """

    turns: ClassVar[bool] = False

    def __init__(self, refs: Operands, scoped: Any, work: Any, first_row: Any) -> None:
        rows = refs.rounding.rows.at[work.row, work.head, pl.ds(first_row, ROWS)]
        self.scale = plgpu.load(rows, (), layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        self.value_scale = refs.rounding.values[work.row, work.kv_head]
        self.ones = scoped.ones
        plgpu.barrier_wait(scoped.ones_ready)

    def start(self) -> Any:
        sums = plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), plgpu.Layout.WGMMA)
        return of_rows(-jnp.inf), sums, of_rows(-jnp.inf)

    def first_products(self, bias: Any) -> Any:
        return jnp.full((ROWS, TILE), np.float32(_BASE).view(np.int32), jnp.int32)

    def scores(self, products: Any, bias: Any) -> Any:
        scores = lax.bitcast_convert_type(products, jnp.float32)
        return scores if bias is None else scores + bias * across(1 / self.scale, scores)

    def update(self, scores: Any, out: Any, state: Any) -> tuple[Any, Any, Any]:
        unit, sums, top = state
        base = _BASE * self.scale
        highest = scores.max(axis=1) * self.scale - base
        top = jnp.maximum(top, highest)
        # An integer shift: what it differs by from the largest score counts in the unit.
        shift = jnp.round(jnp.maximum(highest, top - _DEEPEST) + base)
        new_unit = shift - base
        decay = jnp.exp2((unit - new_unit) / 8)
        operand = _last_bytes(scores * across(self.scale, scores) + across(_CODES + _TOP - shift, scores))
        return out * across(decay, out), (new_unit, sums * across(decay, sums), top), operand

    def multiply_pv(self, operand: Any, v_smem: Any, out: Any, state: Any, meanwhile: Any) -> Any:
        unit, sums, top = state

        def multiply(accumulators: Any) -> None:
            for accumulator, values in zip(accumulators, (v_smem, self.ones), strict=True):
                plgpu.wgmma(accumulator, operand, transposed(values))
            meanwhile()

        out, sums = pl.run_state(multiply)((plgpu.ACC.init(out), plgpu.ACC.init(sums)))
        return out, (unit, sums, top)

    def finish(self, out: Any, state: Any) -> Any:
        return out * self.value_scale / across(state[1].max(axis=1), out)


def _last_bytes(codes: Any) -> Any:
    """Codes, 2^23 + code where that is positive, as an operand in e4m3: four columns of a thread in a register."""
    layouts = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_8BIT
    asm = "{ .reg .b32 a, b, c, d; " + "".join(f"max.f32 {x}, ${i}, 0f4B000000; " for i, x in enumerate("abcd", 1))
    asm += "prmt.b32 a, a, b, 0x0040; prmt.b32 c, c, d, 0x0040; prmt.b32 $0, a, c, 0x5410; }"

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
