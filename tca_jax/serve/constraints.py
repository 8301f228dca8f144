"""Masks of the next token of an answer: any function, or one that llguidance computes from a grammar."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool

from tca_jax.engine.lm import LM
from tca_jax.errors import Unsupported, UserError, explaining, require

#: New tokens of one answer -> tokens that may come next; where there are none, the answer ends.
Mask = Callable[[list[int]], Bool[np.ndarray, " V"]]
_MAX_BYTES = 2**16  # of a grammar: more take seconds to compile
#: 20 to 400 ms of compilation, 15 ms of a mask, and states of one or two kB each for every answer.
_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "max_lexer_states": 50_000}
_WHITESPACE = r" |\n {0,16}"  # between two tokens of JSON; without a bound some models write nothing else


class NoGrammars(Unsupported):
    """Grammars need a library that is not there, or do not work with the tokenizer."""


class Grammars:
    """Compiles grammars: `grammars.json(schema)()` is the mask of one answer. ValueError if one cannot be compiled."""

    def __init__(self, lm: LM) -> None:
        with explaining("grammars need llguidance: pip install llguidance", ImportError, error=NoGrammars):
            import llguidance.hf
        self._matcher, self._size = llguidance.LLMatcher, lm.config.vocab_size
        self._limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        size, stops = max(self._size, len(lm.tokenizer)), list(lm.eos_token_ids) or None  # no grammar allows more ids
        with explaining(f"grammars do not work with the tokenizer of {lm.name}", ValueError, error=NoGrammars):
            self._tokenizer = llguidance.hf.from_tokenizer(lm.tokenizer, n_vocab=size, eos_token=stops)

    def json(self, schema: dict[str, Any], argument: str = "schema") -> Callable[[], Mask]:
        """JSON of a schema, its properties in the schema's order; `{"type": "object"}` for any object."""
        make: Any = self._matcher.grammar_from_json_schema
        return self._compile(json.dumps(schema), lambda text: make(text, {"whitespace_pattern": _WHITESPACE}), argument)

    def regex(self, pattern: str) -> Callable[[], Mask]:
        """Text that a regular expression matches, without lookaround and back references."""
        return self._compile(pattern, self._matcher.grammar_from_regex, "pattern")

    def lark(self, grammar: str) -> Callable[[], Mask]:
        """Text of a grammar in llguidance's variant of Lark's syntax."""
        return self._compile(grammar, self._matcher.grammar_from_lark, "grammar")

    def _compile(self, text: str, compiler: Callable[[str], str], argument: str) -> Callable[[], Mask]:
        size = len(text.encode("utf-8", "surrogatepass"))
        require(size <= _MAX_BYTES, f"{argument} has {size:,} bytes: must have at most {_MAX_BYTES:,}")
        with explaining(argument, ValueError):
            matcher = self._matcher(self._tokenizer, compiler(text), log_level=0, limits=self._limits)
        self._mask(matcher, argument, [])  # a grammar without a beginning fails here
        return lambda: functools.partial(self._mask, matcher.deep_copy(), argument)

    def _mask(self, matcher: Any, argument: str, tokens: list[int]) -> Bool[np.ndarray, " V"]:
        matcher.consume_tokens(tokens[-1:])
        bits = bytes(-(-self._size // 8)) if matcher.is_stopped() or matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            error = matcher.get_error().removesuffix("<non-verbose/>").replace("NoExtensionBias", "no token fits")
            raise UserError(f"{argument}{f', after {len(tokens)} tokens' if tokens else ''}: {error.strip()[:500]}")
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=self._size, bitorder="little").view(bool)
