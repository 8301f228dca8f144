"""`tca-jax generate`: prompts from options, files or standard input; answers as text or as one JSON object."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from tca_jax.cli.errors import naming_options
from tca_jax.cli.files import print_json, read_text
from tca_jax.cli.models import SYSTEM_BEHIND_CONTEXT, opened, read_context
from tca_jax.cli.options import ContextOption, JsonOption, ModelArgument, ModelOptions, SystemOption, with_options
from tca_jax.engine.generation_config import GenerationConfig
from tca_jax.errors import require
from tca_jax.progress import progress

if TYPE_CHECKING:
    from tca_jax.engine.contexts import Context
    from tca_jax.engine.generation import Output, Stats
    from tca_jax.engine.lm import LM
    from tca_jax.loading import Checkpoint

_HEADING_CHARACTERS = 60  # of a prompt, over its answer


@with_options
def generate(
    model: ModelArgument,
    prompt: Annotated[list[str] | None, Option(help="A prompt; may be repeated.", show_default=False)] = None,
    prompt_file: Annotated[
        list[Path] | None,
        Option(help='File with a prompt (UTF-8); "-" reads stdin; may be repeated.', show_default=False),
    ] = None,
    chat: Annotated[
        bool, Option("--chat", help="Send it as a user message, or with --context as a question of a chat.")
    ] = False,
    system: SystemOption = None,
    context: ContextOption = None,
    running: ModelOptions = ModelOptions(),  # noqa: B008 (frozen)
    config: GenerationConfig = GenerationConfig(),  # noqa: B008
    num_samples: Annotated[int, Option(help="Answers to each prompt, which is read once.")] = 1,
    logprobs: Annotated[bool, Option("--logprobs", help="Log-probability of every new token; needs --json.")] = False,
    top_logprobs: Annotated[
        int | None, Option(help="Number of likeliest tokens at each place, too; needs --json.", min=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer prompts; a single answer is printed as it is made.

    Several prompts are read as one batch, those of --prompt before those of --prompt-file. Answers go to standard
    output, each under a heading where there are several; what they cost goes to standard error.

    With --context, prompts follow what was read before as they are; with --chat, too, as questions of
    [bold]tca-jax chat[/].

    With --json: {"model", "profile", "method", "answers": [{"prompt", "sample", "text", "tokens", "finish_reason"}],
    "stats"}; "prompt" and "sample" count from 0, --logprobs adds "logprobs", and --top-logprobs "top_logprobs", too: at
    each place a list of {"id", "text", "logprob"}.

    Example: [bold]tca-jax generate recall-tiny --profile shipped --prompt-file doc.txt[/]
    """
    for option, given in (("--logprobs", logprobs), ("--top-logprobs", top_logprobs)):
        require(as_json or not given, f"{option} needs --json")
    require(system is None or context is None, SYSTEM_BEHIND_CONTEXT)
    texts = _read_prompts(prompt or (), prompt_file or ())
    with naming_options("num_samples"):
        config = dataclasses.replace(config, num_samples=num_samples, logprobs=top_logprobs or logprobs)
    import tca_jax
    from tca_jax.engine.prompts import require_positions

    saved = None if context is None else read_context(context)
    with opened(model, running, rows=len(texts) if saved is None else saved.batch) as (checkpoint, load):
        prompts = [_encoded(checkpoint, name, text, system, chat, saved) for name, text in texts]
        held = 0 if saved is None else max(saved.stats.tokens)
        for (name, _), ids in zip(texts, prompts, strict=True):
            require_positions(name, len(ids), config.max_new_tokens, checkpoint, context_tokens=held)
        lm = load()
    options: dict[str, Any] = {"context": saved, "backend": running.backend}
    if len(prompts) > 1 or num_samples > 1 or as_json:
        with progress() as report:
            report("compiling, and answering", None, None)
            out = tca_jax.generate(lm, prompts, config, **options)
        if as_json:
            who = {"model": model, "profile": running.profile, "method": lm.method.name}
            print_json(who | _record(out, len(prompts), lm))
            return
        _print_answers(texts, out)
    else:
        streamed = print_stream(tca_jax.stream(lm, prompts[0], config, **options), "compiling, and reading the prompt")
        assert streamed is not None
        out = streamed
    print(describe(out.stats) + cut_note(out), file=sys.stderr)


def _read_prompts(prompts: Sequence[str], files: Sequence[Path]) -> list[tuple[str, str]]:
    """Where each prompt comes from, for messages, and its text."""
    texts = [("--prompt" if len(prompts) == 1 else f"--prompt ({i})", text) for i, text in enumerate(prompts, start=1)]
    texts += [(f"--prompt-file {path}", read_text(path, "--prompt-file")) for path in files]
    require(texts, "give the prompt as --prompt or as --prompt-file; both may be repeated")
    return texts


