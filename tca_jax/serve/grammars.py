"""Constraints by grammars: JSON of a schema, regular expressions, Lark grammars. llguidance computes the masks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool

from tca_jax.engine.lm import LM
from tca_jax.errors import Unsupported, UserError
from tca_jax.serve.constraints import Constraint

_MOST_BYTES = 2**16  # of a grammar: more take seconds to compile
_LEXER_STATES = 50_000  # of one or two kB each, of an answer
_COMPILE_FUEL = 1_000_000  # 20 to 400 ms
_STEP_FUEL = 200_000  # 15 ms of a mask
#: Between two tokens of JSON: one space, or a line break and an indent. Without a bound some models write nothing else.
_WHITESPACE = r" |\n {0,16}"


class Grammars:
    """Makes constraints for the answers of one model; threads may share it.

    Each method returns a function that makes a constraint for one answer: `engine.ask(..., constraint=json())`. An
    answer ends where nothing may follow; where a text may end or go on, stop tokens of the model are allowed, too.

    Args:
        lm: The model. It needs a fast tokenizer of byte-level tokens, or with fallback to bytes, and a stop token.

    Raises:
        ValueError: llguidance is not installed, or the tokenizer is of another kind.
    """

    def __init__(self, lm: LM) -> None:
        try:
            import llguidance.hf
        except ImportError:
            raise Unsupported("grammars need llguidance: pip install 'tca-jax[serve]'") from None
        if lm.tokenizer is None:
            raise UserError(f"{lm.name} was loaded without a tokenizer: grammars need one")
        self._vocabulary = lm.config.vocab_size
        # Ids past the tokenizer's are special tokens, which no grammar allows.
        size = max(self._vocabulary, len(lm.tokenizer))
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(
                lm.tokenizer, n_vocab=size, eos_token=list(lm.eos_token_ids) or None
            )
        except ValueError as error:
            raise Unsupported(f"grammars do not work with the tokenizer of {lm.name}: {error}") from None
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=_COMPILE_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            max_lexer_states=_LEXER_STATES,
            verbose_errors=False,
        )
        self._matcher = llguidance.LLMatcher

    def json(self, schema: dict[str, Any], argument: str = "schema") -> Callable[[], Constraint]:
        """JSON of a schema, its properties in the schema's order.

        Args:
            schema: A JSON Schema, as far as llguidance knows it; `{"type": "object"}` for any object.
            argument: Name of the argument in messages.

        Raises:
            ValueError: it is no schema, has more than 65,536 bytes, or uses what is not supported; names it.
        """
        try:
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"{argument} is no JSON: {error}") from None
        defaults: Any = {"whitespace_pattern": _WHITESPACE}
        return self._compiled(text, lambda: self._matcher.grammar_from_json_schema(text, defaults), argument)

    def regex(self, pattern: str) -> Callable[[], Constraint]:
        """Text that a regular expression matches as a whole, without lookaround and back references.

        Raises:
            ValueError: it is none, or has more than 65,536 bytes.
        """
        return self._compiled(pattern, lambda: self._matcher.grammar_from_regex(pattern), "pattern")

    def lark(self, grammar: str) -> Callable[[], Constraint]:
        """Text of a grammar in llguidance's variant of Lark's syntax.

        Raises:
            ValueError: it is none, or has more than 65,536 bytes.
        """
        return self._compiled(grammar, lambda: self._matcher.grammar_from_lark(grammar), "grammar")

    def _compiled(self, text: str, grammar: Callable[[], str], argument: str) -> Callable[[], Constraint]:
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > _MOST_BYTES:
            raise UserError(f"{argument} has {size:,} bytes: must have at most {_MOST_BYTES:,}")
        try:
            matcher = self._matcher(self._tokenizer, grammar(), log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # what allows no beginning is an error here
        except ValueError as error:
            raise UserError(f"{argument}: {error}") from None
        if matcher.is_error():
            raise UserError(f"{argument}: {_error(matcher)}")
        return lambda: _Grammar(matcher.deep_copy(), self._vocabulary, argument)


class _Grammar:
    """The constraint of one answer by a grammar."""

    def __init__(self, matcher: Any, vocabulary: int, argument: str) -> None:
        self._matcher, self._vocabulary, self._argument, self._consumed = matcher, vocabulary, argument, 0

    def __call__(self, tokens: list[int]) -> Bool[np.ndarray, " V"] | None:
        matcher = self._matcher
        matcher.consume_tokens(tokens[self._consumed :])
        self._consumed = len(tokens)
        complete = matcher.is_stopped()
        mask = b"" if complete else matcher.compute_bitmask()
        if matcher.is_error():
            raise UserError(f"{self._argument}, behind {len(tokens)} tokens of the answer: {_error(matcher)}")
        if complete:
            return None
        return np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocabulary, bitorder="little").view(bool)


def _error(matcher: Any) -> str:
    message = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return "nothing can follow" if message == "NoExtensionBias" else message[:500]
