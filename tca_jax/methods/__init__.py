"""Attention methods: what a prompt's queries attend to and what stays in the cache. A file each, one registry."""

from tca_jax.methods.base import Attended, CachePolicy, Method, PrefillPolicy
from tca_jax.methods.block_sparse import BlockSparsePrefill
from tca_jax.methods.cake import cake
from tca_jax.methods.duoattention import duoattention
from tca_jax.methods.expected_attention import expected_attention
from tca_jax.methods.flexprefill import flexprefill
from tca_jax.methods.full import FullCache, FullPrefill, full
from tca_jax.methods.heads import Heads
from tca_jax.methods.minference import minference
from tca_jax.methods.random import random
from tca_jax.methods.regions import Selected, Selection
from tca_jax.methods.registry import configured, get, names, register
from tca_jax.methods.snapkv import snapkv
from tca_jax.methods.sparse import SparsePrefill
from tca_jax.methods.streaming import streaming
from tca_jax.methods.tca import tca
from tca_jax.methods.uniform import uniform
from tca_jax.methods.xattention import xattention

#: What a model runs under until it is given a method, and what the others are compared with.
BASELINE = full()

# From here on `tca_jax.methods.tca` is the factory; `from tca_jax.methods.tca import TCACache` finds the module all the
# same.
for _factory in (
    cake,
    duoattention,
    expected_attention,
    flexprefill,
    full,
    minference,
    random,
    snapkv,
    streaming,
    tca,
    uniform,
    xattention,
):
    register(_factory.__name__.replace("_", "-"), _factory)

__all__ = [
    "BASELINE",
    "Attended",
    "BlockSparsePrefill",
    "CachePolicy",
    "FullCache",
    "FullPrefill",
    "Heads",
    "Method",
    "PrefillPolicy",
    "Selected",
    "Selection",
    "SparsePrefill",
    "configured",
    "get",
    "names",
    "register",
]
