"""`tca-jax lm-eval`: lm_eval's own command line, in which this library's models are known."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Annotated, Any

import typer

from tca_jax.errors import UserError

_MODEL_TYPES = ("tca_jax", "tca-jax")


def lm_eval(arguments: Annotated[list[str] | None, typer.Argument(help="lm_eval's own, as they are.")] = None) -> None:
    """Run lm-evaluation-harness on a model of this library (extra "lab").

    All arguments are those of lm_eval's own command line, where --model is tca_jax unless it is given; the model's go
    into --model_args. `lm_eval run --help` lists the first, docs/lm-evaluation-harness.md the second.

    Example: [bold]tca-jax lm-eval --model_args pretrained=recall-tiny,profile=shipped --tasks gsm8k[/]
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed: pip install 'lm-eval[ruler,longbench]'")
    import lm_eval.__main__ as program

    import tca_jax.lab.harness.model  # noqa: F401 (registers the model type)

    program.setup_logging()
    sys.argv = ["tca-jax lm-eval", *(arguments or [])]
    harness = program.HarnessCLI()
    parsed = harness.parse_args()
    if getattr(parsed, "command", None) == "run":
        _complete(parsed)
    harness.execute(parsed)


def _complete(parsed: argparse.Namespace) -> None:
    """Names the model type, and the tokenizer that tasks size their prompts by, where the arguments do not."""
    from tca_jax.loading import checkpoint_folder

    if parsed.config is not None:  # says what the arguments do not
        return
    parsed.model = parsed.model or _MODEL_TYPES[0]
    model: dict[str, Any] = parsed.model_args or {}
    if parsed.model in _MODEL_TYPES and "tokenizer" not in model and "pretrained" in model:
        folder = checkpoint_folder(model["pretrained"], model.get("revision"))
        parsed.metadata = {"tokenizer": str(folder), **(parsed.metadata or {})}
