"""Predicted worth by masks: the fit, late facts, and losses inside prompts, for one rule and its variants.

    python -m tca_jax.lab.worth fit MODEL --to FOLDER        # maps of all targets, their correlation, shares of heads
    python -m tca_jax.lab.worth late MODEL --maps FOLDER --out FILE
    python -m tca_jax.lab.worth reading MODEL --maps FOLDER --out FILE
    python -m tca_jax.lab.worth table FILE...                # lab/results/worth.md

Records are those of `late_facts` and `reading_loss`. A method's cache is a mask over keys of full precision.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import Array, Bool, Float32

import tca_jax
from tca_jax.calibration.predicted_worth import SHARES, WorthMaps, fit_worth, pack_texts, predictions
from tca_jax.calibration.repetition import TARGETS, TextRows, read_inputs
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.errors import require
from tca_jax.lab.benchmarks.common import Compilations
from tca_jax.lab.evaluation import late_facts, reading_loss, sticks
from tca_jax.lab.evaluation.by_layers import Answers, MaskedRead, ask, question_scores
from tca_jax.lab.evaluation.late_documents import LateDocument, draw_text, late_document, repeating_document
from tca_jax.lab.evaluation.sticks import Record
from tca_jax.lab.sparse_reading import BLOCK, FIRST, LayerRead, Reading, attended_share, block_means, read_sparsely

app = typer.Typer(help=__doc__, pretty_exceptions_enable=False)
_OBSERVED, _SPREAD = 64, 16  # last queries of a prompt; tokens that a score counts for
Predictions = dict[str, Float32[np.ndarray, "heads L"]]  # of all layers' heads, by target
MapsOption = Annotated[Path, typer.Option(help="Folder that `fit` wrote.")]


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Which tokens a cache keeps beside the window and the first tokens."""

    score: str = "worth"  # a target, or a combination of `_combined`
    budget: Literal["threshold", "all", "layer", "head"] = "threshold"  # of the calibration, or a share of these heads
    window: int = 1_024
    means: bool = False  # whether evicted tokens of a block leave their mean

    @property
    def label(self) -> str:
        """Name in tables."""
        budget = {"threshold": [], "all": ["a budget"]}.get(self.budget, [f"a budget per {self.budget}"])
        return ", ".join([self.score, f"window {self.window}", *budget, *["means"] * self.means])


RULE = Keeping()
KEEPINGS = (
    RULE,
    *(Keeping(score, "all") for score in ("worth", "probability", "effect", "max rank", "sum")),
    *(Keeping(budget=budget) for budget in ("layer", "head")),
    *(Keeping(window=window) for window in (256, 512)),
    Keeping(means=True),
)
READINGS = (
    Reading(),
    Reading(selected=0.1),
    Reading(mass=0.1),
    Reading(selected=0.1, mass=0.1),
    Reading(selected=0.1, mass=0.1, means=True),
    Reading(selected=0.1, mass=0.1, means=True, weighted=False),
    Reading(selected=0.05, mass=0.1, means=True),
    Reading(selected=0.1, mass=0.1, means=True, window=512),
    Reading(selected=0.1, mass=0.1, means=True, window=256),
    Reading(selected=0.1, mass=0.05, means=True, window=256),
    Reading(selected=0.2, mass=0.1, means=True, window=256),
    Reading(selected=0.1, mass=0.1, means=True, window=256, stride=8),
    Reading(selected=0.1, mass=0.1, means=True, window=256, stride=4),
)
#: Those whose late answers are measured.
LATE_READINGS = tuple(each for each in READINGS if each.means and each.weighted and each.stride == 16)


