"""Predicted worth by masks: the fit, late facts, and losses inside prompts, for one rule and its variants.

    python -m tca_jax.lab.worth MODEL                        # fits, measures the rule, prints its tables
    python -m tca_jax.lab.worth fit MODEL --to FOLDER        # maps of all targets, their correlation, shares of heads
    python -m tca_jax.lab.worth late MODEL --maps FOLDER --out FILE
    python -m tca_jax.lab.worth reading MODEL --maps FOLDER --out FILE
    python -m tca_jax.lab.worth table FILE...
    python -m tca_jax.lab.worth page FILE...                 # lab/results/worth.md and docs/images/worth.png

Records are those of `late_facts` and `reading_loss`. A method's cache is a mask over keys of full precision.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import typer
import typer.core
from jaxtyping import Array, Bool, Float32

import tca_jax
from tca_jax.calibration.predicted_worth import WorthMaps, fit_worth, pack_texts, predict
from tca_jax.calibration.repetition import TARGETS, read_inputs
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import encode_verbatim
from tca_jax.errors import require
from tca_jax.lab.benchmarks.common import Compilations, peak_memory
from tca_jax.lab.by_layers import Answers, MaskedRead, ask, question_scores
from tca_jax.lab.evaluation import late_facts, reading_loss, real_models, sticks
from tca_jax.lab.evaluation.late_documents import LateDocument, calibration_text, late_document, repeating_document
from tca_jax.lab.evaluation.ruler import TASKS as RULER
from tca_jax.lab.evaluation.samples import Drawing
from tca_jax.lab.evaluation.sources import Sources
from tca_jax.lab.evaluation.sticks import Record
from tca_jax.lab.evaluation.texts import Half
from tca_jax.lab.sparse_reading import (
    BLOCK,
    FIRST,
    WINDOW,
    LayerRead,
    Reading,
    attended_share,
    block_means,
    read_sparsely,
)
from tca_jax.pallas_kernels.numerics import round_up


class _Commands(typer.core.TyperGroup):
    """Commands, of which `measure` needs no name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = not args or args[0].startswith("-") or args[0] in self.commands
        return super().parse_args(ctx, args if named else ["measure", *args])


