"""Calibrates every model of the zoo by the same call, with the defaults, and measures what that costs and loses.

    python examples/evaluate_zoo.py zoo --jobs 7                       # one GPU: zoo/<name>.json of every model
    python examples/evaluate_zoo.py zoo --part draws --jobs 7          # what is kept, by draws of texts
    python examples/evaluate_zoo.py zoo --part estimates --jobs 7      # how the blocks of a tile are estimated
    python examples/evaluate_zoo.py zoo --part curves --jobs 7         # TCA at several tolerances, and other methods
    python examples/evaluate_zoo.py zoo --part table                   # lab/results/zoo.{json,md} from these

Calibration sees the first half of the held-out text; losses are measured on the second, questions are about documents
of all of it. Nothing is tuned on any model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
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
from tca_jax.calibration.journal import Journal
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.text_losses import TextLosses
from tca_jax.calibration.worth import choose_reading
from tca_jax.engine.prompts import bucket_length
from tca_jax.engine.score import score_answers
from tca_jax.equal_bytes import CallSizes
from tca_jax.lab.evaluation.method_specs import Builder, MethodSpec, parse_methods
from tca_jax.lab.recall import PROTOCOLS, Document
from tca_jax.lab.recall.corpus import corpus
from tca_jax.lab.recall.evaluation import ask
from tca_jax.lab.recall.protocols import chat_answer, chat_document, chat_question
from tca_jax.loading import shipped_profile
from tca_jax.methods import fetching
from tca_jax.methods.xattention import antidiagonal_mass

FOLLOWING = 256


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        lengths: Tokens of a prompt, and of a calibration text.
        calibrated: Tokens of all calibration texts of a length together.
        passages: Texts whose losses are measured.
        questions: Questions of each task under each protocol.
        draws: Draws of calibration texts.
        keep_tolerance: Calibration's.
    """

    lengths: tuple[int, ...] = (8192, 16384)
    calibrated: int = 2**17
    passages: int = 32
    questions: int = 100
    draws: int = 5
    keep_tolerance: float = TCAConfig.keep_tolerance

    def config(self, tokens: int) -> TCAConfig:
        """Calibration's for prompts of a length."""
        return TCAConfig(window=window_of(tokens), keep_tolerance=self.keep_tolerance)

    def texts(self, tokens: int) -> int:
        """Calibration texts of a length."""
        return max(1, self.calibrated // tokens)


SMOKE = Plan(lengths=(2560,), calibrated=2560, passages=1, questions=1, draws=2)


def window_of(tokens: int) -> int:
    """TCA's window for prompts of a length."""
    return max(256, tokens // 16)


# --- texts ---


def passages(seed: int, count: int, tokens: int, half: int) -> list[list[int]]:
    """Passages of one half of the held-out text, as token ids."""
    text = np.frombuffer(corpus("held-out"), np.uint8)
    part = text[half * len(text) // 2 : (half + 1) * len(text) // 2]
    starts = np.random.default_rng((seed, half, tokens)).integers(len(part) - tokens, size=count)
    return [[BOS, *part[start : start + tokens - 1].tolist()] for start in starts]


def documents_with_pairs(lm: tca_jax.LM, name: str, count: int, tokens: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Documents as chats, and all questions about each with their answers: a user's own probes."""
    tasks = sorted(set(MIXTURES[name]))

    def ids(part: str, *, begins: bool = False) -> list[int]:
        return lm.tokenizer(part, add_special_tokens=begins)["input_ids"]

    texts, pairs = [], []
    for number in range(count):
        (document,) = draw_documents((seed, 7, number), 1, tokens, name, tasks[number % len(tasks)])
        texts.append(ids(chat_document(document.text), begins=True))
        answers = [f"{chat_answer(question, number)}<|eos|>" for question in document.questions]
        asked = [chat_question(question) for question in document.questions]
        pairs.append([(ids(question), ids(answer)) for question, answer in zip(asked, answers, strict=True)])
    return texts, pairs


def _size(lm: tca_jax.LM, tokens: int) -> int:
    """Tokens of a document that leave room for a question and its answer."""
    return min(tokens - 256, lm.config.max_context - 768)


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
    """Losses and answers of one model, written to `out` as they come; what it holds is not measured again."""
    lm, found = _begun(folder, dtype)
    if out.exists():
        found = json.loads(out.read_text())

    def save() -> None:
        out.write_text(json.dumps(found, indent=1) + "\n")

    for tokens in plan.lengths:
        record = found["lengths"].setdefault(str(tokens), {"window": window_of(tokens)})
        _evaluate_at(lm, folder.name, out.parent, plan, tokens, record, save)


def draws(folder: Path, out: Path, plan: Plan, dtype: str | None = None) -> None:
    """What the cache keeps, by draws of calibration texts of the first length; those in `out` are not made again."""
    lm, found = _begun(folder, dtype)
    tokens, *_ = plan.lengths
    if out.exists():
        found = json.loads(out.read_text())
    kept = found["lengths"].get(str(tokens), {}).get("draws", [])
    for seed in range(len(kept), plan.draws):
        profile = _calibrated(lm, plan, plan.config(tokens), tokens, seed)
        kept.append(float(profile.kept_share(tokens).mean()))
        found["lengths"][str(tokens)] = {"draws": kept}
        out.write_text(json.dumps(found, indent=1) + "\n")


def _begun(folder: Path, dtype: str | None) -> tuple[tca_jax.LM, dict[str, Any]]:
    """A model, and the record of what is measured of it."""
    lm = tca_jax.load(folder, dtype=dtype)
    return lm, {"model": folder.name, "device": jax.devices()[0].device_kind, "lengths": {}}


def _evaluate_at(
    lm: tca_jax.LM,
    name: str,
    folder: Path,
    plan: Plan,
    tokens: int,
    record: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Losses and answers at one length, into `record`."""
    config, texts = plan.config(tokens), passages(0, plan.passages, tokens, 1)
    tasks = sorted(set(MIXTURES[name])) if plan.questions else []
    documents = {task: draw_documents((11, tokens), plan.questions, _size(lm, tokens), name, task) for task in tasks}

    def note(label: str, make: Callable[[], Profile | None], *, asks: bool = True) -> None:
        if label in record:
            return
        profile, seconds = _timed(make)
        under, start = lm.with_profile(profile), time.monotonic()
        measured = record[label] = {"seconds": seconds, **losses(under, texts, config.window)}
        if profile is not None:
            measured |= _described(profile, tokens)
            profile.save(folder / f"{name}-{label}-{tokens}")
        if documents and asks:
            measured |= answers(under, documents)
        save()
        print(f"{name} {tokens} {label}: {time.monotonic() - start:.0f} s {json.dumps(measured)[:400]}", flush=True)

    none = Profile.uniform(config, lm.config.num_layers, lm.config.num_kv_heads, 0)
    own_texts, pairs = documents_with_pairs(lm, name, plan.texts(tokens), _size(lm, tokens), 0)
    note("full", lambda: None)
    note("row0", lambda: none, asks=False)
    note("pairs", lambda: tca_jax.calibrate(lm, own_texts, config, probes=pairs))
    note("default", lambda: _calibrated(lm, plan, config, tokens, 0))


def _calibrated(lm: tca_jax.LM, plan: Plan, config: TCAConfig, tokens: int, seed: int) -> Profile:
    texts = passages(seed, plan.texts(tokens), tokens, 0)
    with warnings.catch_warnings(action="ignore"):  # probes may say nothing of a model
        return tca_jax.calibrate(lm, texts, config)


def _timed(make: Callable[[], Profile | None]) -> tuple[Profile | None, float]:
    start = time.monotonic()
    return make(), time.monotonic() - start


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

#: Of reading, in parts of what row 0 costs, and of keeping, in shares of answers; 0.1 and 0.02 are the defaults.
TOLERANCES = ((0.5, 0.5), (0.1, 0.02), (0.1, 0.002), (0.03, 0.005), (0.03, 0.0005))
#: Methods whose prefill attends to less than everything, at several budgets.
READERS = (
    *(f"streaming:window={window}" for window in (256, 512, 1024, 2048, 4096)),
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
    "snapkv",
    "cake",
    "pyramidkv",
    "h2o",
    "tova",
    "keydiff",
    "adakv",
    "adakv-expected-attention",
    "random:window=512",
)
#: Methods whose steps attend to part of a whole cache, at several budgets.
STEPPERS = tuple(f"quest:budget={budget}" for budget in (256, 512, 1024, 2048))
#: Shares of full attention's bytes for each of them.
BYTES = (0.1, 0.15, 0.2, 0.35, 0.6)


def curves(folder: Path, out: Path, plan: Plan, dtype: str | None = None) -> None:
    """Loss inside prompts by the attended share, and answers by the bytes of the cache, of every method."""
    lm, name = tca_jax.load(folder, dtype=dtype), folder.name
    tokens, *_ = plan.lengths
    window, shape = window_of(tokens), (lm.config.num_layers, lm.config.num_kv_heads)
    texts, tasks = passages(0, plan.passages, tokens, 1), sorted(set(MIXTURES[name]))
    documents = {task: draw_documents((11, tokens), plan.questions, _size(lm, tokens), name, task) for task in tasks}
    found: dict[str, Any] = {"curves": name, "tokens": tokens, "device": jax.devices()[0].device_kind}
    found |= {"dtype": lm.dtype.name, "jax": jax.__version__, "tca_jax": version("tca-jax")}
    found |= {"texts": len(texts), "questions": plan.questions * len(tasks), "points": []}
    if out.exists():
        found = json.loads(out.read_text())

    def note(method: str, make: Callable[[], tca_jax.LM], *, reads: bool, keeps: bool, label: str) -> None:
        if label in [point["label"] for point in found["points"]]:
            return
        under, point = make(), {"method": method, "label": label}
        if reads:
            point |= losses(under, texts, window)
        if keeps:
            measured = answers(under, documents)
            point["kv_share"] = measured["kv_share"]
            point |= {protocol: float(np.mean(list(of.values()))) for protocol, of in measured["right"].items()}
        found["points"].append(point)
        for each in found["points"]:
            each["inside_full"] = found["points"][0]["inside"]
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, point, flush=True)

    config = plan.config(tokens)
    row0 = Profile.uniform(config, *shape, 0)
    own_texts, pairs = documents_with_pairs(lm, name, plan.texts(tokens), _size(lm, tokens), 0)

    def with_pairs(read: float, keep: float) -> tca_jax.LM:
        tolerances = dataclasses.replace(config, read_tolerance=read, keep_tolerance=keep)
        return lm.with_profile(tca_jax.calibrate(lm, own_texts, tolerances, probes=pairs))

    def own_profile() -> Profile:  # by which DuoAttention ranks heads, too
        folder = out.with_suffix("")
        if not folder.exists():
            _calibrated(lm, plan, config, tokens, 0).save(folder)
        return Profile.load(folder)

    note("full", lambda: lm.with_profile(None), reads=True, keeps=True, label="full attention")
    note("row 0", lambda: lm.with_profile(row0), reads=True, keeps=True, label="TCA, row 0 in every head")
    for read, keep in TOLERANCES:
        label = f"TCA, pairs, tolerances {read:g} and {keep:g}"
        note("TCA, pairs", functools.partial(with_pairs, read, keep), reads=True, keeps=True, label=label)
    note(
        "TCA, default probes",
        lambda: lm.with_profile(own_profile()),
        reads=True,
        keeps=True,
        label="TCA, default probes",
    )
    builder = Builder(lm, own_profile(), None, lambda: passages(0, 1, tokens, 0))

    def under_spec(spec: MethodSpec) -> tca_jax.LM:
        return builder.build(spec).lm

    for spec in parse_methods(",".join(READERS)):
        note(spec.parts[0][0], functools.partial(under_spec, spec), reads=True, keeps=False, label=spec.label)
    sizes = CallSizes(bucket_length(tokens), bucket_length(256), bucket_length(128))
    for spec, share in itertools.product(parse_methods(",".join(KEEPERS)), BYTES):
        built = builder.build_within(spec, share, sizes)
        if not built.own_budget:
            label = f"{spec.label} within {share:.0%}"
            # Of a method that runs twice, the curve with options is called by them.
            twice = sum(each.parts[0][0] == spec.parts[0][0] for each in parse_methods(",".join(KEEPERS))) > 1
            method = spec.label if twice else spec.parts[0][0]
            note(method, functools.partial(getattr, built, "lm"), reads=False, keeps=True, label=label)
    for spec in parse_methods(",".join(STEPPERS)):
        note(spec.parts[0][0], functools.partial(under_spec, spec), reads=False, keeps=True, label=spec.label)


# --- how blocks are estimated ---

#: How many blocks a tile fetches, and which of its queries estimate them: every so many, or sums over antidiagonals.
ESTIMATES: tuple[dict[str, int], ...] = (
    *({"fetch": fetch} for fetch in (4, 8, 16, 32)),
    *({"fetch_stride": stride} for stride in (4, 8, 32)),
    *({"antidiagonals": stride} for stride in (8, 16)),
)


def estimates(folder: Path, out: Path, plan: Plan, dtype: str | None = None) -> None:
    """What calibration finds to read blocks, what that costs, and the loss inside held-out text, by `ESTIMATES`."""
    lm, rows = tca_jax.load(folder, dtype=dtype), list[dict[str, Any]]()
    for tokens, options in itertools.product(plan.lengths, ESTIMATES):
        rows.append({"tokens": tokens, **options, **_estimated(lm, plan, tokens, **options)})
        out.write_text(json.dumps({"model": folder.name, "rows": rows}, indent=1) + "\n")
        print(folder.name, rows[-1], flush=True)


def _estimated(
    lm: tca_jax.LM, plan: Plan, tokens: int, antidiagonals: int | None = None, **options: int
) -> dict[str, Any]:
    """The first search on calibration texts, and the losses inside others."""
    config = TCAConfig(window=window_of(tokens), **options)
    with _antidiagonals(antidiagonals) if antidiagonals else contextlib.nullcontext():
        journal = Journal(None, None)
        found = choose_reading(
            lm, passages(0, plan.texts(tokens), tokens, 0), config, attended=None, journal=journal, step=lambda: None
        )
        other = TextLosses(lm, passages(0, plan.passages, tokens, 1), config, lambda: None)
        of_heads = {"row0": np.zeros_like(found.found.more), "chosen": found.found.more}
        losses = {name: _mean(other.of(heads)) for name, heads in of_heads.items()}
        shares = {name: _share(other, heads) for name, heads in of_heads.items()}
        return {
            "heads": np.argwhere(found.found.more).tolist(),
            "calibrated": dataclasses.asdict(found.losses),
            "losses": {"full": _mean(other.full()), **losses},
            "attended": shares,
        }


def _mean(losses: Sequence[np.ndarray]) -> float:
    return float(np.mean([of_text.mean() for of_text in losses]))


def _share(losses: TextLosses, heads: np.ndarray) -> float:
    """Attended share where these heads read blocks."""
    assert losses.shares is not None
    return float(np.where(heads, losses.shares[..., 1], losses.shares[..., 0]).mean())


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
    part: Annotated[str, typer.Option(help="answers, draws, curves, estimates or table.")] = "answers",
    only: Annotated[list[str] | None, typer.Option(help="Models; all by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Models at the same time, shared out over the GPUs.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that they are shared out over.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; the zoo's by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="What models compute in.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Lengths; 8,192 and 16,384 by default.")] = None,
    calibrated: Annotated[int, typer.Option(help="Tokens of all calibration texts of a length.")] = Plan.calibrated,
    texts: Annotated[int, typer.Option(help="Texts whose losses are measured.")] = Plan.passages,
    questions: Annotated[int, typer.Option(help="Of each task under each protocol.")] = Plan.questions,
    keep_tolerance: Annotated[float, typer.Option(help="Calibration's.")] = Plan.keep_tolerance,
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
    function = {"answers": evaluate, "draws": draws, "curves": curves, "estimates": estimates}[part]
    plan = (
        SMOKE
        if smoke
        else Plan(tuple(tokens or Plan.lengths), calibrated, texts, questions, keep_tolerance=keep_tolerance)
    )
    suffix = "-".join(["", *([] if part == "answers" else [part]), *map(str, tokens or [])])
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
