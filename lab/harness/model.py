"""HarnessLM: a model of this library for lm_eval: log-likelihoods, rolling ones, and answers up to a string."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from tqdm import tqdm

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        f"the adapter needs lm-evaluation-harness: pip install 'lm-eval[ruler,longbench]' ({error})"
    ) from error

import tca_jax
from tca_jax.engine.lm import stored_entry
from tca_jax.engine.sampling import Sampling
from tca_jax.engine.score import score_answers
from tca_jax.errors import UserError
from tca_jax.lab.harness.loading import load_model, stored_repetition_penalty
from tca_jax.methods.registry import describe_method

_LOG = logging.getLogger(__name__)
_ANSWERS = 8  # most answers to a prompt in one call
# Names of a task's generation options; of the first the first given one counts, as in lm_eval's own models.
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")
_ONLY = {"num_beams": 1, "num_return_sequences": 1}
Item = TypeVar("Item")


@register_model("tca_jax", "tca-jax")
class HarnessLM(TemplateLM):
    """A checkpoint under an attention method, for `lm_eval.simple_evaluate` and lm_eval's command line.

    A continuation's log-likelihood is that of an answer: the context is read as a prompt and the continuation is
    teacher-forced, so that prefill and cache policy both count. A rolling log-likelihood reads windows as prompts: it
    measures the prefill policy alone.

    Args:
        pretrained: Alias, Hub id or local folder, or a loaded `LM`.
        profile: Profile folder, or "shipped".
        method: Attention method by its name, "a+b" for a pair; None for the profile's, or full attention without one.
        dtype: float32, bfloat16 or float16.
        weights: As for `tca_jax.load`.
        kv: As for `tca_jax.load`.
        revision: Branch, tag or commit on the Hub.
        batch_size: Prompts in one call.
        max_length: Most tokens of a prompt with its answer, whose last token is not read if it is given. Longer prompts
            lose their beginning. None for the model's positions.
        max_gen_toks: Most tokens of an answer if the task names none.
        repetition_penalty: Of answers if the task names none; None for the checkpoint's, as in transformers.
        enable_thinking: For chat templates with this option.
        think_end_token: Text that ends a model's thinking: an answer follows the last one.
        add_bos_token: Whether texts begin with the tokenizer's own tokens; None for the tokenizer's default.
        seed: Of sampled answers.
        backend: Kernel backend.
        tokenizer: Unused: tasks that size their prompts read it from the model arguments.
        device: Unused: JAX decides.
        trust_remote_code: Unused: no code of a checkpoint is run.
        max_batch_size: Must be None.
        **options: Options of the method; of a pair, a mapping for each part.

    Raises:
        ValueError: an argument is not allowed; names it.
    """

    def __init__(
        self,
        pretrained: Any,
        profile: str | None = None,
        method: str | None = None,
        *,
        dtype: str | None = None,
        weights: str | None = None,
        kv: str | None = None,
        revision: str | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        repetition_penalty: float | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        add_bos_token: bool | None = None,
        seed: int = 0,
        backend: str = "auto",
        tokenizer: Any = None,
        device: Any = None,
        trust_remote_code: bool = False,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if max_batch_size is not None:
            raise UserError(f"max_batch_size = {max_batch_size!r}: must be None; batch_size is the size of all batches")
        self._rows, self._max_gen_toks = _count("batch_size", batch_size, 1), _count("max_gen_toks", max_gen_toks, 1)
        if repetition_penalty is None:
            repetition_penalty = stored_repetition_penalty(pretrained, revision)
        Sampling(repetition_penalty=repetition_penalty)  # checks it
        self._repetition_penalty = repetition_penalty
        self.lm = load_model(pretrained, profile, method, options, revision, dtype=dtype, weights=weights, kv=kv)
        if self.lm.tokenizer is None:
            raise UserError(f"pretrained: {self.lm.name} has no tokenizer, and lm_eval asks in text")
        positions = self.lm.config.max_context
        self._max_length = positions if max_length is None else _count("max_length", max_length, 2)
        if self._max_length > positions:
            raise UserError(f"max_length = {max_length}: must be at most {positions}, the positions of {self.lm.name}")
        self._think_end, self._add_bos_token = think_end_token, add_bos_token
        self._seed, self._backend = _count("seed", seed, 0), backend
        self._held_bytes = self._full_bytes = 0  # of the caches of all answers
        self._template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, whose chat template lm_eval looks at."""
        return self.lm.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """The model's name, for lm_eval's cache of prompts."""
        return self.lm.name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        end = self.tokenizer.eos_token_id
        return end if end is not None else next(iter(self.lm.eos_token_ids), self.lm.pad_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt with its answer."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Most tokens of an answer if the task names none."""
        return self._max_gen_toks

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; by default with the tokenizer's own tokens, unless a chat template has written them."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (begin and string.startswith(begin)) and self._add_bos_token is not False
        return self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat in the model's template; without a generation prompt its last message is continued."""
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.lm.name} has no chat template: leave --apply_chat_template out")
        try:
            return self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._template_options,
            )
        except Exception as error:  # templates are programs: anything can come out of them
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"the chat template of {self.lm.name} does not take this chat: {reason}") from error

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is greedy; a shared prompt is read once for 8 of them."""
        answers = [continuation for _, _, continuation in requests]
        places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        cut = []
        for i, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)  # the last token of all is not read
            if not continuation or room < 1:
                raise UserError(f"a continuation has {len(continuation)} tokens: must have from 1 to {self.max_length}")
            places[tuple(context[-room:])].append(i)
            cut.append(len(context) > room)
        self._warn_cut(cut)
        alike: dict[tuple[int, bool], list[tuple[tuple[int, ...], list[int]]]] = defaultdict(list)  # one program each
        for prompt, of_prompt in places.items():
            for start in range(0, len(of_prompt), _ANSWERS):
                some = of_prompt[start : start + _ANSWERS]
                times = 1 << (len(some) - 1).bit_length()
                alike[times, all(len(answers[i]) == 1 for i in some)].append((prompt, some))
        results: list[Any] = [None] * len(requests)
        for (times, _), questions in alike.items():
            for batch, rows in self._batches(questions, [len(prompt) for prompt, _ in questions], disable_tqdm):
                given = [[answers[i] for i in _filled(some, times)] for _, some in rows]
                scores = score_answers(self.lm, [prompt for prompt, _ in rows], given, backend=self._backend)
                for (_, some), logprobs, greedy in zip(batch, scores.logprobs, scores.greedy, strict=False):
                    for i, of_answer, is_greedy in zip(some, logprobs, greedy, strict=False):
                        results[i] = float(of_answer.sum()), is_greedy
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, window by window; every token is counted once."""
        windows = []  # tokens, how many of them are predicted, and the request
        for i, request in enumerate(requests):
            split = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,  # that are read: a window has one token more
                context_len=1,
            )
            for context, predicted in map(make_disjoint_window, split):
                windows.append(([*context, *predicted], len(predicted), i))
        totals = [0.0] * len(requests)
        for batch, rows in self._batches(windows, [len(tokens) for tokens, _, _ in windows], disable_tqdm):
            logprobs = tca_jax.score(self.lm, [tokens for tokens, _, _ in rows], backend=self._backend).logprobs
            for (_, count, i), of_text in zip(batch, logprobs, strict=False):
                totals[i] += float(of_text[len(of_text) - count :].sum())
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, up to the first of its stop strings."""
        alike: dict[str, list[int]] = defaultdict(list)  # by their options
        for i, request in enumerate(requests):
            options = generation_options(request.args[1], self.max_gen_toks, self._repetition_penalty)
            if self.max_length <= options["max_new_tokens"]:
                raise UserError(
                    f"max_gen_toks = {options['max_new_tokens']}: must be less than max_length = {self.max_length}"
                )
            alike[json.dumps(options)].append(i)
        encoded = [self.tok_encode(request.args[0]) for request in requests]
        results, cut, batches = [""] * len(requests), list[bool](), 0
        for written, places in alike.items():
            options = json.loads(written)
            room = self.max_length - options["max_new_tokens"]
            cut += [len(encoded[i]) > room for i in places]
            stops = stop_token_ids(self.lm, options["stop"])
            for batch, rows in self._batches(places, [len(encoded[i]) for i in places], disable_tqdm):
                seed = (self._seed + batches) % 2**32  # repeats of a question differ
                batches += options["temperature"] > 0
                prompts = [encoded[i][-room:] for i in rows]
                given = {**options, "stop_token_ids": stops, "seed": seed, "backend": self._backend}
                out = tca_jax.generate(self.lm, prompts, **given)
                self._held_bytes += out.stats.kv_cache_bytes
                self._full_bytes += out.stats.full_kv_cache_bytes
                for i, text in zip(batch, out.text, strict=False):
                    results[i] = postprocess_generated_text(text, options["stop"], self._think_end)
                    self.cache_hook.add_partial("generate_until", requests[i].args, results[i])
        self._warn_cut(cut)
        return results

    def _batches(
        self, items: Sequence[Item], lengths: Sequence[int], quiet: bool
    ) -> Iterator[tuple[list[Item], list[Item]]]:
        """Batches, the longest first, as they are and with the last item repeated: all have one number of rows."""
        order = sorted(range(len(items)), key=lengths.__getitem__, reverse=True)
        rows = min(self._rows, len(items))
        for start in tqdm(range(0, len(order), rows), disable=quiet, desc="tca_jax"):
            batch = [items[i] for i in order[start : start + rows]]
            yield batch, _filled(batch, rows)

    def _warn_cut(self, cut: Sequence[bool]) -> None:
        if any(cut):
            _LOG.warning(
                "%d of %d prompts lost their beginning: with their answers they are longer than max_length = %d",
                *(sum(cut), len(cut), self.max_length),
            )

    def get_model_info(self) -> dict[str, Any]:
        """The entries beside lm_eval's results: model, method, share of full attention's cache bytes of answers."""
        return {
            "model_num_parameters": sum(leaf.size for leaf in jax.tree.leaves(self.lm.params)),
            "model_dtype": str(self.lm.dtype),
            **stored_entry(self.lm),
            "model_fingerprint": self.lm.fingerprint,
            "attention_method": self.lm.method.name,
            "attention_method_options": json.loads(describe_method(self.lm.method)),
            "kv_cache_share": self._held_bytes / self._full_bytes if self._full_bytes else None,
            "tca_jax_version": tca_jax.__version__,
            "jax_device": jax.devices()[0].device_kind,
        }


def generation_options(
    given: Mapping[str, Any], max_gen_toks: int, repetition_penalty: float | None = None
) -> dict[str, Any]:
    """Arguments of `tca_jax.generate` from a task's, such as {"until": ["\\n"], "do_sample": False}.

    Without do_sample a temperature above 0 samples; do_sample without a temperature samples at 1. `max_gen_toks` and
    `repetition_penalty` are defaults.
    """
    options = dict(given)
    most = [value for name in _MOST_TOKENS if (value := options.pop(name, None)) is not None]
    until, do_sample = options.pop("until", None) or (), options.pop("do_sample", None)
    temperature = options.pop("temperature", None)
    if temperature is not None and (isinstance(temperature, bool) or not isinstance(temperature, int | float)):
        raise UserError(f"generation option temperature = {temperature!r}: must be a number")
    if do_sample is not None:
        temperature = (1 if temperature is None else temperature) if do_sample else 0
    sampling = {} if repetition_penalty is None else {"repetition_penalty": repetition_penalty}
    sampling |= {name: value for name in _SAMPLING if (value := options.pop(name, None)) is not None}
    for name, value in options.items():
        if name not in _ONLY:
            known = sorted({*_MOST_TOKENS, "until", "do_sample", "temperature", *_SAMPLING})
            raise UserError(f"generation option {name} = {value!r}: must be one of {known}")
        if value != _ONLY[name]:
            raise UserError(f"generation option {name} = {value!r}: must be {_ONLY[name]}")
    return {
        "max_new_tokens": int(most[0]) if most else max_gen_toks,
        "stop": [text for text in ((until,) if isinstance(until, str) else until) if text],
        "temperature": float(temperature or 0),
        **sampling,
    }


def stop_token_ids(lm: tca_jax.LM, until: Sequence[str]) -> list[int]:
    """Tokens that end an answer: the model's, and stop strings that are special tokens, which text does not show."""
    special = {str(token): i for i, token in lm.tokenizer.added_tokens_decoder.items() if token.special}
    return list(dict.fromkeys([*lm.eos_token_ids, *(special[text] for text in until if text in special)]))


def _filled(items: Sequence[Item], size: int) -> list[Item]:
    return [*items, *[items[-1]] * (size - len(items))]


def _count(name: str, value: Any, at_least: int) -> int:
    """An integer argument; lm_eval's command line gives some of them as text."""
    try:
        number = int(value)
        allowed = not isinstance(value, bool) and (isinstance(value, str) or number == value) and number >= at_least
    except (TypeError, ValueError):
        allowed = False
    if not allowed:
        raise UserError(f"{name} = {value!r}: must be an integer of at least {at_least}")
    return number