app = typer.Typer(help=__doc__, pretty_exceptions_enable=False, cls=_Commands)
_OBSERVED, _SPREAD = 64, 16  # last queries of a prompt; tokens that a score counts for
# Rows that the page leaves out: without means or with equal weights what the rule measures since; of lesser interest.
_LEFT_OUT = re.compile(
    "; worth, window 1024$|worth, window 256, means$|window (1024|256, means), question|effect, window|0.05, means$"
)
_LEAST_FACTS = 8  # known under full attention, for anything to be measured
Predictions = dict[str, Float32[np.ndarray, "heads L"]]  # of all layers' heads, by target
MapsOption = Annotated[Path, typer.Option(help="Folder that `fit` wrote.")]
LikeOption = Annotated[str, typer.Option(help="Only variants whose name has this (a regular expression).")]
HalfOption = Annotated[Half, typer.Option(help="Half of the texts: test, or calibration to choose a variant.")]


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Which tokens a cache keeps beside the window and the first tokens."""

    score: str = "worth"  # a target
    budget: Literal["", "all"] = ""  # the threshold is a quantile of the calibration's texts or of this document
    means: bool = True  # whether evicted tokens of a block leave their mean, weighted by predicted worth

    @property
    def label(self) -> str:
        """Name in tables."""
        more = ["a budget"] * (self.budget == "all") + ["means by worth"] * self.means
        return ", ".join([self.score, f"window {WINDOW}", *more])


RULE = Keeping()
KVZAP = Keeping("probability", "all", means=False)
KEEPINGS = (RULE, Keeping(budget="all"), KVZAP)
READ = Reading()
READINGS = (READ, Reading(selected=0.1), Reading(stride=8))


def kept_masks(
    keeping: Keeping, predicted: Predictions, maps: dict[str, WorthMaps], share: float
) -> Bool[np.ndarray, "heads L"]:
    """Tokens that are kept: `share` of those of all heads, of the calibration's texts or of this document."""
    scores = predicted[keeping.score]
    place, length = np.arange(scores.shape[1]), scores.shape[1]
    always = (place < FIRST) | (place >= max(0, length // BLOCK * BLOCK - WINDOW))
    if share >= 1:
        return np.ones_like(scores, bool)
    selected = max(0.0, (share - always.mean()) / (1 - always.mean()))
    if keeping.budget:
        theta = np.quantile(scores[:, ~always], 1 - selected)
    else:
        theta = maps[keeping.score].threshold(selected) if selected else np.inf
    return (scores >= theta) | always


def masked_read(
    ids: Sequence[int],
    keys: Sequence[tuple[Array, Array]],
    kept: Bool[np.ndarray, "heads L"],
    attended: float,
    worth: Float32[np.ndarray, "heads L"] | None = None,
) -> tuple[MaskedRead, float]:
    """A read document for `ask`, with means if `worth` weights them, and the share of its bytes."""
    layers, tokens = len(keys), keys[0][0].shape[1]

    def of_layers(x: np.ndarray) -> list[Array]:
        return [*jnp.asarray(np.pad(x, ((0, 0), (0, tokens - len(ids)))).reshape(layers, 1, -1, tokens))]

    masks, share = of_layers(kept), float(kept.mean())
    if worth is None:
        return MaskedRead(list(ids), list(keys), masks, attended), share
    parts = zip(keys, masks, of_layers(worth), strict=True)
    biased = [_with_means(*k_v, mask, weights[0], len(ids)) for k_v, mask, weights in parts]
    share += float(np.mean([on_host(jnp.isfinite(bias[..., tokens:])).mean() for *_, bias in biased])) / BLOCK
    return MaskedRead(list(ids), [each[:2] for each in biased], [each[2] for each in biased], attended), share


@jax.jit
def _with_means(
    k: Array, v: Array, kept: Bool[Array, "1 Hkv L"], worth: Array, length: Array
) -> tuple[Array, Array, Array]:
    """Keys and values followed by the means of evicted tokens; additions to the logits."""
    evicted = ~kept[0] & (jnp.arange(kept.shape[-1]) < length)
    *means, entropy = block_means(k[0], v[0], evicted, worth)
    k, v = (jnp.concatenate([x, mean[None].astype(x.dtype)], axis=1) for x, mean in zip((k, v), means, strict=True))
    return k, v, jnp.concatenate([jnp.where(kept[0], 0.0, -jnp.inf), entropy], axis=1)[None]


@jax.jit
def _outside(bias: Float32[Array, "1 Hkv _"], scores: Float32[Array, "Q Hkv _"]) -> Float32[Array, "Q Hkv _"]:
    """Scores of tokens that are not kept, each the most of those before it, too; -1 for others."""
    before = ((0, 0), (0, 0), (_SPREAD - 1, 0))
    spread = jax.lax.reduce_window(scores, -jnp.inf, jax.lax.max, (1, 1, _SPREAD), (1, 1, 1), before)
    return jnp.where(jnp.isfinite(bias), -1.0, spread)


def with_reserve(
    biases: Sequence[Float32[Array, "1 Hkv _"]], scores: Sequence[Float32[Array, "Q Hkv _"]], tokens: int, reserve: int
) -> list[Float32[Array, "Q Hkv _"]]:
    """Additions to the logits of each question: a head keeps `reserve` more of `tokens`, which it attends to most."""
    outside = [_outside(bias[..., :tokens], score[..., :tokens]) for bias, score in zip(biases, scores, strict=True)]
    least = [jax.lax.top_k(each, reserve)[0][..., -1:] for each in outside]
    found = []
    for bias, score, bound in zip(biases, outside, least, strict=True):
        own = jnp.where(score >= jnp.maximum(bound, 0.0), 0.0, bias[..., :tokens])
        found.append(jnp.broadcast_to(bias, (len(score), *bias.shape[1:])).at[..., :tokens].set(own))
    return found


def ruler_document(lm: LM, task: str, seed: int, tokens: int) -> LateDocument:
    """A sample of a task of RULER: a row asks for each reference, after the question and the references before it."""
    tasks = {each.name: each for each in RULER}
    require(task in tasks, f"--task {task}: must be of {', '.join(tasks)}")
    (sample,) = tasks[task].draw(Drawing(lm, Sources(), tokens, 1, seed))
    prompt = sample.prompts["prefix"]
    asked: list[tuple[str, list[int], list[int]]] = []
    for i, reference in enumerate(sample.references):
        given = f"{prompt.lead}{''.join(f' {each},' for each in sample.references[:i])}"
        ids, question = dataclasses.replace(prompt, lead=given).encode_apart(lm)
        asked.append(("fact", question, encode_verbatim(lm, f" {reference}")))
    return LateDocument.of(ids, asked, round_up(max(len(question) + len(answer) for _, question, answer in asked), 32))


class LateSheet:
    """A document with its questions, asked under any keeping and reading."""

    def __init__(self, lm: LM, maps: dict[str, WorthMaps], document: LateDocument) -> None:
        self._lm, self._maps, self._document, self._ids = lm, maps, document, document.ids
        self._inputs = read_inputs(lm, document.ids)
        self._keys = [(layer.k, layer.v) for layer in self._inputs]
        self._predicted = {name: self._of_maps(of_target) for name, of_target in maps.items()}
        self._all = np.ones_like(self._predicted["worth"], bool)
        self._reference, self._sizes = self._ask(self._all, self._keys, 1.0)

    def _stacked(self, found: Sequence[Array]) -> Float32[np.ndarray, "heads L"]:
        return np.concatenate([on_host(each)[:, : len(self._ids)] for each in found])

    def _ask(
        self,
        kept: Bool[np.ndarray, "heads L"],
        keys: Sequence[tuple[Array, Array]],
        attended: float,
        worth: Float32[np.ndarray, "heads L"] | None = None,
    ) -> tuple[Answers, Record]:
        read, share = masked_read(self._ids, keys, kept, attended, worth)
        answers = ask(self._lm, read, self._document.rows)
        return answers, {"kept": float(kept.mean()), "kv_share": share, "attended": attended}

    def full(self) -> Record:
        """Full attention's record."""
        return self._record("full", None, self._reference, self._sizes)

    def kept(self, keeping: Keeping, shares: Sequence[float]) -> Iterator[Record]:
        """Of a document read in full."""
        yield from self._kept(keeping, shares, self._predicted, self._maps, keeping.label)

    def kept_by(self, maps: dict[str, WorthMaps], shares: Sequence[float], name: str) -> Iterator[Record]:
        """Of the same under the rule, with the maps of another fit."""
        predicted = {"worth": self._of_maps(maps["worth"])}
        yield from self._kept(RULE, shares, predicted, maps, f"{RULE.label}, {name}")

    def _kept(
        self, keeping: Keeping, shares: Sequence[float], predicted: Predictions, maps: dict[str, WorthMaps], label: str
    ) -> Iterator[Record]:
        for share in shares:
            masks, worth = kept_masks(keeping, predicted, maps, share), predicted["worth"] if keeping.means else None
            yield self._record(label, share, *self._ask(masks, self._keys, 1.0, worth))

    def _of_maps(self, maps: WorthMaps) -> Float32[np.ndarray, "heads L"]:
        pairs = zip(maps.maps, self._inputs, strict=True)
        return self._stacked([predict(of_layer, each.x) for of_layer, each in pairs])

    def read(self, reading: Reading, shares: Sequence[float]) -> Iterator[Record]:
        """Of a document that was read sparsely."""
        layers: list[LayerRead] = list(read_sparsely(self._lm, self._ids, self._maps["worth"], reading)[1])
        keys, attended = [(layer.k, layer.v) for layer in layers], attended_share(layers, len(self._ids))
        predicted = {"worth": self._stacked([layer.predicted for layer in layers])}
        for share in shares:
            masks, label = kept_masks(RULE, predicted, self._maps, share), f"{reading.label}; {RULE.label}"
            yield self._record(label, share, *self._ask(masks, keys, attended, predicted["worth"]))

    def asked_in_prompts(self, share: float, reserves: Sequence[int]) -> Iterator[Record]:
        """Of prompts that end in the question: each head also keeps what the last queries attend to."""
        rows, place = self._document.rows, np.arange(self._document.rows.shape[1])
        ends = (self._document.counted > 0).argmax(axis=1)[:, None]  # of questions
        questions = (place <= ends) & (place > ends - _OBSERVED)
        full, _ = masked_read(self._ids, self._keys, self._all, 1.0)
        scores, tokens = question_scores(self._lm, full, rows, questions), len(self._ids)
        kept = kept_masks(RULE, self._predicted, self._maps, share)
        read, of_bytes = masked_read(self._ids, self._keys, kept, 1.0, self._predicted["worth"])
        for reserve in reserves:
            biases = with_reserve(read.masks, scores, tokens, reserve)
            found = ask(self._lm, read._replace(masks=biases), rows)
            now = float(np.mean([on_host(jnp.isfinite(each[..., :tokens])).mean() for each in biases]))
            sizes = {"kept": now, "kv_share": of_bytes + now - float(kept.mean()), "attended": 1.0}
            label = f"{RULE.label}, question in the prompt, reserve {reserve}"
            yield self._record(label, share, found, sizes)

    def _record(self, method: str, share: float | None, answers: Answers, sizes: Record) -> Record:
        found = late_facts.compared(answers, self._reference, self._document)
        return {"method": method, "share": share} | sizes | found


@app.command("fit")
def fit(
    model: sticks.ModelArgument,
    to: Annotated[Path, typer.Option(help="Folder that gets an .npz of each target.")],
    count: Annotated[int, typer.Option(min=2, help="Texts; half of them are fitted.")] = 8,
    tokens: sticks.TokensOption = 8_192,
    kind: Annotated[str, typer.Option(help="python or manual; both by default.")] = "",
    targets: Annotated[str, typer.Option(help="Targets, by commas.")] = ",".join(TARGETS),
    texts: sticks.TextsOption = None,
) -> None:
    """Fits maps on texts of the calibration half; prints their correlation and the share of each head."""
    compilations, lm = Compilations(), tca_jax.load(model)
    seeds = [2 * i + (kind == "manual") if kind else i for i in range(count)]
    started = time.monotonic()
    packed = pack_texts(lm, [calibration_text(seed, tokens, texts) for seed in seeds], count, tokens)
    found = fit_worth(lm, packed, targets=targets.split(","), progress=_say)
    seconds = time.monotonic() - started
    to.mkdir(parents=True, exist_ok=True)
    for name, maps in found.items():
        np.savez(to / f"{name}.npz", **dataclasses.asdict(maps))
        shares = " ".join(f"{share:.2f}" for share in np.sort(maps.shares.ravel())[::-1])
        print(f"{name}: correlation {np.nanmean(maps.correlation):.3f}; shares of heads at 20% in all: {shares}")
    compiling = sum(compilations.by_program.values())
    peak, memory = peak_memory()
    took = f"{seconds:.0f} s, of these {compiling:.0f} s compiling"
    print(f"{count} texts of {tokens:,} tokens: {took}; peak {peak / 1e9:.1f} GB of {memory} memory")


def _say(stage: str, done: int, total: int) -> None:
    print(f"{stage}: {done} of {total} texts", flush=True)


def _load(folder: Path) -> dict[str, WorthMaps]:
    return {path.stem: WorthMaps(**np.load(path)) for path in sorted(folder.glob("*.npz"))}


@app.command("late")
def late(
    model: sticks.ModelArgument,
    maps: MapsOption,
    out: sticks.OutOption,
    shares: Annotated[str, typer.Option(help="Kept shares in all, by commas.")] = "0.125,0.2,0.33",
    variants: Annotated[str, typer.Option(help="rule, keeping, prompt, reading; by commas.")] = "rule",
    like: LikeOption = "",
    task: Annotated[str, typer.Option(help="A task of RULER instead of facts in texts.")] = "",
    other: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of another fit; repeatable.")] = None,
    tokens: sticks.TokensOption = 16_384,
    documents: Annotated[int, typer.Option(min=1)] = 20,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first document.")] = 0,
    half: HalfOption = "test",
    texts: sticks.TextsOption = None,
    seconds: sticks.SecondsOption = float("inf"),
) -> None:
    """Late facts by masks."""
    until, lm, fitted = time.monotonic() + seconds, tca_jax.load(model), _load(maps)
    wanted, others = [float(share) for share in shares.split(",")], sticks.parse_profiles(other)
    refits = {name: _load(folder) for name, folder in others.items()}
    chosen = set(variants.split(","))
    require(
        chosen <= {"rule", "keeping", "prompt", "reading"},
        f"--variants {variants}: must be of rule, keeping, prompt and reading, by commas",
    )

    def records(seed: int) -> Iterator[Record]:
        document = ruler_document(lm, task, seed, tokens) if task else late_document(lm, seed, tokens, half, texts)
        sheet = LateSheet(lm, fitted, document)
        yield sheet.full()
        for keeping in KEEPINGS if "keeping" in chosen else [RULE] * ("rule" in chosen):
            if re.search(like, keeping.label):
                yield from sheet.kept(keeping, wanted)
        for name, of_name in refits.items():
            yield from sheet.kept_by(of_name, wanted, name)
        if "prompt" in chosen:
            yield from sheet.asked_in_prompts(0.2, (128, 512))
        for reading in READINGS if "reading" in chosen else ():
            if re.search(like, reading.label):
                yield from sheet.read(reading, [*wanted[1:], 1.0])

    seeds = range(first, first + documents)
    stick = f"ruler {task}" if task else late_facts.STICK
    sticks.run(stick, lm, out, tokens, seeds, records, _late_table, until=until, half=half)


def _late_table(records: Sequence[Record]) -> str:
    known = sum(value > 0 for record in records if record["method"] == "full" for value in record["facts"])
    if known < _LEAST_FACTS:
        return f"full attention answers {known} facts, fewer than {_LEAST_FACTS}: nothing was measured"
    return late_facts.table(records)


@app.command("reading")
def reading(
    model: sticks.ModelArgument,
    maps: MapsOption,
    out: sticks.OutOption,
    like: LikeOption = "",
    half: HalfOption = "test",
    tokens: sticks.TokensOption = 16_384,
    documents: Annotated[int, typer.Option(min=1)] = 8,
    texts: sticks.TextsOption = None,
    seconds: sticks.SecondsOption = float("inf"),
) -> None:
    """Losses inside prompts."""
    until, lm, worth = time.monotonic() + seconds, tca_jax.load(model), _load(maps)["worth"]
    full = Reading(selected=1.0)

    def records(seed: int) -> Iterator[Record]:
        document = repeating_document(lm, seed, tokens, half, texts)
        for each in (full, *(reading for reading in READINGS if re.search(like, reading.label))):
            passed, layers = read_sparsely(lm, document.ids, worth, each)
            attended = attended_share(list(layers), len(document.ids))
            plain, copy, fact = (document.weights @ passed.losses()[: len(document.ids) - 1]).tolist()
            name = "full" if each is full else each.label
            yield {"method": name, "share": None, "plain": plain, "copy": copy, "fact": fact, "attended": attended}

    sticks.run(
        reading_loss.STICK, lm, out, tokens, range(documents), records, reading_loss.table, until=until, half=half
    )


@app.command("measure")
def measure(
    model: sticks.ModelArgument,
    to: Annotated[Path, typer.Option(help="Folder that gets the maps and the records.")] = Path("worth"),
    tokens: sticks.TokensOption = 8_192,
    documents: Annotated[int, typer.Option(min=1)] = 4,
    texts: sticks.TextsOption = None,
) -> None:
    """Fits the rule on 8 texts; measures late facts and losses inside prompts."""
    fit(model, to, tokens=tokens, targets="worth", texts=texts)
    late(model, to, to / "late.jsonl", tokens=tokens, documents=documents, texts=texts)
    reading(model, to, to / "reading.jsonl", f"{READ.label}$", tokens=tokens, documents=documents, texts=texts)


@app.command("table")
def table(files: Annotated[list[Path], typer.Argument(help="Files of records.")]) -> None:
    """Prints the tables of records."""
    by_stick = sticks.records_by_stick(files)
    for stick in (late_facts.STICK, reading_loss.STICK, *(f"ruler {task.name}" for task in RULER)):
        draw = reading_loss.table if stick == reading_loss.STICK else late_facts.table
        for half in ("calibration", "test"):
            if records := [each for each in by_stick.get(stick, ()) if each.get("half", "test") == half]:
                print(f"{stick}, {half} half of the texts: {draw(records)}\n")


@app.command("page")
def page(
    records: Annotated[list[Path], typer.Argument(help="Files of records.")],
    root: Annotated[Path, typer.Option(help="The checkout.")] = Path(),
) -> None:
    """Writes lab/results/worth.md and docs/images/worth.png."""
    (root / "lab/results/worth.md").write_text(worth_page(records), "utf-8")
    names = {RULE.label: "this rule", KVZAP.label: "KVzap", "kvzip": "KVzip", "snapkv": "SnapKV"}
    found = sticks.read_records([*records, root / "lab/results/real-models.jsonl.xz"], late_facts.STICK)
    drawn = [each | {"method": names[each["method"]]} for each in found if each["method"] in names]
    real_models.draw(drawn, root / "docs/images/worth.png", ("qwen-1.5b.gguf", 16_384))


def worth_page(records: Sequence[Path]) -> str:
    """The committed table of variants."""
    by_stick = sticks.records_by_stick(records)
    facts, losses = by_stick[late_facts.STICK], by_stick[reading_loss.STICK]
    groups = collections.defaultdict(set)
    for each in facts:
        groups[each["method"]].add((each["model"], each["tokens"], each["half"]))
    del groups["full"]
    compact = [name for name, found in groups.items() if len(found) > 2 or {each[2] for each in found} != {"test"}]
    rest = [each for each in facts if each["method"] not in compact or each["tokens"] > 16_384]
    rest = [each for each in rest if each["half"] == "test" and not _LEFT_OUT.search(each["method"])]
    others = {each["model"] for each in rest if each["method"] != "full"}
    rest = [each for each in rest if each["model"] in others]
    readings = list(dict.fromkeys(each["method"] for each in losses if each["method"] != "full"))
    readings = [method for method in readings if not _LEFT_OUT.search(method)]
    answered = {}
    for task in RULER:
        for methods in sticks.grouped(by_stick.get(f"ruler {task.name}", ())).values():
            answered[task.name] = {
                method: f"{late_facts.facts(found)[0]:.0%}; {_mean(found, 'kv_share'):.0%} ({len(found)})"
                for (method, _), found in methods.items()
                if method != "full"
            }
    header = list(dict.fromkeys(method for of_task in answered.values() for method in of_task))
    lines = [[name, *(of_task.get(method, "-") for method in header)] for name, of_task in answered.items()]
    return f"""# Predicted worth: every variant

`python -m tca_jax.lab.worth page lab/results/worth.jsonl.xz` writes this page, from a record for each document and
variant ([what they are](../../docs/worth.md)). One H200, JAX 0.11.2; maps are fitted on 8 texts of 8,192 tokens of the
calibration half (SmolLM2: 6,912) unless a row says otherwise. Numbers of documents stand in brackets: a share of 90%
has a 95% interval of about 4 points at 20 documents; `worth table` prints all intervals. Variants were chosen on the
0.5B model and the calibration half. The code of those that lost is at the tags `worth-variants`, `worth-variants-2`;
rows with "by loss" and "predicted need" were measured by a script that is not committed.

## What is kept

At kept shares of 12.5, 20 and 33%: facts in percent of those that full attention answers; copies likewise; percent of
loss of the following text over full attention's; bytes. A threshold is the quantile of the calibration's texts, so
bytes differ; "a budget" is the document's own quantile. "refitted values": of kept tokens, by ridge regression to the
outputs of the document's queries; "copies": passages that stood in the text before count in the fit, too.

{_compact(facts, compact, _facts_cell)}

## Losses inside prompts

Attended pairs; plain loss over full attention's; copies and facts in nats above it. 16,384 tokens (SmolLM2: 7,680).

{_compact(losses, readings, _loss_cell)}

## Other lengths, fits and methods; questions in the prompt; after sparse reading

"manual", "python": maps fitted on one kind of text, used on both; "questions": their worth counts in the fit, too;
"texts4", "texts16": of that many texts. "reserve": tokens that each head keeps for a question in the prompt.

{late_facts.table(rest)}

## RULER, late

16,384 tokens, kept 25%: references in percent of those that full attention answers; bytes.

{sticks.markdown(["task", *header], lines)}
"""


def _mean(records: Sequence[Record], name: str) -> float:
    return float(np.mean([record[name] for record in records]))


def _compact(records: Sequence[Record], rows: Sequence[str], cell: Callable[..., str]) -> str:
    """A row for each variant, a column for each model, length and half of the texts."""
    columns = {}
    for half in ("calibration", "test"):
        for (model, _, tokens), methods in sticks.grouped(r for r in records if r["half"] == half).items():
            by_method: dict[str, list[list[Record]]] = {}
            for (method, _), found in methods.items():
                by_method.setdefault(method, []).append(found)
            if tokens <= 16_384 and len(set(rows) & set(by_method)) > 3:
                name = f"{model.removesuffix('.gguf')}, {tokens:,}{', calibration half' * (half == 'calibration')}"
                columns[name] = by_method
    body = [[row, *(cell(found.get(row), found["full"][0]) for found in columns.values())] for row in rows]
    return sticks.markdown(["variant", *columns], [line for line in body if set(line[1:]) != {"-"}])


def _facts_cell(found: list[list[Record]] | None, full: list[Record]) -> str:
    if not found:
        return "-"
    copies, following = (
        [_mean(each, name) / _mean(each, f"{name}_by_full") for each in found] for name in ("copied", "next")
    )
    known, of_bytes = [late_facts.facts(each)[0] for each in found], [_mean(each, "kv_share") for each in found]
    facts, right, shares = (" ".join(f"{100 * x:.0f}" for x in each) for each in (known, copies, of_bytes))
    more = " ".join(f"{100 * x - 100:+.1f}" for x in following)
    return f"{facts}; {right}; {more}; {shares} ({min(map(len, found))})"


def _loss_cell(found: list[list[Record]] | None, full: list[Record]) -> str:
    if not found:
        return "-"
    of_seed = {record["seed"]: record for record in full}
    pairs = [(record, of_seed[record["seed"]]) for record in found[0]]
    plain = sum(each["plain"] for each, _ in pairs) / sum(base["plain"] for _, base in pairs) - 1
    copy, fact = (np.mean([each[name] - base[name] for each, base in pairs]) for name in ("copy", "fact"))
    return f"{_mean(found[0], 'attended'):.1%}; {plain:+.1%}; {copy:+.2f}, {fact:+.2f} ({len(pairs)})"


if __name__ == "__main__":
    app()
