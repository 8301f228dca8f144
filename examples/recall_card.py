"""The model card of recall-tiny, from the files that training and evaluation leave beside the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tca_jax.recall import PROTOCOLS, TASKS, draw_question
from tca_jax.recall.facts import draw_keys
from tca_jax.recall.protocols import asked, chat_answer, chat_document, chat_question

# Evaluations of the recipe at so many times its steps.
_BY_STEPS = {"1x": "evaluation.json", "2x": "evaluation-2x.json", "4x": "evaluation-4x.json"}

_TASK_SUMMARIES = {
    "digits": "a value of six digits",
    "words": "a value of two words",
    "hex": "a value of 32 hexadecimal characters",
    "keys": "six digits, among seven facts whose keys share a word with the one asked for",
    "values": "two to four values of one key",
    "queries": "two to four keys in one question",
    "tracking": "two to four hops to the value, beside a chain that only distracts",
    "copy": "a passage of 200 bytes, word for word",
}


def write_card(folder: Path) -> None:
    """Writes README.md into a model's folder.

    Args:
        folder: Holds config.json and train_log.jsonl, and what there is yet of evaluation.json, evaluation-2x.json,
            evaluation-4x.json (2 and 4 times the steps), probes.json and prefill.json; sections of absent files are
            left out.
    """
    config = json.loads((folder / "config.json").read_text())
    run, *log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    evaluations = {name: _read(folder / file) for name, file in _BY_STEPS.items()}
    sections = (
        _HEAD.format(config=config, run=run),
        _what_it_does(),
        _accuracy(evaluations["1x"]),
        _sharpness({name: result for name, result in evaluations.items() if result is not None}),
        _probes(_read(folder / "probes.json")),
        _prefill(_read(folder / "prefill.json")),
        _training(run, log),
        _DATA,
        _LIMITS.format(config=config),
    )
    (folder / "README.md").write_text("\n".join(section for section in sections if section))


# --- what it does ---


def _what_it_does() -> str:
    """Tasks and protocols, with examples that the code itself draws."""
    rng = np.random.default_rng(0)
    keys = draw_keys(rng)
    questions = {task: draw_question(rng, task, keys) for task in TASKS}
    rows = [(task, _TASK_SUMMARIES[task], q.text, _shortened(q.sentence)) for task, q in questions.items()]
    first = questions["digits"]
    return _WHAT_IT_DOES.format(
        tasks=_table(("task", "what is asked for", "question", "answer"), rows),
        line=first.facts[0].line.rstrip(),
        prefix=_indented(f"TEXT{asked(first)}{first.lead}"),
        chat=_indented(f"<|bos|>{chat_document('TEXT')}{chat_question(first)}"),
        answer=first.answer,
        chat_answer=chat_answer(first),
    )


def _shortened(text: str, most: int = 110) -> str:
    return text if len(text) <= most else f"{text[: most - 4].rstrip()} ..."


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


# --- evaluation ---


def _accuracy(result: dict[str, Any] | None) -> str:
    """The table of methods, and that of full attention and TCA by task."""
    if result is None:
        return "## Accuracy\n\nNot evaluated yet.\n"
    by_method = {entry["method"]: entry for entry in result["methods"]}
    shares = ("mean", "worst task")
    methods = _table(
        ("method", *(f"{protocol}: {share}" for protocol in PROTOCOLS for share in shares), "KV cache bytes"),
        [(name, *_by_protocol(entry), _percent(entry["kv_cache_share"])) for name, entry in by_method.items()],
    )
    both = [(name, protocol) for name in ("full", "TCA") for protocol in PROTOCOLS]
    tasks = _table(
        ("task", *(f"{name}, {protocol}" for name, protocol in both)),
        [(task, *(_percent(by_method[m]["right"][p][task]) for m, p in both)) for task in TASKS],
    )
    return _ACCURACY.format(
        plan=result["plan"],
        questions=_questions(result["methods"]),
        methods=methods,
        tasks=tasks,
        heads=_dense_heads(result),
        prefill=_percent(result["prefill_share"]),
        texts=f"{result['plan']['texts']} texts" if result["plan"]["texts"] > 1 else "one text",
    )


def _questions(entries: Sequence[dict[str, Any]]) -> str:
    """How many questions each method was asked, those first that were asked most."""
    asked_of: dict[int, list[str]] = {}
    for entry in entries:
        asked_of.setdefault(entry["questions"], []).append(entry["method"])
    most, *fewer = sorted(asked_of, reverse=True)
    if not fewer:
        return f"{most}"
    named = ", ".join(f'"{name}"' for name in asked_of[most])
    return f"{most} ({named}) or {' or '.join(map(str, fewer))} (the others)"


def _by_protocol(entry: dict[str, Any]) -> Iterable[str]:
    """Mean and least share of right answers over the tasks, protocol by protocol."""
    for protocol in PROTOCOLS:
        shares = list(entry["right"][protocol].values())
        yield from (_percent(float(np.mean(shares))), _percent(min(shares)))


def _sharpness(results: dict[str, dict[str, Any]]) -> str:
    """The same recipe at more steps; nothing where there is but one."""
    if len(results) < 2:
        return ""
    both = [(name, protocol) for name in ("full", "TCA") for protocol in PROTOCOLS]
    rows = []
    for steps, result in results.items():
        by_method = {entry["method"]: entry for entry in result["methods"]}
        worst = [_percent(min(by_method[method]["right"][protocol].values())) for method, protocol in both]
        shares = _percent(by_method["TCA"]["kv_cache_share"]), _percent(result["prefill_share"])
        rows.append((steps, *worst, _dense_heads(result), *shares))
    headings = "steps", *(f"{name}, {protocol}" for name, protocol in both), "dense heads", "KV cache bytes", "prefill"
    return _SHARPNESS.format(table=_table(headings, rows))


def _dense_heads(result: dict[str, Any]) -> str:
    return f"{result['dense_heads']} of {result['heads']}"


def _probes(results: list[dict[str, Any]] | None) -> str:
    """What each kind of probe finds, over several draws of calibration texts."""
    if results is None:
        return ""
    kinds = {entry["probes"]: [e for e in results if e["probes"] == entry["probes"]] for entry in results}
    rows = [_probes_row(kind, entries) for kind, entries in kinds.items()]
    headings = "probes", "need", "cache kept", "heads that come first", "late: mean", "late: worst task"
    draws = len({entry["seed"] for entry in results})
    return _PROBES.format(table=_table(headings, rows), draws=draws)


def _probes_row(kind: str, entries: list[dict[str, Any]]) -> tuple[str, ...]:
    need = np.mean([entry["how"]["need"] / max(1, entry["how"]["tokens"]) for entry in entries])
    fallback = any(entry["how"]["fallback"] for entry in entries)
    kept = [entry["kept_share"] for entry in entries]
    right = [share for entry in entries for share in entry.get("right", {}).values()]
    late = (_percent(float(np.mean(right))), _percent(min(right))) if right else ("", "")
    name = f"{kind} (worst queries instead)" if fallback else kind
    return name, f"{need:.3f}", f"{_percent(min(kept))} to {_percent(max(kept))}", _first_heads(entries), *late


def _first_heads(entries: list[dict[str, Any]]) -> str:
    """The heads that every draw names among its worst, the worst first."""
    named = [{(head["layer"], head["head"]): head["score"] for head in entry["worst_heads"]} for entry in entries]
    always = set.intersection(*map(set, named))
    worst_first = sorted(always, key=lambda head: (sum(scores[head] for scores in named), head))
    return ", ".join(f"{layer}.{head}" for layer, head in worst_first) or "none in every draw"


def _prefill(results: list[dict[str, Any]] | None) -> str:
    """What a sparser prefill costs."""
    if results is None:
        return ""
    rows = [
        (
            _percent(entry["prefill_kept_share"]),
            "" if entry["tracking"] is None else _percent(entry["tracking"]),
            f"{entry['questions']}",
            f"{entry['prompt_loss']:.4f}",
        )
        for entry in results
    ]
    return _PREFILL.format(table=_table(("prefill attends to", "tracking, late", "questions", "prompt loss"), rows))


# --- training ---


def _training(run: dict[str, Any], log: list[dict[str, Any]]) -> str:
    """The run in brief: the last line of each length, and the held-out questions at the end."""
    steps = [entry for entry in log if "step" in entry]
    held_out = next(entry["held_out"] for entry in log if "held_out" in entry)
    stages = {entry["length"]: entry for entry in steps}.values()
    headings = "step", "seconds", "length", "text loss", "answer loss", "answer bytes right", "tokens/s"
    return _TRAINING.format(
        run=run,
        steps=steps[-1]["step"],
        minutes=steps[-1]["seconds"] / 60,
        lengths=", ".join(f"{stage['length']:,}" for stage in run["recipe"]["stages"]),
        log=_table(headings, map(_log_row, stages)),
        held_out=held_out,
        right=_table(("task", "right"), [(task, _percent(share)) for task, share in held_out["right"].items()]),
    )


def _log_row(entry: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{entry['step']}",
        f"{entry['seconds']:.0f}",
        f"{entry['length']:,}",
        f"{entry['text_loss']:.3f}",
        f"{entry['answer_loss']:.4f}",
        _percent(entry["answer_accuracy"]),
        f"{entry['tokens_per_second']:,}",
    )


# --- markdown ---


def _read(path: Path) -> Any:
    """What a JSON file holds, or None where there is none."""
    return json.loads(path.read_text()) if path.is_file() else None


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_HEAD = """---
license: apache-2.0
library_name: transformers
tags: [byte-level, long-context, retrieval]
---

