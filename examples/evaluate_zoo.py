"""Calibrates every model of the zoo by the same call, with the defaults, and measures what that costs and loses.

    python examples/evaluate_zoo.py zoo --jobs 7                       # one GPU: zoo/<name>.json of every model
    python examples/evaluate_zoo.py zoo --part estimates --jobs 7      # how the blocks of a tile are estimated
    python examples/evaluate_zoo.py zoo --part curves --jobs 7         # TCA at several tolerances, and other methods
    python examples/evaluate_zoo.py zoo --part table                   # benchmarks/results/zoo.{json,md} from these

Calibration sees the first half of the held-out text; losses are measured on the second, questions are about documents
of all of it. Nothing is tuned on any model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several models share a GPU

import jax
import numpy as np
import typer
from recall_tokens import BOS
from zoo_tables import write_tables
from zoo_tasks import MIXTURES, draw_documents

import tca_jax
from tca_jax import TCAConfig
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.text_losses import TextLosses
from tca_jax.engine.answers import score_answers
from tca_jax.engine.buckets import bucket_length
from tca_jax.engine.budgets import CallSizes
from tca_jax.evaluation.specs import Builder, parse_methods
from tca_jax.loading import shipped_profile
from tca_jax.methods import fetching
from tca_jax.methods.xattention import antidiagonal_mass
from tca_jax.recall import PROTOCOLS, Document
from tca_jax.recall.corpus import corpus
from tca_jax.recall.evaluation import ask
from tca_jax.recall.protocols import chat_answer, chat_document, chat_question

FOLLOWING = 256


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        lengths: Tokens of a prompt, and of a calibration text, each with TCA's window.
        texts: Calibration texts.
        passages: Texts whose losses are measured.
        questions: Questions of each task under each protocol, at each length.
        draws: Draws of calibration texts, at the first length.
    """

    lengths: tuple[tuple[int, int], ...] = ((8192, 512), (16384, 1024))
    texts: int = 4
    passages: int = 16
    questions: tuple[int, ...] = (100, 100)
    draws: int = 5


SMOKE = Plan(lengths=((2560, 256),), texts=1, passages=1, questions=(1,), draws=1)


# --- texts ---


