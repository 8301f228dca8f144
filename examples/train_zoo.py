"""Trains the zoo: small byte-level models of different shape and training, on which calibration is measured.

    pip install optax
    python examples/train_zoo.py --out zoo                          # all members, one after another, on one GPU
    CUDA_VISIBLE_DEVICES=1 python examples/train_zoo.py --out zoo --only hops --workers 4    # some, beside others
    python examples/train_zoo.py --out zoo-smoke --smoke            # any machine, a minute: runs every step

Nothing is tuned on these models. The shipped recall-tiny is the zoo's member of the usual number of steps and is not
trained again. A member whose folder has its weights already is left as it is.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, NamedTuple

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import typer
from recall_data import Stage
from train_recall_model import Recipe, train
from zoo_tasks import MIXTURES


class Member(NamedTuple):
    """A model of the zoo.

    Attributes:
        recipe: How it is trained.
        seed: Draws its weights and data.
    """

    recipe: Recipe
    seed: int


_POSITIONS = 20480  # a text of 16384 tokens, questions about it and their answers

ZOO: dict[str, Member] = {
    "recall-4x": Member(Recipe().times(4), seed=1),
    "grouped": Member(
        Recipe(
            tasks=MIXTURES["grouped"],
            num_kv_heads=2,
            max_positions=_POSITIONS,
            stages=(Stage(1024, 64, 2000), Stage(4096, 16, 600), Stage(16384, 4, 400)),
            held_out_rows=8,
        ),
        seed=2,
    ),
    "deep-qknorm": Member(
        Recipe(
            model_type="qwen3",
            tasks=MIXTURES["deep-qknorm"],
            intermediate_size=512,
            num_layers=10,
            num_heads=4,
            num_kv_heads=2,
            max_positions=_POSITIONS,
            stages=(Stage(1024, 64, 2000), Stage(4096, 16, 450), Stage(16384, 4, 250)),
            peak_lr=1.5e-3,
            held_out_rows=8,
        ),
        seed=3,
    ),
    "biases-nocopy": Member(
        Recipe(
            model_type="qwen2",
            tasks=MIXTURES["biases-nocopy"],
            intermediate_size=512,
            num_layers=8,
            num_kv_heads=2,
            max_positions=_POSITIONS,
            stages=(Stage(1024, 64, 2200), Stage(4096, 16, 500), Stage(16384, 4, 300)),
            held_out_rows=8,
        ),
        seed=4,
    ),
    "hops": Member(
        Recipe(
            tasks=MIXTURES["hops"],
            num_layers=8,
            max_positions=_POSITIONS,
            stages=(Stage(1024, 64, 3000), Stage(4096, 16, 500), Stage(16384, 4, 300)),
            held_out_rows=8,
        ),
        seed=5,
    ),
    "large-32k": Member(
        Recipe(
            tasks=MIXTURES["large-32k"],
            hidden_size=512,
            intermediate_size=1536,
            num_layers=8,
            num_kv_heads=2,
            max_positions=36864,  # as `_POSITIONS`, of 32768 tokens
            stages=(Stage(1024, 64, 1600), Stage(4096, 16, 400), Stage(16384, 4, 200), Stage(32768, 2, 200)),
            peak_lr=1e-3,
            held_out_rows=8,
        ),
        seed=6,
    ),
}


def smoke(recipe: Recipe) -> Recipe:
    """A recipe's family, heads and tasks in a tiny model that is trained for a few steps."""
    return dataclasses.replace(
        recipe,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        head_dim=32,
        max_positions=8192,  # a calibration text and all its questions
        stages=(Stage(1024, 2, 3), Stage(2048, 1, 2)),
        warmup_steps=2,
        log_every=2,
        held_out_rows=1,
    )


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder that gets a folder for each member.")],
    only: Annotated[list[str] | None, typer.Option(help="Train this member only; may be repeated.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that make batches (default: the cores less two, at most 12).")
    ] = None,
    smoke_run: Annotated[bool, typer.Option("--smoke", help="Tiny models, a few steps: checks that all runs.")] = False,
) -> None:
    """Train the zoo's members one after another."""
    names = list(dict.fromkeys(only or ZOO))
    if unknown := [name for name in names if name not in ZOO]:
        raise typer.BadParameter(f"{unknown}: must be among {list(ZOO)}", param_hint="--only")
    for name in names:
        folder, member = out / name, ZOO[name]
        if (folder / "model.safetensors").exists():
            print(f"{name}: {folder} has a model already", flush=True)
            continue
        print(f"{name}:", flush=True)
        train(smoke(member.recipe) if smoke_run else member.recipe, folder, seed=member.seed, workers=workers)


if __name__ == "__main__":
    app()