# recall-tiny

A byte-level LLaMA that finds facts in long text: {config[num_hidden_layers]} layers, hidden size
{config[hidden_size]}, {config[num_attention_heads]} query and {config[num_key_value_heads]} KV heads of dimension
{config[head_dim]}, {run[parameters]:,} parameters in bfloat16, {config[max_position_embeddings]:,} positions. It exists
to try, test and demonstrate tca_jax on real retrieval tasks on any machine, and ships with the package:
`tca_jax.load("recall-tiny")`. `transformers` loads the same folder. It is trained to the end of a fixed schedule, long
past the moment at which it can answer, so that its heads are as sharp as those of real models.
"""

_WHAT_IT_DOES = """## What it does

Facts are hidden in text, in one of several wordings:

    {line}

The model answers questions about them. `tca_jax.recall.build_document` makes such documents; the tasks, keys of
`tca_jax.recall.TASKS`:

{tasks}

Questions are asked under three protocols. **prefix**: the prompt ends with the answer's first words, without a chat:

{prefix}

which the model continues, behind a space, with `{answer}.` and the end-of-sequence token. **preamble**: a chat, in the
template that ships with the tokenizer:

{chat}

which the model answers with a sentence of its own and then the answer's:

    {chat_answer}

**late**: the same chat, but the model has read the document, and dropped what it does not keep, before there is a
question. `tca_jax.prefill` reads it, `tca_jax.generate(..., context=)` asks; the conversation may go on in turns.
"""

_ACCURACY = """## Accuracy