def passages(seed: int, count: int, tokens: int, half: int) -> list[list[int]]:
    """Passages of one half of the held-out text, as token ids."""
    text = np.frombuffer(corpus("held-out"), np.uint8)
    part = text[half * len(text) // 2 : (half + 1) * len(text) // 2]
    starts = np.random.default_rng((seed, half, tokens)).integers(len(part) - tokens, size=count)
    return [[BOS, *part[start : start + tokens - 1].tolist()] for start in starts]


def documents_with_pairs(lm: tca_jax.LM, name: str, count: int, tokens: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Documents of the training text as chats, and all questions about each with their answers: a user's own probes."""
    tasks = sorted(set(MIXTURES[name]))

    def ids(part: str, *, begins: bool = False) -> list[int]:
        return lm.tokenizer(part, add_special_tokens=begins)["input_ids"]

    texts, pairs = [], []
    for number in range(count):
        (document,) = draw_documents((seed, 7, number), 1, tokens, name, tasks[number % len(tasks)], "train")
        texts.append(ids(chat_document(document.text), begins=True))
        answers = [f"{chat_answer(question, number)}<|eos|>" for question in document.questions]
        asked = [chat_question(question) for question in document.questions]
        pairs.append([(ids(question), ids(answer)) for question, answer in zip(asked, answers, strict=True)])
    return texts, pairs


# --- measurements ---


def losses(lm: tca_jax.LM, texts: Sequence[list[int]], window: int) -> dict[str, float]:
    """Loss inside prompts, of the tokens that follow them over the cache, and the attended share."""
    prompts, following = [ids[:-FOLLOWING] for ids in texts], [[ids[-FOLLOWING:]] for ids in texts]
    first = window + TCAConfig.block_size
    inside, shares, after = [], [], []
    for one, rest in zip(prompts, following, strict=True):
        scores = tca_jax.score(lm, [one])
        inside.append(-scores.logprobs[0][first:].mean())
        shares.append(scores.attended_share[0])
        after.append(-score_answers(lm, [one], [rest]).logprobs[0][0].mean())
    return {
        "inside": float(np.mean(inside)),
        "following": float(np.mean(after)),
        "attended_share": float(np.mean(shares)),
    }


def answers(
    lm: tca_jax.LM, documents: dict[str, list[Document]], protocols: Sequence[str] = PROTOCOLS
) -> dict[str, Any]:
    """Share of right answers by protocol and task, and the KV bytes next to full attention's."""
    right: dict[str, dict[str, float]] = {}
    held = []
    tasks = [(task, document) for task, of_task in documents.items() for document in of_task]
    for protocol in protocols:
        found = ask(lm, [document for _, document in tasks], protocol)
        held.append(found.kv_cache_share)
        of_task: dict[str, list[bool]] = {}
        for (task, _), is_right in zip(tasks, found.right, strict=True):
            of_task.setdefault(task, []).append(is_right)
        right[protocol] = {task: float(np.mean(each)) for task, each in of_task.items()}
    return {"right": right, "kv_share": float(held[-1])}


def evaluate(folder: Path, out: Path, plan: Plan, dtype: str | None = None) -> None:
    """Everything about one model, written to `out` as it comes."""
    lm = tca_jax.load(folder, dtype=dtype)
    found: dict[str, Any] = {"model": folder.name, "device": jax.devices()[0].device_kind, "lengths": {}}

    def save() -> None:
        out.write_text(json.dumps(found, indent=1) + "\n")

    for (tokens, window), questions in zip(plan.lengths, plan.questions, strict=True):
        record = found["lengths"][str(tokens)] = {"window": window}
        _evaluate_at(lm, folder.name, out, plan, tokens, window, questions, record, save)
    tokens, window = plan.lengths[0]
    shares = found["lengths"][str(tokens)]["draws"] = []
    for seed in range(plan.draws):
        profile, _ = _calibrated(lm, plan, TCAConfig(window=window), tokens, seed)
        shares.append(float(profile.kept_share(tokens).mean()))
        save()


def _evaluate_at(
    lm: tca_jax.LM,
    name: str,
    out: Path,
    plan: Plan,
    tokens: int,
    window: int,
    questions: int,
    record: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Losses and answers at one length, into `record`."""
    config, texts = TCAConfig(window=window), passages(0, plan.passages, tokens, 1)
    tasks = sorted(set(MIXTURES[name])) if questions else []
    documents = {task: draw_documents((11, tokens), questions, tokens - 256, name, task) for task in tasks}

    def note(label: str, profile: Profile | None, seconds: float = 0.0, *, asks: bool = True) -> None:
        under, start = lm.with_profile(profile), time.monotonic()
        measured = record[label] = {"seconds": seconds, **losses(under, texts, window)}
        if profile is not None:
            measured |= _described(profile, tokens)
        if documents and asks:
            measured |= answers(under, documents)
        save()
        print(f"{name} {tokens} {label}: {time.monotonic() - start:.0f} s {json.dumps(measured)[:400]}", flush=True)

    profile, seconds = _calibrated(lm, plan, config, tokens, 0)
    profile.save(out.with_name(f"{name}-profile-{tokens}"))
    note("default", profile, seconds)
    note("full", None)
    note("row0", Profile.uniform(config, lm.config.num_layers, lm.config.num_kv_heads, 0), asks=False)
    own_texts, pairs = documents_with_pairs(lm, name, plan.texts, tokens - 256, 0)
    note("pairs", *_timed(lambda: tca_jax.calibrate(lm, own_texts, config, probes=pairs)))


def _calibrated(lm: tca_jax.LM, plan: Plan, config: TCAConfig, tokens: int, seed: int) -> tuple[Profile, float]:
    return _timed(lambda: tca_jax.calibrate(lm, passages(seed, plan.texts, tokens, 0), config))


def _timed(function: Callable[[], Profile]) -> tuple[Profile, float]:
    start = time.monotonic()
    with warnings.catch_warnings(record=True):
        profile = function()
    return profile, time.monotonic() - start


def _described(profile: Profile, tokens: int) -> dict[str, Any]:
    """What a profile chose, and by what."""
    heads = profile.readings.size
    return {
        "heads": heads,
        "fetching": np.argwhere(profile.readings != "sparse").tolist(),
        "denser": [[*map(int, head), int(profile.candidates[tuple(head)])] for head in np.argwhere(profile.candidates)],
        "kept_share": float(profile.kept_share(tokens).mean()),
        "losses": {each: dict(of_each) for each, of_each in profile.losses.items()},
        "counted": None if profile.probes is None else profile.probes["counted"],
    }


# --- TCA at several tolerances, and other methods ---

#: Of reading, in parts of what row 0 costs, and of keeping, in nats a token of answers; 0.1 and 0.02 are the defaults.
TOLERANCES = ((0.5, 0.5), (0.2, 0.1), (0.1, 0.02), (0.03, 0.005))
#: Methods whose prefill attends to less than everything, at several budgets.
READERS = (
    *(f"streaming:window={window}" for window in (512, 1024, 2048, 4096)),
    *(f"minference:scale={scale}" for scale in (0.03, 0.1, 0.3)),
    *(f"flexprefill:gamma={gamma},min_budget=256" for gamma in (0.6, 0.8, 0.9, 0.95)),
    *(f"xattention:threshold={threshold}" for threshold in (0.6, 0.8, 0.9, 0.95)),
)
#: Methods that keep part of the cache. With byte-level tokens SnapKV and CAKE need more observed queries and wider
#: pooling than their authors' defaults, which suit words.
KEEPERS = (
    "streaming",
    "snapkv:observation=128,kernel=127,pooling=max",
    "cake:observation=128,kernel=127",
    "duoattention",
    "expected-attention",
)
#: Shares of full attention's bytes for each of them.
BYTES = (0.1, 0.15, 0.2, 0.35, 0.6)


def curves(folder: Path, out: Path, plan: Plan, dtype: str | None = None) -> None:
    """Loss inside prompts by the attended share, and late answers by the bytes of the cache, of every method."""
    lm, name = tca_jax.load(folder, dtype=dtype), folder.name
    (tokens, window), *_ = plan.lengths
    texts, tasks = passages(0, plan.passages, tokens, 1), sorted(set(MIXTURES[name]))
    documents = {task: draw_documents((11, tokens), plan.questions[0], tokens - 256, name, task) for task in tasks}
    found: dict[str, Any] = {"curves": name, "tokens": tokens, "points": []}

    def note(method: str, under: tca_jax.LM, *, reads: bool, keeps: bool, label: str) -> None:
        point: dict[str, Any] = {"method": method, "label": label}
        if reads:
            point |= losses(under, texts, window)
        if keeps:
            measured = answers(under, documents, ("late",))
            point |= {
                "kv_share": measured["kv_share"],
                "late": float(np.mean(list(measured["right"]["late"].values()))),
            }
        found["points"].append(point)
        for each in found["points"]:
            each["inside_full"] = found["points"][0]["inside"]
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, point, flush=True)

    note("full", lm.with_profile(None), reads=True, keeps=True, label="full attention")
    shape = lm.config.num_layers, lm.config.num_kv_heads
    profile = Profile.uniform(TCAConfig(window=window), *shape, 0)
    note("row 0", lm.with_profile(profile), reads=True, keeps=True, label="TCA, row 0 in every head")
    for read, keep in TOLERANCES:
        config = TCAConfig(window=window, read_tolerance=read, keep_tolerance=keep)
        profile, _ = _calibrated(lm, plan, config, tokens, 0)
        label = f"TCA, tolerances {read:g} and {keep:g}"
        note("TCA", lm.with_profile(profile), reads=True, keeps=True, label=label)
    builder = Builder(lm, profile, None, lambda: passages(0, 1, tokens, 0))
    for spec in parse_methods(",".join(READERS)):
        note(spec.parts[0][0], builder.build(spec).lm, reads=True, keeps=False, label=spec.label)
    sizes = CallSizes(bucket_length(tokens), bucket_length(256), bucket_length(128))
    for spec in parse_methods(",".join(KEEPERS)):
        for share in BYTES:
            built = builder.build_within(spec, share, sizes)
            if not built.own_budget:
                label = f"{spec.label} within {share:.0%}"
                note(spec.parts[0][0], built.lm, reads=False, keeps=True, label=label)


# --- how blocks are estimated ---


def estimates(folder: Path, out: Path, plan: Plan, dtype: str | None = None) -> None:
    """Loss inside texts by how many blocks are fetched and how they are estimated, of the heads that are found."""
    lm, name = tca_jax.load(folder, dtype=dtype), folder.name
    tokens, window = plan.lengths[-1]
    if name == "large-32k":
        tokens, window = 2 * tokens, window
    config = TCAConfig(window=window)
    texts = passages(1, plan.texts, tokens, 1)
    profile, _ = _calibrated(lm, plan, config, tokens, 0)
    more = profile.readings != "sparse"
    found: dict[str, Any] = {"model": name, "tokens": tokens, "fetching": np.argwhere(more).tolist(), "rows": []}

    def measure(label: str, of_heads: np.ndarray, **options: Any) -> None:
        readings = TextLosses(lm, texts, dataclasses.replace(config, **options), lambda: None)
        loss = np.mean([each.mean() for each in (readings.full() if label == "full" else readings.of(of_heads))])
        share = (
            1.0
            if label == "full"
            else float(np.where(of_heads, readings.shares[..., 1], readings.shares[..., 0]).mean())
        )
        found["rows"].append({"reading": label, **options, "loss": float(loss), "attended_share": share})
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, found["rows"][-1], flush=True)

    none = np.zeros_like(more)
    measure("full", none)
    measure("row 0", none)
    measure("dense", more, fetch=tokens // config.block_size)
    for fetch in (4, 8, 16, 32, 64):
        measure("blocks", more, fetch=fetch)
    for stride in (1, 8, 32, 128):
        measure("blocks", more, fetch_stride=stride)
    for stride in (8, 16):
        with _antidiagonals(stride):
            measure("blocks", more)
            found["rows"][-1]["estimate"] = f"antidiagonals, stride {stride}"
    out.write_text(json.dumps(found, indent=1) + "\n")


@contextlib.contextmanager
def _antidiagonals(stride: int) -> Iterator[None]:
    """Blocks are estimated by sums over antidiagonals, as XAttention does."""
    own = fetching.block_mass

    def estimate(q: Any, k: Any, lengths: Any, *, block_size: int, **_: Any) -> Any:
        group = q.shape[2] // k.shape[2]
        by_head = [
            antidiagonal_mass(
                q[:, :, head * group : (head + 1) * group], k[:, :, head], lengths, stride=stride, block_size=block_size
            ).sum(axis=1)
            for head in range(k.shape[2])
        ]
        return jax.numpy.stack(by_head, axis=1)

    fetching.block_mass = estimate
    jax.clear_caches()
    try:
        yield
    finally:
        fetching.block_mass = own
        jax.clear_caches()


# --- command ---

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    zoo: Annotated[Path, typer.Argument(help="Folder that train_zoo.py wrote.")],
    part: Annotated[str, typer.Option(help="answers, curves, estimates or table.")] = "answers",
    only: Annotated[list[str] | None, typer.Option(help="Models; all by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Models at the same time, shared out over the GPUs.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that they are shared out over.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; the zoo's by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="What models compute in.")] = None,
    questions: Annotated[
        str, typer.Option(help="Questions of each task under each protocol, at each length.")
    ] = "100,100",
    smoke: Annotated[bool, typer.Option("--smoke", help="Little of everything: checks that all runs.")] = False,
) -> None:
    """Measure calibration on every model of the zoo."""
    folders = {
        "recall-tiny": shipped_profile("recall-tiny").parent,
        **{path.name: path for path in sorted(zoo.iterdir())},
    }
    folders = {name: path for name, path in folders.items() if name in (only or MIXTURES) and path.is_dir()}
    out = out or zoo
    out.mkdir(parents=True, exist_ok=True)
    if part == "table":
        write_tables(out)
        return
    function = {"answers": evaluate, "curves": curves, "estimates": estimates}[part]
    suffix = "" if part == "answers" else f"-{part}"
    plan = SMOKE if smoke else Plan(questions=tuple(map(int, questions.split(","))))
    tasks = [(path, out / f"{name}{suffix}.json", plan, dtype) for name, path in folders.items()]
    if jobs == 1:
        for task in tasks:
            function(*task)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        started = []
        for number, task in enumerate(tasks):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(number % gpus)  # inherited by the process that starts next
            started.append(pool.submit(function, *task))
            time.sleep(0.5)
        for one in started:
            one.result()


if __name__ == "__main__":
    app()