def _encoded(
    checkpoint: Checkpoint, name: str, text: str, system: str | None, chat: bool, context: Context | None
) -> list[int]:
    """Token ids of a prompt, of a chat with it, or of its continuation of a context."""
    from tca_jax.engine.contexts import DocumentTemplate
    from tca_jax.engine.prompts import encode_continuation, encode_prompt

    in_chat = chat or system is not None
    if context is not None:
        if in_chat:
            text = DocumentTemplate.of(checkpoint).question(text, follows_answer=False)
        return encode_continuation(checkpoint, text, context.token_ids(), name)
    before = [] if system is None else [{"role": "system", "content": system}]
    return encode_prompt(checkpoint, [*before, {"role": "user", "content": text}] if in_chat else text, name)


def print_stream(
    stream: Generator[str, None, Output], step: str, interrupted: Callable[[], bool] = lambda: False
) -> Output | None:
    """Prints the pieces of an answer up to its end or an interruption, for which it returns None."""
    out = None
    try:
        with progress() as report:
            report(step, None, None)
            piece = next(stream)
        while not interrupted():
            print(piece, end="", flush=True)
            piece = next(stream)
        stream.close()
    except StopIteration as end:
        out = end.value
    print(flush=True)
    return out


def cut_note(out: Output) -> str:
    """A line about answers that ended at `max_new_tokens`; "" without any."""
    cut = [len(tokens) for tokens, reason in zip(out.tokens, out.finish_reasons, strict=True) if reason == "length"]
    if not cut:
        return ""
    subject = "the answer is" if len(out.tokens) == 1 else f"{len(cut)} of {len(out.tokens)} answers are"
    return f"\n{subject} cut at {max(cut)} tokens: --max-new-tokens sets the limit"


def _print_answers(texts: Sequence[tuple[str, str]], out: Output) -> None:
    """Prints every answer under a heading: the name of the prompt's file, or its first words."""
    samples = len(out.tokens) // len(texts)
    for i, answer in enumerate(out.text):
        name, prompt = texts[i // samples]
        heading = " ".join(prompt.split())
        heading = heading if len(heading) <= _HEADING_CHARACTERS else heading[: _HEADING_CHARACTERS - 1] + "…"
        heading = name.removeprefix("--prompt-file ") if name.startswith("--prompt-file ") else heading
        sample = f", answer {i % samples + 1} of {samples}" if samples > 1 else ""
        print(f"[{i // samples + 1}{sample}] {heading}")
        print(answer)


def _record(out: Output, num_prompts: int, lm: LM) -> dict[str, Any]:
    """Answers and costs as `--json` prints them; the help of `generate` describes it."""
    from tca_jax.engine.prompts import decode_continuation

    samples = len(out.tokens) // num_prompts
    columns: dict[str, Any] = {"text": out.text, "tokens": out.tokens, "finish_reason": out.finish_reasons}
    if out.logprobs is not None:
        columns["logprobs"] = out.logprobs
    if out.top_logprobs is not None:

        def named(token: int, logprob: float) -> dict[str, Any]:
            return {"id": token, "text": decode_continuation(lm, [token], special=True), "logprob": logprob}

        columns["top_logprobs"] = [[[named(*x) for x in place] for place in answer] for answer in out.top_logprobs]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    answers = [{"prompt": i // samples, "sample": i % samples, **row} for i, row in enumerate(rows)]
    return {"answers": answers, "stats": dataclasses.asdict(out.stats)}


def describe(stats: Stats) -> str:
    """Costs of a call, in three lines."""
    read, made = (" + ".join(f"{n:,}" for n in tokens) for tokens in (stats.prompt_tokens, stats.new_tokens))
    times = [f"first token after {stats.prefill_seconds:.2f} s"]
    if stats.seconds_per_token:
        times.append(f"then {1000 * stats.seconds_per_token:.1f} ms per token")
    if stats.compile_seconds:
        times.append(f"compiling took {stats.compile_seconds:.1f} s more")
    held, full = (f"{count / 1e6:,.2f}" for count in (stats.kv_cache_bytes, stats.full_kv_cache_bytes))
    behind = f" behind a context of {max(stats.context_tokens):,}" if stats.context_tokens else ""
    return (
        f"{read} tokens read{behind}, {made} new; {', '.join(times)}\n"
        f"KV cache {held} MB, {full} MB under full attention; it holds {stats.kept_share:.1%} of the tokens\n"
        f"prefill attended to {stats.attended_share:.1%} of causal pairs"
    )
