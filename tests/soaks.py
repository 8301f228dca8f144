"""Short soaks of a tiny model, for tests of what they find and of what they leave."""

from __future__ import annotations

from pathlib import Path


def soak_arguments(model: Path, generations: int, out: Path) -> list[str]:
    """Of `tca-jax`. Always the same few shapes: the programs of one run serve the next."""
    options = {"model": model, "generations": generations, "shapes": 2, "lengths": 64, "window": 128, "out": out}
    return ["bench", "soak", *(f"--{name}={value}" for name, value in options.items())]
