"""TCAConfig: the hyperparameters of TCA-Attention."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Literal, get_args

from tca_jax.errors import check_geometry, check_integer, check_not_negative, check_number, check_seed, require
from tca_jax.methods.base import Tokens, num_ranked_blocks

Density = Literal["concentration", "paper", "random"]
Index = Literal["hhi", "entropy"]
Criterion = Literal["column_mean", "retained_mass"]

_LARGEST = 2**31 - 1  # positions are 32-bit integers
#: Least and most of the integers; as many candidates are far more shapes than a block has budgets.
_INTEGERS = {"block_size": (1, _LARGEST), "window": (1, _LARGEST), "num_candidates": (2, 1024)}
_INTEGERS |= {"reserve": (0, _LARGEST), "observation": (1, _LARGEST), "spread": (1, _LARGEST)}
_NAMES = {"density": Density, "index": Index, "criterion": Criterion}


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
        for name, (least, most) in _INTEGERS.items():
            if getattr(self, name) is not None or name != "reserve":
                check_integer(f"TCAConfig.{name}", getattr(self, name), at_least=least, at_most=most)
        check_seed("TCAConfig.seed", self.seed)
        check_number("TCAConfig.sigma", self.sigma, above=0, at_most=1e18)
        check_number("TCAConfig.tau", self.tau, above=0, at_most=1)
        check_not_negative("TCAConfig.alpha", self.alpha)
        require(self.alpha <= 1, f"TCAConfig.alpha = {self.alpha!r}: must lie in [0, 1]")
        for name, allowed in _NAMES.items():
            known, value = list(get_args(allowed)), getattr(self, name)
            require(value in known, f"TCAConfig.{name} = {value!r}: must be one of {known}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str | None):  # a NumPy number would not survive JSON
                number = int(value) if isinstance(value, numbers.Integral) else float(value)
                object.__setattr__(self, field.name, number)
        check_geometry(self.block_size, self.window, "TCAConfig.")

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
