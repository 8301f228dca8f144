"""Serving: many documents on one card, questions about them answered together (DESIGN section 10)."""

from tca_jax.serve.constraints import Constraint
from tca_jax.serve.engine import DocumentInfo, Engine
from tca_jax.serve.grammars import Grammars
from tca_jax.serve.streams import Completion, Stream

__all__ = ["Completion", "Constraint", "DocumentInfo", "Engine", "Grammars", "Stream"]
