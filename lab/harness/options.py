"""What a task asks of a generation, in lm_eval's words, as the arguments of `tca_jax.generate`."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

from tca_jax.errors import UserError

# Other engines' names of the same thing; the first that is given counts, as in lm_eval's own models.
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")
_ONLY = {"num_beams": 1, "num_return_sequences": 1}  # what tasks say of options that are no others here


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """Options of a request; requests with equal ones are answered together.

    Attributes:
        max_new_tokens: Most tokens of an answer.
        until: Strings that end it.
        temperature: 0 is greedy.
        sampling: Further arguments of `tca_jax.generate`, as sorted pairs.
    """

    max_new_tokens: int
    until: tuple[str, ...]
    temperature: float
    sampling: tuple[tuple[str, float], ...]

    @classmethod
    def of(
        cls, given: Mapping[str, Any], max_gen_toks: int, repetition_penalty: float | None = None
    ) -> GenerationOptions:
        """The options of a request.

        Args:
            given: What the task gives, such as {"until": ["\\n"], "max_gen_toks": 128, "do_sample": False}. Without
                do_sample a temperature above 0 samples; do_sample without a temperature samples at 1.
            max_gen_toks: Most tokens where the task names none.
            repetition_penalty: Where the task names none; None for none.

        Raises:
            ValueError: there is an option that this library does not have; names it.
        """
        options = dict(given)
        most = [value for name in _MOST_TOKENS if (value := options.pop(name, None)) is not None]
        until = options.pop("until", None) or ()
        strings = (until,) if isinstance(until, str) else tuple(until)
        sampling = {} if repetition_penalty is None else {"repetition_penalty": repetition_penalty}
        sampling |= {name: value for name in _SAMPLING if (value := options.pop(name, None)) is not None}
        temperature = _temperature(options.pop("do_sample", None), options.pop("temperature", None))
        for name, value in options.items():
            if name not in _ONLY:
                known = sorted({*_MOST_TOKENS, "until", "do_sample", "temperature", *_SAMPLING})
                raise UserError(f"generation option {name} = {value!r}: must be one of {known}")
            if value != _ONLY[name]:
                raise UserError(f"generation option {name} = {value!r}: must be {_ONLY[name]}")
        tokens = int(most[0]) if most else max_gen_toks
        return cls(tokens, tuple(filter(None, strings)), temperature, tuple(sorted(sampling.items())))

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


def _temperature(do_sample: Any, temperature: Any) -> float:
    if temperature is not None and (isinstance(temperature, bool) or not isinstance(temperature, numbers.Real)):
        raise UserError(f"generation option temperature = {temperature!r}: must be a number")
    if do_sample is None:
        return float(temperature or 0)
    return (1.0 if temperature is None else float(temperature)) if do_sample else 0.0
