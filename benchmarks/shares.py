"""Kept shares as benchmarks take them, and synthetic budgets of such shares: unequal between heads, as calibrated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

from tca_jax import methods
from tca_jax.methods.base import Method
from tca_jax.methods.candidates import budget_sizes, candidate_distributions
from tca_jax.methods.config import TCAConfig


@dataclasses.dataclass(frozen=True)
class Share:
    """Mean share of the ranked blocks that the heads' budgets keep; window and reserve come on top.

    Attributes:
        cache: What the cache keeps; 1 is full attention and its cache.
        prefill: What the prompt's own queries attend to; None: the same. Otherwise as many heads as bring the mean to
            `cache` are dense in the cache, and the others have one row.
    """

    cache: float
    prefill: float | None = None

    @classmethod
    def parse(cls, text: str | float) -> Share:
        """From "0.2", or "0.05:0.25" for prefill and cache; or from a `cell`.

        Raises:
            typer.BadParameter: it is neither.
        """
        try:
            *prefill, cache = map(float, str(text).split(":"))
            return cls(cache, *prefill)
        except (TypeError, ValueError):
            raise typer.BadParameter(f"{text}: must be a share, or PREFILL:CACHE such as 0.05:0.25") from None

    def __str__(self) -> str:
        return f"{self.cache!r}" if self.prefill is None else f"{self.prefill!r}:{self.cache!r}"

    @property
    def cell(self) -> float | str:
        """What tables hold."""
        return self.cache if self.prefill is None else str(self)

    @property
    def name(self) -> str:
        """What tables of attentions call it."""
        return "full" if self == FULL else f"TCA {self.percent} of blocks"

    @property
    def percent(self) -> str:
        """For labels."""
        return ":".join(f"{100 * share:g}%" for share in (self.prefill, self.cache) if share is not None)

    def check(self, option: str) -> None:
        """Raises ValueError unless shares lie between 0 and 1, and the cache keeps more than prefill reads."""
        if not all(0 < share < 1 for share in (self.cache, self.prefill) if share is not None):
            raise ValueError(f"{option} {self}: must lie between 0 and 1")
        if self.prefill is not None and self.prefill >= self.cache:
            raise ValueError(f"{option} {self}: the cache must keep more than prefill attends to")

    def rows(self, config: TCAConfig, kv_heads: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Budget rows of the cache and of prefill, the latter None where they are the same."""
        if self.prefill is None:
            return unequal_candidates(config, kv_heads, self.cache), None
        prefill = unequal_candidates(config, kv_heads, self.prefill)
        return with_dense_heads(config, prefill, self.cache), prefill

    def method(self, config: TCAConfig, kv_heads: int, num_layers: int = 1) -> Method:
        """The method of that share, alike in all layers."""
        if self == FULL:
            return methods.BASELINE
        rows, prefill = self.rows(config, kv_heads)
        of_prefill = None if prefill is None else (prefill,) * num_layers
        return methods.configured(config, (rows,) * num_layers, of_prefill)


FULL = Share(1.0)  # stands for full attention and its cache

_HELP = "Kept shares of ranked blocks: one number, or PREFILL:CACHE."
SharesOption = Annotated[list[Share] | None, typer.Option(help=_HELP, parser=Share.parse, metavar="SHARE")]


def check_shares(shares: Sequence[Share], option: str = "--shares") -> None:
    """Raises ValueError unless every share can be kept."""
    for share in shares:
        share.check(option)


def describe_config(config: TCAConfig) -> str:
    """What of the configuration decides how much is kept, for the notes of tables: "that keep ..."."""
    reserve = f"a reserve of {config.reserve_tokens}" if config.reserve_tokens else "no reserve"
    return (
        "that keep such a share of the ranked blocks, unequally between heads (of two shares the first is what the "
        "prompt's queries attend to, the second what the cache keeps, with as many heads dense as that takes), beside "
        f"a window of {config.window} and {reserve} tokens a head"
    )


def unequal_candidates(config: TCAConfig, kv_heads: int, share: float) -> tuple[int, ...]:
    """Budget rows of a mean share near `share` (within 0.02 for 4 heads and more), unequal as after calibration."""
    shares = _row_shares(config)
    wanted = share + min(share, 1 - share) * np.linspace(-0.75, 0.75, kv_heads)
    rows = np.abs(shares - wanted[:, None]).argmin(axis=1)
    while True:
        error = shares[rows].mean() - share
        steps = np.clip(rows + (-1 if error > 0 else 1), 0, config.num_candidates)
        errors = np.abs(error + (shares[steps] - shares[rows]) / kv_heads)
        if errors.min() >= abs(error):
            return tuple(int(row) for row in np.random.default_rng(0).permutation(rows))
        rows[errors.argmin()] = steps[errors.argmin()]


def with_dense_heads(config: TCAConfig, candidates: tuple[int, ...], share: float) -> tuple[int, ...]:
    """The rows with as many heads dense, the fullest first, as bring the mean nearest to `share`; at least one."""
    shares, fullest = _row_shares(config), np.argsort(-np.asarray(candidates), kind="stable")
    mixes = np.tile(candidates, (len(candidates), 1))
    for dense, mix in enumerate(mixes, 1):
        mix[fullest[:dense]] = config.num_candidates
    best = np.abs(shares[mixes].mean(axis=1) - share).argmin()
    return tuple(mixes[best].tolist())


def _row_shares(config: TCAConfig) -> np.ndarray:
    """Mean share of a block that each row of budgets keeps, `[M + 1]`."""
    return candidate_distributions(config) @ budget_sizes(config) / config.block_size