def kept_masks(
    keeping: Keeping, predicted: Predictions, maps: dict[str, WorthMaps], share: float, layers: int
) -> Bool[np.ndarray, "heads L"]:
    """Tokens that are kept, `share` of all of them on the calibration's texts or, with a budget, on this one."""
    scores = _combined(keeping.score, predicted, maps)
    heads, length = scores.shape
    place = np.arange(length)
    always = (place < FIRST) | (place >= max(0, length // BLOCK * BLOCK - keeping.window))
    if share >= 1:
        return np.ones_like(scores, bool)
    selected = max(0.0, (share - always.mean()) / (1 - always.mean()))
    if keeping.budget == "threshold":
        theta = maps[keeping.score].threshold(selected) if selected else np.inf
        return (scores >= theta) | always
    groups = {"all": 1, "layer": layers, "head": heads}[keeping.budget]
    outside = scores[:, ~always].reshape(groups, -1)
    thetas = np.quantile(outside, 1 - selected, axis=1).repeat(heads // groups)
    return (scores >= thetas[:, None]) | always


def _combined(name: str, predicted: Predictions, maps: dict[str, WorthMaps]) -> Float32[np.ndarray, "heads L"]:
    """A score: a target's prediction, the higher of the ranks of worth and effect, the sum of two logarithms."""
    if name in predicted:
        return predicted[name]
    if name == "sum":
        return predicted["worth"] + predicted["probability"]
    logs = -np.log(SHARES)[::-1]
    ranks = [np.interp(predicted[each], maps[each].thresholds[::-1], logs) for each in ("worth", "effect")]
    return np.maximum(*ranks).astype(np.float32)


def masked_read(
    ids: Sequence[int],
    keys: Sequence[tuple[Array, Array]],
    kept: Bool[np.ndarray, "heads L"],
    attended: float,
    means: bool,
) -> tuple[MaskedRead, float]:
    """A read document for `ask`, and the share of its bytes."""
    layers, tokens = len(keys), keys[0][0].shape[1]
    padded = np.pad(kept, ((0, 0), (0, tokens - len(ids)))).reshape(layers, 1, -1, tokens)
    share = float(kept.mean())
    if not means:
        return MaskedRead(list(ids), list(keys), [jnp.asarray(mask) for mask in padded], attended), share
    biased = [_with_means(k, v, jnp.asarray(mask), len(ids)) for (k, v), mask in zip(keys, padded, strict=True)]
    share += float(np.mean([on_host(count > 0).mean() for *_, count in biased])) / BLOCK
    return MaskedRead(list(ids), [each[:2] for each in biased], [each[2] for each in biased], attended), share


@jax.jit
def _with_means(k: Array, v: Array, kept: Bool[Array, "1 Hkv L"], length: Array) -> tuple[Array, Array, Array, Array]:
    """Keys and values followed by the means of evicted tokens; logits' additions; the tokens of each mean."""
    evicted = ~kept[0] & (jnp.arange(kept.shape[-1]) < length)
    (mean_k, count), (mean_v, _) = block_means(k[0], evicted), block_means(v[0], evicted)
    k, v = (jnp.concatenate([x, mean[None].astype(x.dtype)], axis=1) for x, mean in ((k, mean_k), (v, mean_v)))
    bias = jnp.concatenate([jnp.where(kept[0], 0.0, -jnp.inf), jnp.log(count)], axis=1)
    return k, v, bias[None], count


@functools.partial(jax.jit, static_argnames=("reserve",))
def _with_reserve(
    kept: Bool[Array, "1 Hkv L"], scores: Float32[Array, "Q Hkv L"], reserve: int
) -> Bool[Array, "Q Hkv L"]:
    """Kept tokens of each question, with `reserve` more of each head; scores count for what follows, too."""
    before = ((0, 0), (0, 0), (_SPREAD - 1, 0))
    spread = jax.lax.reduce_window(scores, -jnp.inf, jax.lax.max, (1, 1, _SPREAD), (1, 1, 1), before)
    outside = jnp.where(kept, -1.0, spread)
    least = jax.lax.top_k(outside, reserve)[0][..., -1:]
    return kept | (outside >= jnp.maximum(least, 0.0))


class LateSheet:
    """A document with its questions, asked under any keeping and reading."""

    def __init__(self, lm: LM, maps: dict[str, WorthMaps], document: LateDocument) -> None:
        self._lm, self._maps, self._document, self._ids = lm, maps, document, document.ids
        self._inputs = read_inputs(lm, document.ids)
        self._keys = [(layer.k, layer.v) for layer in self._inputs]
        self._predicted = {name: self._of_maps(of_target) for name, of_target in maps.items()}
        self._all = np.ones_like(self._predicted["worth"], bool)
        self._reference, self._sizes = self._ask(self._all)

    def _stacked(self, found: Sequence[Array]) -> Float32[np.ndarray, "heads L"]:
        return np.concatenate([on_host(each)[:, : len(self._ids)] for each in found])

    def _ask(
        self,
        kept: Bool[np.ndarray, "heads L"],
        means: bool = False,
        keys: Sequence[tuple[Array, Array]] | None = None,
        attended: float = 1.0,
    ) -> tuple[Answers, Record]:
        read, share = masked_read(self._ids, keys or self._keys, kept, attended, means)
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
            masks = kept_masks(keeping, predicted, maps, share, len(self._keys))
            yield self._record(label, share, *self._ask(masks, keeping.means))

    def _of_maps(self, maps: WorthMaps) -> Float32[np.ndarray, "heads L"]:
        return self._stacked(predictions(maps, self._inputs))

    def read(self, reading: Reading, shares: Sequence[float]) -> Iterator[Record]:
        """Of a document that was read sparsely."""
        layers: list[LayerRead] = list(read_sparsely(self._lm, self._ids, self._maps["worth"], reading)[1])
        keys, attended = [(layer.k, layer.v) for layer in layers], attended_share(layers, len(self._ids))
        predicted = {"worth": self._stacked([layer.predicted for layer in layers])}
        for share in shares:
            masks = kept_masks(RULE, predicted, self._maps, share, len(layers))
            yield self._record(reading.label, share, *self._ask(masks, keys=keys, attended=attended))

    def asked_in_prompts(self, share: float, reserves: Sequence[int]) -> Iterator[Record]:
        """Of prompts that end in the question: each head also keeps what the last queries attend to."""
        rows, place = self._document.rows, np.arange(self._document.rows.shape[1])
        ends = (self._document.counted > 0).argmax(axis=1)[:, None]  # of questions
        questions = (place <= ends) & (place > ends - _OBSERVED)
        full, _ = masked_read(self._ids, self._keys, self._all, 1.0, means=False)
        scores = question_scores(self._lm, full, rows, questions)
        kept = kept_masks(RULE, self._predicted, self._maps, share, len(self._keys))
        read, _ = masked_read(self._ids, self._keys, kept, 1.0, means=False)
        for reserve in reserves:
            masks = [_with_reserve(*each, reserve) for each in zip(read.masks, scores, strict=True)]
            asked = read._replace(masks=masks)
            sizes = {"kept": asked.kept_share, "kv_share": asked.kept_share, "attended": 1.0}
            label = f"{RULE.label}, question in the prompt, reserve {reserve}"
            yield self._record(label, share, ask(self._lm, asked, rows), sizes)

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
    questions: Annotated[bool, typer.Option(help="Hide facts in the texts; their questions count, too.")] = False,
    targets: Annotated[str, typer.Option(help="Targets, by commas.")] = ",".join(TARGETS),
    texts: sticks.TextsOption = None,
) -> None:
    """Fits maps on texts of the calibration half; prints their correlation and the share of each head."""
    compilations, lm = Compilations(), tca_jax.load(model)
    seeds = [2 * i + (kind == "manual") if kind else i for i in range(count)]
    started = time.monotonic()
    if questions:
        documents = [late_document(lm, seed, tokens, "calibration", texts) for seed in seeds]
        packed, asked = [document.ids for document in documents], [_asked(document) for document in documents]
    else:
        drawn = [draw_text(np.random.default_rng(1_000 + seed), seed, "calibration", tokens, texts) for seed in seeds]
        packed, asked = pack_texts(lm, drawn, count, tokens), []
    found = fit_worth(lm, packed, targets=targets.split(","), questions=asked, progress=_say)
    seconds = time.monotonic() - started
    to.mkdir(parents=True, exist_ok=True)
    for name, maps in found.items():
        maps.save(to / f"{name}.npz")
        shares = " ".join(f"{share:.2f}" for share in np.sort(maps.shares.ravel())[::-1])
        print(f"{name}: correlation {np.nanmean(maps.correlation):.3f}; shares of heads at 20% in all: {shares}")
    compiling = sum(compilations.by_program.values())
    print(f"{count} texts of {tokens:,} tokens: {seconds:.0f} s, of these {compiling:.0f} s compiling; {_memory()}")


def _asked(document: LateDocument) -> TextRows:
    rows = [number for number, kind in enumerate(document.kinds) if kind != "next"]
    return TextRows(document.rows[rows], document.counted[rows])


def _say(stage: str, done: int, total: int) -> None:
    print(f"{stage}: {done} of {total} texts", flush=True)


def _memory() -> str:
    stats = jax.devices()[0].memory_stats()
    if stats is not None and "peak_bytes_in_use" in stats:
        return f"peak {stats['peak_bytes_in_use'] / 1e9:.1f} GB of device memory"
    return f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB of host memory"


def _load(folder: Path) -> dict[str, WorthMaps]:
    return {path.stem: WorthMaps.load(path) for path in sorted(folder.glob("*.npz"))}


@app.command("late")
def late(
    model: sticks.ModelArgument,
    maps: MapsOption,
    out: sticks.OutOption,
    shares: Annotated[str, typer.Option(help="Kept shares in all, by commas.")] = "0.125,0.2,0.33",
    variants: Annotated[str, typer.Option(help="rule, keeping, prompt, reading; by commas.")] = "rule",
    other: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of another fit; repeatable.")] = None,
    tokens: sticks.TokensOption = 16_384,
    documents: Annotated[int, typer.Option(min=1)] = 20,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first document.")] = 0,
    half: Annotated[str, typer.Option(help="test, or calibration to choose a variant.")] = "test",
    texts: sticks.TextsOption = None,
    seconds: sticks.SecondsOption = float("inf"),
) -> None:
    """Late facts by masks."""
    until, lm, fitted = time.monotonic() + seconds, tca_jax.load(model), _load(maps)
    wanted, others = [float(share) for share in shares.split(",")], sticks.parse_profiles(other)
    refits = {name: _load(folder) for name, folder in others.items()}
    unknown = set(variants.split(",")) - {"rule", "keeping", "prompt", "reading"}
    require(not unknown, f"--variants {variants}: must be of rule, keeping, prompt and reading, by commas")

    def records(seed: int) -> Iterator[Record]:
        sheet = LateSheet(lm, fitted, late_document(lm, seed, tokens, half, texts))  # type: ignore[arg-type]
        yield sheet.full()
        for keeping in KEEPINGS if "keeping" in variants else [RULE] * ("rule" in variants):
            yield from sheet.kept(keeping, wanted)
        for name, of_name in refits.items():
            yield from sheet.kept_by(of_name, wanted, name)
        if "prompt" in variants:
            yield from sheet.asked_in_prompts(0.2, (128, 512))
        for reading in LATE_READINGS if "reading" in variants else ():
            yield from sheet.read(reading, [*wanted[1:], 1.0])

    seeds = range(first, first + documents)
    sticks.run(late_facts.STICK, lm, out, tokens, seeds, records, late_facts.table, until=until)


@app.command("reading")
def reading(
    model: sticks.ModelArgument,
    maps: MapsOption,
    out: sticks.OutOption,
    tokens: sticks.TokensOption = 16_384,
    documents: Annotated[int, typer.Option(min=1)] = 8,
    texts: sticks.TextsOption = None,
    seconds: sticks.SecondsOption = float("inf"),
) -> None:
    """Losses inside prompts, of all readings."""
    until, lm, worth = time.monotonic() + seconds, tca_jax.load(model), _load(maps)["worth"]
    full = Reading(selected=1.0)

    def records(seed: int) -> Iterator[Record]:
        document = repeating_document(lm, seed, tokens, folder=texts)
        for each in (full, *READINGS):
            passed, layers = read_sparsely(lm, document.ids, worth, each)
            attended = attended_share(list(layers), len(document.ids))
            plain, copy, fact = (document.weights @ passed.losses()[: len(document.ids) - 1]).tolist()
            name = "full" if each is full else each.label
            yield {"method": name, "share": None, "plain": plain, "copy": copy, "fact": fact, "attended": attended}

    sticks.run(reading_loss.STICK, lm, out, tokens, range(documents), records, reading_loss.table, until=until)


@app.command("table")
def table(files: Annotated[list[Path], typer.Argument(help="Files of records.")]) -> None:
    """Prints the tables of records."""
    parts: list[tuple[str, Callable[[Sequence[Record]], str]]] = [
        (late_facts.STICK, late_facts.table),
        (reading_loss.STICK, reading_loss.table),
    ]
    print("\n\n".join(draw(sticks.read_records(files, stick)) for stick, draw in parts))


if __name__ == "__main__":
    app()
