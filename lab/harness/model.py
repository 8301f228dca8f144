"""HarnessLM: a model of this library as lm_eval asks it: log-likelihoods, rolling ones, and answers up to a string."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from tqdm import tqdm

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"the adapter needs lm-evaluation-harness: pip install 'tca-jax[lab]' ({error})") from error

import tca_jax
from tca_jax.engine.lm import stored_entry
from tca_jax.engine.prompts import decode_tokens
from tca_jax.engine.sampling import Sampling
from tca_jax.errors import UserError
from tca_jax.lab.harness.loading import load_model, stored_repetition_penalty
from tca_jax.lab.harness.options import GenerationOptions
from tca_jax.lab.harness.running import Runner
from tca_jax.methods.full import BASELINE
from tca_jax.methods.registry import describe_method

_LOG = logging.getLogger(__name__)
_SHARED_TOKENS = 256  # fewest tokens of a prefix that is read once, where nothing else is asked for


@register_model("tca_jax", "tca-jax")
class HarnessLM(TemplateLM):
    """A checkpoint under an attention method, for `lm_eval.simple_evaluate` and lm_eval's command line.

    A continuation's log-likelihood is that of an answer: the context is read as a prompt and the continuation fed as if
    it had been drawn, so that prefill and cache policy both count. A rolling log-likelihood reads whole windows as
    prompts: of a method it measures the prefill policy alone.

    Args:
        pretrained: Alias, Hub id or local folder, or a loaded `LM`.
        profile: Profile folder, or "shipped".
        method: Attention method by its name, "a+b" for a pair; None for the profile's, or full attention without one.
        dtype: float32, bfloat16 or float16.
        weights: "fp8": projections and MLP in e4m3, as for `tca_jax.load`.
        kv: "fp8": a KV cache in eight bits.
        revision: Branch, tag or commit on the Hub.
        batch_size: Prompts in one call.
        max_length: Most tokens that are read: of a prompt with its answer, whose last token is not read where it is
            given. Longer prompts lose their beginning. None for the model's positions.
        max_gen_toks: Most tokens of an answer where the task names none.
        prefix_reuse: Prompts that share at least so many first tokens are read from one context; 0 for none. None is
            256 under full attention, which answers the same either way, and 0 under every other method: there what a
            context keeps is chosen before the question is known (the late protocol), which is another measurement.
        repetition_penalty: Of answers where the task names none; None for that of the checkpoint's
            generation_config.json, if any, as in transformers' `generate`.
        enable_thinking: Handed to the chat template, where it knows it.
        think_end_token: Text or id of the token that ends a model's thinking: an answer is what follows the last one.
        add_bos_token: Whether texts begin with the tokenizer's own tokens, such as that of a beginning; None for the
            tokenizer's default.
        seed: Of sampled answers.
        backend: Kernel backend.
        tokenizer: Not looked at: tasks that size their prompts, such as RULER's, read it from the model arguments.
        device: Not looked at: JAX decides (`JAX_PLATFORMS`).
        trust_remote_code: Not looked at: no code of a checkpoint is ever run.
        max_batch_size: Must be None: batches are of one size.
        **options: Options of the method; of a pair, a mapping for each part.

    Raises:
        ValueError: an argument is not allowed; names it. Before weights are read where that is possible.
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
        prefix_reuse: int | None = None,
        repetition_penalty: float | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
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
        rows = _count("batch_size", batch_size, 1)
        self._max_gen_toks = _count("max_gen_toks", max_gen_toks, 1)
        reuse = None if prefix_reuse is None else _count("prefix_reuse", prefix_reuse, 0)
        if repetition_penalty is None:
            repetition_penalty = stored_repetition_penalty(pretrained, revision)
        Sampling(repetition_penalty=repetition_penalty)  # refuses what is not allowed
        self._repetition_penalty = repetition_penalty
        stored = {"dtype": dtype, "weights": weights, "kv": kv}
        self.lm = load_model(pretrained, profile, method, options, revision=revision, **stored)
        if self.lm.tokenizer is None:
            raise UserError(f"pretrained: {self.lm.name} has no tokenizer, and lm_eval asks in text")
        positions = self.lm.config.max_context
        self._max_length = positions if max_length is None else _count("max_length", max_length, 2)
        if self._max_length > positions:
            raise UserError(f"max_length = {max_length}: must be at most {positions}, the positions of {self.lm.name}")
        if reuse is None:
            reuse = _SHARED_TOKENS if self.lm.method == BASELINE else 0
        if isinstance(think_end_token, str) and think_end_token.isdigit():  # from lm_eval's command line
            think_end_token = int(think_end_token)
        self._think_end, self._add_bos_token = think_end_token, add_bos_token
        self._runner = Runner(self.lm, rows, reuse, backend, _count("seed", seed, 0))
        self._template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    # What lm_eval asks of a model's texts.

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, whose chat template lm_eval looks at."""
        return self.lm.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """The model's name: part of what lm_eval files prompts under that it has made before."""
        return self.lm.name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        end = self.tokenizer.eos_token_id
        return end if end is not None else next(iter(self.lm.eos_token_ids), self.lm.pad_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has nothing before it."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt with its answer."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Most tokens of an answer where the task names none."""
        return self._max_gen_toks

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; by default with the tokenizer's own tokens, unless a chat template has written them."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (begin and string.startswith(begin)) and self._add_bos_token is not False
        return self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as the model's template writes it; without a generation prompt its last message is gone on with.

        Raises:
            ValueError: the model has no chat template, or it does not take this chat.
        """
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

    # Requests.

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding says it."""
        prompts, answers = [], [continuation for _, _, continuation in requests]
        for _, context, continuation in requests:
            room = self.max_length + 1 - len(continuation)  # the last token of all is not read
            if not continuation or room < 1:
                raise UserError(f"a continuation has {len(continuation)} tokens: must have from 1 to {self.max_length}")
            prompts.append(context[-room:])
        self._say_cut([context for _, context, _ in requests], prompts)
        results: list[Any] = [None] * len(requests)
        for place, logprob, greedy in _shown(self._runner.score(prompts, answers), len(requests), disable_tqdm):
            results[place] = logprob, greedy
            self.cache_hook.add_partial("loglikelihood", requests[place][0], results[place])
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, window by window; every token is counted once."""
        texts, counts, owners = [], [], []
        for i, request in enumerate(requests):
            for context, predicted in self._windows(request.args[0]):
                texts.append(context + predicted)
                counts.append(len(predicted))
                owners.append(i)
        totals = [0.0] * len(requests)
        for place, logprob in _shown(self._runner.score_ends(texts, counts), len(texts), disable_tqdm):
            totals[owners[place]] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """What is known and what is asked in each window of a text."""
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,  # that are read: a window has one token more
            context_len=1,
        )
        return map(make_disjoint_window, windows)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, up to the first of its stop strings."""
        alike: dict[GenerationOptions, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            alike[GenerationOptions.of(request.args[1], self.max_gen_toks, self._repetition_penalty)].append(i)
        encoded = [self.tok_encode(request.args[0]) for request in requests]
        prompts = list(encoded)
        for options, places in alike.items():
            if (room := self.max_length - options.max_new_tokens) < 1:
                raise UserError(
                    f"max_gen_toks = {options.max_new_tokens}: must be less than max_length = {self.max_length}"
                )
            for i in places:
                prompts[i] = encoded[i][-room:]
        self._say_cut(encoded, prompts)
        return self._answers(requests, prompts, alike, disable_tqdm)

    def _answers(
        self, requests: list[Any], prompts: list[list[int]], alike: Mapping[GenerationOptions, list[int]], quiet: bool
    ) -> list[str]:
        """Answers to prompts whose places are sorted by their options."""
        results = [""] * len(requests)

        def answered() -> Iterator[tuple[int, str]]:
            for options, places in alike.items():
                for number, text, tokens in self._runner.answer([prompts[i] for i in places], options):
                    yield places[number], self._behind_thinking(text, tokens, options.until)

        for place, text in _shown(answered(), len(requests), quiet):
            results[place] = text
            self.cache_hook.add_partial("generate_until", requests[place].args, text)
        return results

    def _behind_thinking(self, text: str, tokens: Sequence[int], until: Sequence[str]) -> str:
        """What an answer says behind its thinking, up to a stop string."""
        end = self._think_end
        if isinstance(end, int) and end in tokens:
            last = len(tokens) - 1 - list(reversed(tokens)).index(end)
            text = decode_tokens(self.lm, tokens[last + 1 :]).lstrip()
        return postprocess_generated_text(text, list(until), end if isinstance(end, str) else None)

    def _say_cut(self, before: Sequence[list[int]], after: Sequence[list[int]]) -> None:
        cut = sum(len(a) < len(b) for a, b in zip(after, before, strict=True))
        if cut:
            _LOG.warning(
                "%d of %d prompts lost their beginning: with their answers they are longer than max_length = %d",
                *(cut, len(before), self.max_length),
            )

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes beside its results: model, method, and the bytes that the answers' caches held."""
        held, full = self._runner.kv_cache_bytes, self._runner.full_kv_cache_bytes
        return {
            "model_num_parameters": sum(leaf.size for leaf in jax.tree.leaves(self.lm.params)),
            "model_dtype": str(self.lm.dtype),
            **stored_entry(self.lm),
            "model_fingerprint": self.lm.fingerprint,
            "attention_method": self.lm.method.name,
            "attention_method_options": json.loads(describe_method(self.lm.method)),
            "prefix_reuse": self._runner.prefix_reuse,
            "kv_cache_share": held / full if full else None,
            "tca_jax_version": tca_jax.__version__,
            "jax_device": jax.devices()[0].device_kind,
        }


Item = TypeVar("Item")


def _shown(results: Iterable[Item], total: int, quiet: bool) -> Iterator[Item]:
    """Results with a progress bar."""
    return iter(tqdm(results, total=total, disable=quiet, desc="tca_jax"))


def _count(name: str, value: Any, at_least: int) -> int:
    """An integer argument; lm_eval's command line gives some of them as text."""
    try:
        number = int(value)
        whole = not isinstance(value, bool) and (isinstance(value, str) or number == value)
    except (TypeError, ValueError):
        whole = False
    if not whole or number < at_least:
        raise UserError(f"{name} = {value!r}: must be an integer of at least {at_least}")
    return number