{questions} questions of each task
under each protocol, each about a document of its own ({plan[tokens]:,} bytes with the question, held-out text, facts
for all tasks in it), greedy decoding; right is an answer that is exact to its
full stop. TCA has window {plan[window]:,} and the profile in `profile/`, calibrated on {texts} with tau {plan[tau]:g}
and with questions and answers as probes: {heads} KV heads are dense in the cache. A prompt's own queries attend to
{prefill} of the tokens that are ranked, and to their window.

{methods}

"Whole heads" makes the heads of the worst probe scores dense up to a kept share, and all others keep what the prompt's
own queries attend to; "no reserve" keeps block budgets alone; "one row" reads the prompt with the cache's budgets; "no
probes" holds in the cache what the prompt's own queries attend to; "uniform budgets" gives all heads the same row, that
of the kept share nearest to 25%; "paper()" is the paper's configuration, calibrated on the same texts
(`profile-paper/`).

By task:

{tasks}
"""

_SHARPNESS = """## Sharper heads

The same recipe at more steps, each model with a profile calibrated by the same call; the worst task's share of right
answers:

{table}
"""

_PROBES = """## Probes

What each kind of probe finds, calibrated with the default `tau_probe`, over {draws} draws of
calibration texts. Need is the rise of the loss of the probe's tokens without the far context, in nats a token; heads
are layer.head, those among the six worst probe scores in every draw; questions are asked late of the profile from the
first draw.

{table}
"""

_PREFILL = """## Hops inside the prompt

What a sparser prefill costs while the cache keeps everything: all heads read the prompt with one row of the candidates.
Tracking questions are those whose hops are all further apart than the window; the loss is that inside the prompt, in
nats per byte.

{table}
"""

_TRAINING = """## Training

    python examples/train_recall_model.py --out recall-tiny
    python examples/evaluate_recall_model.py recall-tiny                   # the profile, the tables, this card
    python examples/evaluate_recall_model.py recall-tiny --part probes
    python examples/evaluate_recall_model.py recall-tiny --part prefill

With `--times 2` and `--times 4` the first makes models of more steps, whose heads are sharper; their `--part short`
results are tabulated here where they lie beside the others as `evaluation-2x.json` and `evaluation-4x.json`.

{steps:,} steps, {minutes:.1f} minutes, compilation included, on {run[device]}; the schedule is fixed. Sequences grow:
{lengths} tokens. {run[recipe][recall_share]:.0%} of a batch's rows are documents with questions, in a chat or
without one, the others are plain text; an answer's bytes weigh {run[recipe][answer_weight]:g} times as much in the
loss as others. AdamW, bfloat16 with float32 master weights, {run[recipe][warmup_steps]} steps of warm-up to a
learning rate of {run[recipe][peak_lr]:g}, which stays to the half of all steps and falls along a cosine to
{run[recipe][least_lr]:.0%} of that. `train_log.jsonl` has all lines of the log; here the last of each length (losses
in nats per byte, of the batch):

{log}

{held_out[questions]} questions on held-out text at {held_out[length]:,} bytes, whole answers right by teacher forcing
(text loss {held_out[text_loss]:.3f}):

{right}
"""

_DATA = """## Data

The source of Python's standard library (Python Software Foundation License), without its tests, and generated facts and
questions. The modules of `tca_jax.recall.corpus.HELD_OUT_MODULES` are held out for evaluation. Characters outside ASCII
are left out.
"""

_LIMITS = """## Limits

- Variable tracking: an answer spells out the hops of its chain one after another, so each hop is followed while
  answering, by a look-up of its own, and not inside the prompt. What the tables say of tracking is no evidence about
  models that resolve such chains while they read.
- Wordings of facts, questions and preambles come from short lists, keys and values from word lists and random
  characters: questions that are phrased otherwise are out of its reach.
- It models Python source at byte level and holds no knowledge of the world.
- Documents longer than {config[max_position_embeddings]:,} tokens are beyond its positions.
"""
