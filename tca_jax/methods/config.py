"""TCAConfig: the hyperparameters of TCA-Attention."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, get_args

from tca_jax.errors import check_seed, is_finite_number, require
from tca_jax.methods.base import Tokens, num_ranked_blocks

Density = Literal["concentration", "paper", "random"]
Index = Literal["hhi", "entropy"]
Criterion = Literal["column_mean", "retained_mass"]

_LARGEST = 2**31 - 1  # positions are 32-bit integers
_MOST_CANDIDATES = 1024  # far more shapes than a block has budgets; tables grow with them


def _is_power_of_two(n: int) -> bool:
    return n > 0 and not n & (n - 1)


def _integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) <= _LARGEST


#: What fields must be, checked in this order: the type first, then the range.
_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("block_size", "window", "num_candidates", "observation", "spread"),
        _integer,
        "be an integer, at most 2^31 - 1",
    ),
    (("reserve",), lambda value: value is None or _integer(value), "be an integer, at most 2^31 - 1, or None"),
    (("sigma", "alpha", "tau"), is_finite_number, "be a finite number"),
    (("density",), get_args(Density).__contains__, f"be one of {list(get_args(Density))}"),
    (("index",), get_args(Index).__contains__, f"be one of {list(get_args(Index))}"),
    (("criterion",), get_args(Criterion).__contains__, f"be one of {list(get_args(Criterion))}"),
)
_RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("block_size",), _is_power_of_two, "be a power of two, at least 1"),
    (("num_candidates",), lambda m: 2 <= m <= _MOST_CANDIDATES, f"lie in [2, {_MOST_CANDIDATES}]"),
    (("sigma",), lambda x: x > 0, "be positive"),
    (("alpha",), lambda x: 0 <= x <= 1, "lie in [0, 1]"),
    (("tau",), lambda x: 0 < x <= 1, "lie in (0, 1]"),
    (("reserve",), lambda r: r is None or r >= 0, "be at least 0, or None for window // 8"),
    (("observation", "spread"), lambda n: n >= 1, "be at least 1"),
)


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
        criterion: Score of a candidate that Algorithm 1 compares with `tau`: "column_mean" (Eq. 5) or "retained_mass"
            (Theorem 1).
        tau: Threshold of Algorithm 1 in (0, 1]; the sparsest candidate that reaches it is taken.
        reserve: Tokens that each KV head keeps beside its budgets, R, chosen from all ranked blocks at once; None for
            window // 8, 0 for none.
        observation: Last prompt queries that choose the reserve; fewer in shorter prompts.
        spread: Tokens over which an observed token's score spreads, itself and those that follow it.
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
    criterion: Criterion = "column_mean"
    tau: float = 0.9
    reserve: int | None = None
    observation: int = 64
    spread: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        self._check(_TYPES)
        check_seed("TCAConfig.seed", self.seed)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str | None):  # a NumPy number would not survive JSON
                object.__setattr__(
                    self, field.name, int(value) if isinstance(value, numbers.Integral) else float(value)
                )
        self._check(_RANGES)
        fits = self.window > 0 and self.window % self.block_size == 0
        allowed = f"must be a positive multiple of block_size = {self.block_size}"
        require(fits, f"TCAConfig.window = {self.window}: {allowed}")

    def _check(self, rules: Iterable[Any]) -> None:
        for names, holds, allowed in rules:
            for name in names:
                require(holds(value := getattr(self, name)), f"TCAConfig.{name} = {value!r}: must {allowed}")

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
