"""Kept shares as benchmarks take them, and the budgets and readings that are made up for each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

from tca_jax import methods
from tca_jax.errors import UserError
from tca_jax.methods.base import Method
from tca_jax.methods.candidates import budget_sizes, candidate_distributions
from tca_jax.methods.config import TCAConfig


@dataclasses.dataclass(frozen=True)
class Share:
    """Mean share of the ranked blocks that the heads' budgets keep; window and reserve come on top.

    Attributes:
        cache: What the cache keeps; 1 is full attention and its cache.
        prefill: What the prompt's own queries attend to; None: the same, unequally between heads. Otherwise all heads
            read at the row nearest to it, and as many as bring the mean to `cache` are dense in the cache.
        fetching: KV heads of the model that read blocks, the densest of the cache in layers that are spread evenly.
    """

    cache: float
    prefill: float | None = None
    fetching: int = 0

    @classmethod
    def parse(cls, text: str | float) -> Share:
        """From "0.2", or "0.05:0.25" for prefill and cache, each with "+16" behind it for heads that fetch; a `cell`.

        Raises:
            typer.BadParameter: it is none of these.
        """
        try:
            shares, _, fetching = str(text).partition("+")
            cache, *prefill = reversed([float(share) for share in shares.split(":")])
            if len(prefill) > 1:
                raise UserError(text)
            return cls(cache, prefill[0] if prefill else None, int(fetching or 0))
        except (TypeError, ValueError):
            raise typer.BadParameter(f"{text}: must be a share, or PREFILL:CACHE such as 0.05:0.25") from None

    def __str__(self) -> str:
        shares = f"{self.cache!r}" if self.prefill is None else f"{self.prefill!r}:{self.cache!r}"
        return f"{shares}+{self.fetching}" if self.fetching else shares

    @property
    def cell(self) -> float | str:
        """What tables hold, in a column that says nothing of heads that fetch."""
        return self.cache if self.prefill is None else f"{self.prefill!r}:{self.cache!r}"

    @property
    def name(self) -> str:
        """What tables of attentions call it."""
        return "full" if self == FULL else f"TCA {self.percent} of blocks{self.fetching_suffix}"

    @property
    def fetching_suffix(self) -> str:
        """Of its name: how many heads fetch, "" for none."""
        return f", {self.fetching} fetching" if self.fetching else ""

    @property
    def percent(self) -> str:
        """For labels."""
        return ":".join(f"{100 * share:g}%" for share in (self.prefill, self.cache) if share is not None)

    def check(self, option: str) -> None:
        """Raises ValueError unless shares lie between 0 and 1, and the cache keeps more than prefill reads."""
        if not all(0 < share < 1 for share in (self.cache, self.prefill) if share is not None):
            raise UserError(f"{option} {self}: must lie between 0 and 1")
        if self.prefill is not None and self.prefill >= self.cache:
            raise UserError(f"{option} {self}: the cache must keep more than prefill attends to")

    def rows(self, config: TCAConfig, kv_heads: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Budget rows of the cache and of prefill, the latter None where they are the same."""
        if self.prefill is None:
            return unequal_candidates(config, kv_heads, self.cache), None
        prefill = (int(np.abs(_row_shares(config) - self.prefill).argmin()),) * kv_heads
        return with_dense_heads(config, prefill, self.cache), prefill

    def readings(self, config: TCAConfig, kv_heads: int, num_layers: int) -> tuple[tuple[str, ...], ...] | str:
        """How each KV head of each layer reads, or all of them."""
        if not self.fetching:
            return "sparse"
        densest = np.argsort(-np.asarray(self.rows(config, kv_heads)[0]), kind="stable")
        readings = np.full((num_layers, kv_heads), "sparse")
        for layer, count in enumerate(fetching_by_layer(self.fetching, kv_heads, num_layers)):
            readings[layer, densest[:count]] = "blocks"
        return tuple(map(tuple, readings.tolist()))

    def method(self, config: TCAConfig, kv_heads: int, num_layers: int = 1) -> Method:
        """The method of that share, alike in all layers but for the heads that fetch."""
        if self == FULL:
            return methods.BASELINE
        rows, prefill = self.rows(config, kv_heads)
        of_prefill = None if prefill is None else (prefill,) * num_layers
        readings = self.readings(config, kv_heads, num_layers)
        return methods.configured(config, (rows,) * num_layers, prefill_candidates=of_prefill, readings=readings)


FULL = Share(1.0)  # stands for full attention and its cache

_HELP = "Kept shares of the ranked blocks, which are left of the window: one number, or PREFILL:CACHE."
BlockSharesOption = Annotated[
    list[Share] | None, typer.Option("--block-shares", help=_HELP, parser=Share.parse, metavar="SHARE")
]
FetchingOption = Annotated[
    list[int] | None,
    typer.Option(help="KV heads that read blocks; several numbers are compared.", show_default="0", min=0),
]


def check_shares(shares: Sequence[Share], option: str = "--block-shares") -> None:
    """Raises ValueError unless every share can be kept."""
    for share in shares:
        share.check(option)


def with_fetching(shares: Sequence[Share], fetching: Sequence[int] | None) -> list[Share]:
    """Every share with each number of KV heads that fetch, full attention as it is."""
    return [
        each
        for share in shares
        for each in ([share] if share == FULL else [dataclasses.replace(share, fetching=n) for n in fetching or [0]])
    ]


def check_fetching(fetching: Sequence[int] | None, heads: int, of: str) -> None:
    """Raises ValueError where more KV heads are to fetch than there are; `of` says where."""
    for number in fetching or ():
        if number > heads:
            raise UserError(f"--fetching {number}: {of} has {heads} KV heads")


def fetching_by_layer(fetching: int, kv_heads: int, num_layers: int) -> list[int]:
    """How many KV heads of each layer fetch: as evenly as can be, what is left over in layers as far apart as can be.

    Raises:
        ValueError: the model has fewer.
    """
    if fetching > kv_heads * num_layers:
        raise UserError(f"{fetching} heads cannot fetch: the model has {num_layers} layers of {kv_heads} KV heads")
    each, rest = divmod(fetching, num_layers)
    more = {int((i + 0.5) * num_layers / rest - 0.5) for i in range(rest)}
    return [each + (layer in more) for layer in range(num_layers)]


def describe_config(config: TCAConfig) -> str:
    """What of the configuration decides how much is kept, for the notes of tables: "that keep ..."."""
    reserve = f"a reserve of {config.reserve_tokens}" if config.reserve_tokens else "no reserve"
    return (
        "that keep such a share of the ranked blocks, unequally between heads (of two shares the first is what the "
        "prompt's queries attend to, every head at the row nearest to it, the second what the cache keeps, with as "
        f"many heads dense as that takes), beside a window of {config.window} and {reserve} tokens per head"
    )


def describe_fetching(config: TCAConfig, fetching: Sequence[int] | None) -> str:
    """What a note says of heads that fetch; "" where none does."""
    if not any(fetching or ()):
        return ""
    return (
        " Where it says fetching, so many KV heads read blocks, those that the cache keeps most of: each tile of their "
        "queries attends to its window and to the key blocks of the highest estimated attention (fetch = "
        f"{config.fetch:g}, fetch_stride = {config.fetch_stride})."
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
