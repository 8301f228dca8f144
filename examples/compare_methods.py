"""Calibrate a checkpoint, then compare attention methods on it: right answers, KV bytes, seconds, loss.

python examples/compare_methods.py                                    # the shipped model, about a minute on two cores
python examples/compare_methods.py my/checkpoint --bytes 200000 --window 4096 --kept 0.3 --out out/mine
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np

import tca_jax
from tca_jax.lab import recall
from tca_jax.lab.recall.protocols import asked, completion

TASKS = ("digits", "words", "digits")


@dataclasses.dataclass(frozen=True)
class Result:
    """What one method does with the documents.

    Attributes:
        method: Its name.
        prefix: Share of right answers where the prompt ends with question and first words.
        late: The same where the question comes to a context that was read without it.
        kv_share: Bytes of those contexts, over full attention's.
        read_seconds: Of reading the documents once, compilation aside.
        loss: Of the documents' last quarter, in nats per token: what the prompt's own queries lose.
    """

    method: str
    prefix: float
    late: float
    kv_share: float
    read_seconds: float
    loss: float


def documents(seed: int, num_bytes: int, count: int, split: str) -> list[recall.Document]:
    """Real text with facts hidden in it, and questions about them; any model that reads English can be asked."""
    return [recall.build_document(np.random.default_rng((seed, i)), num_bytes, TASKS, split) for i in range(count)]


def calibrate(
    lm: tca_jax.LM, num_bytes: int, window: int, block_size: int, kept: float | None, seed: int
) -> tca_jax.Profile:
    """A profile from a text of the same kind as those that are asked about, and other questions."""
    config = tca_jax.TCAConfig(window=window, block_size=block_size)
    texts = documents(seed, num_bytes, 1, "train")
    pairs = [[(asked(q) + q.lead, f"{q.answer}.") for q in document.questions] for document in texts]
    return tca_jax.calibrate(lm, [document.text for document in texts], config, probes=pairs, kept=kept)


def measure(lm: tca_jax.LM, texts: list[recall.Document], room: int) -> Result:
    """Asks every question under both protocols, greedily. An answer is right if it begins with what was hidden."""
    prefix = late = total = 0
    held = full = 0
    seconds, losses = 0.0, []
    for document in texts:
        questions = document.questions
        whole = tca_jax.generate(lm, [completion(document.text, q) for q in questions], max_new_tokens=room).text
        context = tca_jax.prefill(lm, document.text)
        after = tca_jax.generate(lm, [asked(q) + q.lead for q in questions], context=context, max_new_tokens=room).text
        for question, answer, late_answer in zip(questions, whole, after, strict=True):
            prefix += answer.strip().startswith(question.answer)
            late += late_answer.strip().startswith(question.answer)
        total += len(questions)
        stats = context.stats
        held, full, seconds = (
            held + stats.kv_cache_bytes,
            full + stats.full_kv_cache_bytes,
            seconds + stats.prefill_seconds,
        )
        (logprobs,) = tca_jax.score(lm, document.text).logprobs
        losses.append(-logprobs[-len(logprobs) // 4 :].mean())
    return Result(lm.method.name, prefix / total, late / total, held / full, seconds, float(np.mean(losses)))


def table(results: list[Result]) -> str:
    heading = f"{'method':<22}{'prefix':>8}{'late':>8}{'KV bytes':>10}{'s to read':>11}{'loss':>8}"
    lines = [
        f"{r.method:<22}{r.prefix:>8.0%}{r.late:>8.0%}{r.kv_share:>10.1%}{r.read_seconds:>11.2f}{r.loss:>8.3f}"
        for r in results
    ]
    return "\n".join([heading, *lines])


def compared(
    full: tca_jax.LM, profile: tca_jax.Profile, names: list[str], window: int, block_size: int
) -> list[tca_jax.LM]:
    """The model under each method: "full", "tca" with the profile, and others at the same window."""
    models = []
    for name in names:
        if name == "full":
            models.append(full)
        elif name == "tca":
            models.append(full.with_profile(profile))
        else:
            geometry = {"window": window, "block_size": block_size}
            options = geometry if "+" not in name else {p: geometry for p in name.split("+") if p != "full"}
            models.append(full.with_method(name, **options))
    return models


def main(options: argparse.Namespace) -> None:
    start = time.perf_counter()
    try:
        lm = tca_jax.load(options.model)
        if options.profile is not None:
            profile = tca_jax.Profile.load(options.profile)
        else:
            profile = calibrate(lm, options.bytes, options.window, options.block_size, options.kept, options.seed)
            profile.save(options.out / "profile")
        models = compared(lm, profile, options.methods.split(","), options.window, options.block_size)
        texts = documents(options.seed + 1, options.bytes, options.documents, "held-out")
        print(
            f"{lm.name}: profile in {options.profile or options.out / 'profile'}, {time.perf_counter() - start:.0f} s"
        )
        results = []
        for model in models:
            results.append(measure(model, texts, options.room))
            print(table(results) if len(results) == 1 else table(results).splitlines()[-1], flush=True)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"model": lm.name, "bytes": options.bytes, "results": [dataclasses.asdict(r) for r in results]}
    (options.out / "compare_methods.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"{options.out / 'compare_methods.json'} written, {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default="recall-tiny", help="alias, Hub id or folder (default: %(default)s)"
    )
    parser.add_argument("--methods", default="full,tca,streaming", help="by comma (default: %(default)s)")
    parser.add_argument("--profile", type=Path, help="a profile that is there already; none calibrates")
    parser.add_argument("--kept", type=float, help="most of the cache that stays; by default what the probes need")
    parser.add_argument("--bytes", type=int, default=2000, help="of a document (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=1, help="that are asked about (default: %(default)s)")
    parser.add_argument("--window", type=int, default=512, help="of all methods (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=128, help="of all methods (default: %(default)s)")
    parser.add_argument("--room", type=int, default=16, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws the documents (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/compare"), help="folder (default: %(default)s)")
    main(parser.parse_args())
