"""Recall tasks: real text with facts hidden in it, questions about them, and protocols under which they are asked."""

from __future__ import annotations

from tca_jax.lab.recall.documents import Document, build_document
from tca_jax.lab.recall.tasks import PROTOCOLS, TASKS, Question, draw_question, is_correct

__all__ = ["PROTOCOLS", "TASKS", "Document", "Question", "build_document", "draw_question", "is_correct"]
