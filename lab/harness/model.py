"""HarnessLM: a model of this library for lm_eval: log-likelihoods, rolling ones, and answers up to a string."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import tca_jax
from tca_jax.calibration.profile import options_of
from tca_jax.engine.lm import LM
from tca_jax.engine.sampling import Sampling
from tca_jax.engine.score import score_answers
from tca_jax.errors import check_integer, explaining, require
from tca_jax.lab.benchmarks.models import stored_entry
from tca_jax.lab.evaluation.samples import batches
from tca_jax.loading import checkpoint_folder, open_checkpoint
from tca_jax.methods.registry import describe_method, option_names, with_known
from tca_jax.models.json_object import read_json_object

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

    docs/lm-evaluation-harness.md describes the arguments, and which policies the figures measure. `pretrained` may be
    a loaded model, `options` are the method's; tokenizer, device, trust_remote_code and max_batch_size are unused.
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
        attention: str | None = None,
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
        self._rows, self.max_gen_toks = _count("batch_size", batch_size, 1), _count("max_gen_toks", max_gen_toks, 1)
        self._seed, self._backend = _count("seed", seed, 0), backend
        if repetition_penalty is None and not isinstance(pretrained, LM):
            path = checkpoint_folder(pretrained, revision) / "generation_config.json"
            repetition_penalty = read_json_object(path).get("repetition_penalty") if path.exists() else None
        Sampling(repetition_penalty=repetition_penalty)  # checks it
        self._repetition_penalty = repetition_penalty
        stored = {"dtype": dtype, "weights": weights, "kv": kv, "attention": attention}
        self.lm = load_model(pretrained, profile, method, options, revision, **stored)
        self.tokenizer, positions = self.lm.tokenizer, self.lm.config.max_context
        require(self.tokenizer, f"pretrained: {self.lm.name} has no tokenizer, and lm_eval asks in text")
        self.max_length = positions if max_length is None else _count("max_length", max_length, 2)
        within = f"must be at most {positions}, the positions of {self.lm.name}"
        require(self.max_length <= positions, f"max_length = {max_length}: {within}")
        self._think_end, self._add_bos_token = think_end_token, add_bos_token
        self._held_bytes = self._full_bytes = 0  # of the caches of all answers
        self._template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    tokenizer_name = property(lambda self: self.lm.name.replace("/", "__"), doc="For lm_eval's cache of prompts.")

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

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; by default with the tokenizer's own tokens, unless a chat template has written them."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (begin and string.startswith(begin)) and self._add_bos_token is not False
        return self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat in the model's template; without a generation prompt its last message is continued."""
        has_template = self.tokenizer.chat_template
        require(has_template, f"{self.lm.name} has no chat template: leave --apply_chat_template out")
        with explaining(f"the chat template of {self.lm.name} does not take this chat"):
            return self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._template_options,
            )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is greedy; a shared prompt is read once for 8 of them."""
        answers = [continuation for _, _, continuation in requests]
        places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        cut = []
        for i, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)  # the last token of all is not read
            fits = continuation and room >= 1
            require(fits, f"a continuation has {len(continuation)} tokens: must have from 1 to {self.max_length}")
            places[tuple(context[-room:])].append(i)
            cut.append(len(context) > room)
        self._warn_cut(cut)
        questions = [
            (prompt, of_prompt[start : start + _ANSWERS])
            for prompt, of_prompt in places.items()
            for start in range(0, len(of_prompt), _ANSWERS)
        ]
        results: list[Any] = [None] * len(requests)
        for batch, rows in self._batches(questions, lambda question: len(question[0]), disable_tqdm):
            times = 1 << (max(len(some) for _, some in rows) - 1).bit_length()
            given = [[answers[i] for i in (*some, *some[-1:] * (times - len(some)))] for _, some in rows]
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
        for batch, rows in self._batches(windows, lambda window: len(window[0]), disable_tqdm):
            logprobs = tca_jax.score(self.lm, [tokens for tokens, _, _ in rows], backend=self._backend).logprobs
            for (_, count, i), of_text in zip(batch, logprobs, strict=False):
                totals[i] += float(of_text[len(of_text) - count :].sum())
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, up to the first of its stop strings."""
        by_options: dict[str, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            options = generation_options(request.args[1], self.max_gen_toks, self._repetition_penalty)
            most = f"max_gen_toks = {options['max_new_tokens']}: must be less than max_length = {self.max_length}"
            require(self.max_length > options["max_new_tokens"], most)
            by_options[json.dumps(options)].append(i)
        encoded = [self.tok_encode(request.args[0]) for request in requests]
        results, cut, sampled = [""] * len(requests), list[bool](), 0
        # Text does not show stop strings that are special tokens.
        special = {str(token): i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        for written, places in by_options.items():
            options = json.loads(written)
            room = self.max_length - options["max_new_tokens"]
            cut += [len(encoded[i]) > room for i in places]
            stops = {*self.lm.eos_token_ids, *(special[text] for text in options["stop"] if text in special)}
            for batch, rows in self._batches(places, lambda i: len(encoded[i]), disable_tqdm):
                seed = (self._seed + sampled) % 2**32  # repeats of a question differ
                sampled += options["temperature"] > 0
                given = {**options, "stop_token_ids": sorted(stops), "seed": seed, "backend": self._backend}
                out = tca_jax.generate(self.lm, [encoded[i][-room:] for i in rows], **given)
                self._held_bytes += out.stats.kv_cache_bytes
                self._full_bytes += out.stats.full_kv_cache_bytes
                for i, text in zip(batch, out.text, strict=False):
                    results[i] = postprocess_generated_text(text, options["stop"], self._think_end)
                    self.cache_hook.add_partial("generate_until", requests[i].args, results[i])
        self._warn_cut(cut)
        return results

    def _batches(
        self, items: Sequence[Item], length: Callable[[Item], int], quiet: bool
    ) -> Iterator[tuple[Sequence[Item], list[Item]]]:
        """Batches, the longest first, as they are and with the last item repeated: all have one number of rows."""
        cut = list(batches(sorted(items, key=length, reverse=True), min(self._rows, len(items)) or 1))
        yield from tqdm(cut, disable=quiet, desc="tca_jax")

    def _warn_cut(self, cut: Sequence[bool]) -> None:
        if any(cut):
            text = "%d of %d prompts lost their beginning: with their answers they are longer than max_length = %d"
            _LOG.warning(text, sum(cut), len(cut), self.max_length)

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


def load_model(
    pretrained: Any, profile: Any, method: str | None, options: dict[str, Any], revision: str | None, **stored: Any
) -> LM:
    """The model of `pretrained`, `profile` and `method`; `stored` are options of `tca_jax.load`."""
    known = method is not None or not options
    require(known, f"model arguments {sorted(options)}: unknown, and options of a method need method=")
    if isinstance(pretrained, LM):
        plain = all(value is None for value in (profile, revision, *stored.values()))
        fixed = "profile, dtype, weights, kv, attention and revision are those it was loaded with"
        require(plain, f"pretrained is a loaded model: {fixed}")
        return pretrained if method is None else pretrained.with_method(method, **options)
    checkpoint = open_checkpoint(pretrained, revision)
    found = checkpoint.read_profile(profile)
    if found is not None and method is not None:
        calibrated = options_of(found)
        taken = {name for part in method.split("+") for name in option_names(part)}
        nothing = f"it takes nothing of a {type(found).__name__}"
        require(set(calibrated) & taken, f"method = {method!r} with a profile: {nothing}")
        options = with_known(method, calibrated, options)
    lm = checkpoint.load(found, **stored)
    return lm if method is None else lm.with_method(method, **options)


def generation_options(
    given: Mapping[str, Any], max_gen_toks: int, repetition_penalty: float | None = None
) -> dict[str, Any]:
    """Arguments of `tca_jax.generate` from a task's, such as {"until": ["\\n"]}; the others are defaults."""
    options = dict(given)
    most = [value for name in _MOST_TOKENS if (value := options.pop(name, None)) is not None]
    until, do_sample = options.pop("until", None) or (), options.pop("do_sample", None)
    temperature = options.pop("temperature", None)
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    require(temperature is None or is_number, f"generation option temperature = {temperature!r}: must be a number")
    if do_sample is not None:  # without it a temperature above 0 samples
        temperature = (1 if temperature is None else temperature) if do_sample else 0
    sampling = {} if repetition_penalty is None else {"repetition_penalty": repetition_penalty}
    sampling |= {name: value for name in _SAMPLING if (value := options.pop(name, None)) is not None}
    known = sorted({*_MOST_TOKENS, "until", "do_sample", "temperature", *_SAMPLING})
    for name, value in options.items():
        wanted = _ONLY.get(name, f"one of {known}")
        require(value == wanted, f"generation option {name} = {value!r}: must be {wanted}")
    return {
        "max_new_tokens": int(most[0]) if most else max_gen_toks,
        "stop": [text for text in ((until,) if isinstance(until, str) else until) if text],
        "temperature": float(temperature or 0),
        **sampling,
    }


def _count(name: str, value: Any, at_least: int) -> int:
    """An integer argument; lm_eval's command line gives some of them as text."""
    number = int(value) if isinstance(value, str) and value.strip().lstrip("-").isdecimal() else value
    check_integer(name, number, at_least=at_least)
    return int(number)
