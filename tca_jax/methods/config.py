"""TCAConfig: the hyperparameters of TCA-Attention."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, ClassVar, Literal, get_args

from tca_jax.errors import UserError, check_seed, is_finite_number
from tca_jax.methods.base import Tokens, num_ranked_blocks

Density = Literal["concentration", "paper", "random"]
Index = Literal["hhi", "entropy"]
Criterion = Literal["worth", "retained_mass", "column_mean"]

_INTEGERS = (
    *("block_size", "window", "num_candidates", "reserve", "observation", "spread"),
    *("fetch", "fetch_stride", "seed"),
)
_LARGEST = 2**31 - 1  # positions are 32-bit integers
_MOST_CANDIDATES = 1024  # far more shapes than a block has budgets; tables grow with them


@dataclasses.dataclass(frozen=True)
class TCAConfig:
    """Hyperparameters of TCA-Attention (arXiv 2512.09238). Hashable, so it can be a static argument of `jax.jit`.

    Attributes:
        block_size: Tokens in a block, b. A power of two (Eq. 4 places the candidates on its powers).
        window: Local tokens every query keeps at least, w. A multiple of `block_size`.
        num_candidates: Candidate budget distributions per head, M (Eq. 4), at most 1,024; "dense" comes on top.
        sigma: Spread of each candidate's log-normal shape (Eq. 4).
        alpha: Weight of the concentration index against the attention mass in the block density (Eq. 6).
        density: How blocks are ordered for budgeting: "concentration" (default), "paper" (Eq. 6) or "random".
        index: The concentration index: "hhi" (Herfindahl-Hirschman) or "entropy" (one minus the normalised entropy).
        criterion: What calibration goes by: "worth", the loss that a head's missing tokens cost; or Algorithm 1 with a
            score that is compared with `tau`, "retained_mass" (Theorem 1) or "column_mean" (Eq. 5).
        tau: Threshold of Algorithm 1 in (0, 1]; the sparsest candidate that reaches it is taken.
        reserve: Tokens that each KV head keeps beside its budgets, R, chosen from all ranked blocks at once; None for
            window // 8, 0 for none.
        observation: Last prompt queries that choose the reserve; fewer in shorter prompts.
        spread: Tokens over which an observed token's score spreads, itself and those that follow it.
        fetch: Key blocks left of the window that a query tile of a head with the reading "blocks" attends to.
        fetch_stride: Every so many queries of a tile, one estimates which blocks these are. A power of two.
        read_tolerance: Loss inside a prompt that calibration allows over full attention's, as a share of what row 0 in
            every head costs.
        keep_tolerance: Share of the answers that full attention knows which calibration lets the cache lose.
        seed: Seed of the "random" density and of calibration's probes, in [0, 2^32).

    Raises:
        ValueError: a value is out of range; the message names the field, what was given and what is allowed.
    """

    #: Registered name of the method that these hyperparameters are of; `methods.configured` makes it.
    method_name: ClassVar[str] = "tca"

    block_size: int = 128
    window: int = 4096
    num_candidates: int = 14
    sigma: float = 1.0
    alpha: float = 0.1
    density: Density = "concentration"
    index: Index = "hhi"
    criterion: Criterion = "worth"
    tau: float = 0.9
    reserve: int | None = None
    observation: int = 64
    spread: int = 16
    fetch: int = 8
    fetch_stride: int = 16
    read_tolerance: float = 0.1
    keep_tolerance: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            value = getattr(self, name)
            if name == "reserve" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise UserError(f"TCAConfig.{name} = {value!r}: must be an integer")
            if name != "seed" and int(value) > _LARGEST:
                raise UserError(f"TCAConfig.{name} = {value}: must be at most 2^31 - 1")
            object.__setattr__(self, name, int(value))  # a NumPy integer would not survive JSON
        for name in ("sigma", "alpha", "tau", "read_tolerance", "keep_tolerance"):
            value = getattr(self, name)
            if not is_finite_number(value):
                raise UserError(f"TCAConfig.{name} = {value!r}: must be a finite number")
            object.__setattr__(self, name, float(value))
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise UserError(f"TCAConfig.block_size = {self.block_size}: must be a power of two, at least 1")
        if self.window < self.block_size or self.window % self.block_size:
            raise UserError(
                f"TCAConfig.window = {self.window}: must be a positive multiple of block_size = {self.block_size}"
            )
        if not 2 <= self.num_candidates <= _MOST_CANDIDATES:
            raise UserError(f"TCAConfig.num_candidates = {self.num_candidates}: must lie in [2, {_MOST_CANDIDATES}]")
        if self.sigma <= 0:
            raise UserError(f"TCAConfig.sigma = {self.sigma}: must be positive")
        if not 0 <= self.alpha <= 1:
            raise UserError(f"TCAConfig.alpha = {self.alpha}: must lie in [0, 1]")
        if not 0 < self.tau <= 1:
            raise UserError(f"TCAConfig.tau = {self.tau}: must lie in (0, 1]")
        if self.reserve is not None and self.reserve < 0:
            raise UserError(f"TCAConfig.reserve = {self.reserve}: must be at least 0, or None for window // 8")
        for name in ("observation", "spread", "fetch"):
            if getattr(self, name) < 1:
                raise UserError(f"TCAConfig.{name} = {getattr(self, name)}: must be at least 1")
        if self.fetch_stride < 1 or self.fetch_stride & (self.fetch_stride - 1):
            raise UserError(f"TCAConfig.fetch_stride = {self.fetch_stride}: must be a power of two, at least 1")
        if not 0 <= self.read_tolerance < 1:
            raise UserError(f"TCAConfig.read_tolerance = {self.read_tolerance}: must lie in [0, 1)")
        if self.keep_tolerance < 0:
            raise UserError(f"TCAConfig.keep_tolerance = {self.keep_tolerance}: must be at least 0")
        check_seed("TCAConfig.seed", self.seed)
        for name, allowed in (("density", Density), ("index", Index), ("criterion", Criterion)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise UserError(f"TCAConfig.{name} = {value!r}: must be one of {list(get_args(allowed))}")

    @classmethod
    def paper(cls, **overrides: Any) -> TCAConfig:
        """The paper's own setting: Eq. 6 with alpha 0.5, the column-mean criterion of Eq. 5, no reserve."""
        paper = cls(alpha=0.5, density="paper", criterion="column_mean", tau=0.9, reserve=0)
        return dataclasses.replace(paper, **overrides)

    @property
    def reserve_tokens(self) -> int:
        """Tokens of the reserve, R."""
        return self.window // 8 if self.reserve is None else self.reserve

    @property
    def num_queries(self) -> int:
        """Last prompt queries that a selection looks at: the last one scores the blocks, all choose the reserve."""
        return self.observation if self.reserve_tokens else 1

    def num_ranked_blocks(self, tokens: Tokens) -> Tokens:
        """n = max(0, L // b - w // b): blocks of a prompt of L tokens that are ranked and budgeted."""
        return num_ranked_blocks(tokens, self.block_size, self.window)
