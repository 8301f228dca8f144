"""Serving: many documents on one card, questions about them answered together."""

from tca_jax.serve.constraints import Grammars, Mask
from tca_jax.serve.documents import Document
from tca_jax.serve.engine import Engine
from tca_jax.serve.streams import Completion, Stream

__all__ = ["Completion", "Document", "Engine", "Grammars", "Mask", "Stream"]
