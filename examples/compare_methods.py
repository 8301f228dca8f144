"""Calibrate a checkpoint, then compare attention methods on it: right answers, KV bytes, seconds, loss.

python examples/compare_methods.py                                    # the shipped model, about a minute on two cores
python examples/compare_methods.py my/checkpoint --bytes 200000 --window 4096 --kept 0.3 --out out/mine
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import tca_jax
from tca_jax.lab import recall
from tca_jax.lab.recall.protocols import asked, completion

TASKS = ("digits", "words", "digits")


def documents(seed: int, num_bytes: int, count: int, split: str) -> list[recall.Document]:
    """Real text with facts hidden in it, and questions about them, for any model that reads English."""
    return [recall.build_document(np.random.default_rng((seed, i)), num_bytes, TASKS, split) for i in range(count)]


def calibrate(lm: tca_jax.LM, options: argparse.Namespace) -> tca_jax.Profile:
    """A profile from a text of the same kind, and other questions."""
    config = tca_jax.TCAConfig(window=options.window, block_size=options.block_size)
    (text,) = documents(options.seed, options.bytes, 1, "train")
    pairs = [(asked(question) + question.lead, f"{question.answer}.") for question in text.questions]
    return tca_jax.calibrate(lm, [text.text], config, probes=[pairs], kept=options.kept)


def measure(lm: tca_jax.LM, texts: list[recall.Document], room: int) -> dict[str, Any]:
    """Greedy answers to questions in the prompt and to late ones, costs of the contexts, loss of the last quarter."""
    prefix, late, contexts, losses = [], [], [], []
    for document in texts:
        questions = document.questions
        prompts, rest = [completion(document.text, q) for q in questions], [asked(q) + q.lead for q in questions]
        contexts.append(tca_jax.prefill(lm, document.text))
        for right, out in (
            (prefix, tca_jax.generate(lm, prompts, max_new_tokens=room)),
            (late, tca_jax.generate(lm, rest, context=contexts[-1], max_new_tokens=room)),
        ):
            right += [text.strip().startswith(q.answer) for q, text in zip(questions, out.text, strict=True)]
        (logprobs,) = tca_jax.score(lm, document.text).logprobs
        losses.append(-logprobs[-len(logprobs) // 4 :].mean())
    stats = [context.stats for context in contexts]
    return {
        "method": lm.method.name,
        "prefix": float(np.mean(prefix)),
        "late": float(np.mean(late)),
        "kv_share": sum(each.kv_cache_bytes for each in stats) / sum(each.full_kv_cache_bytes for each in stats),
        "read_seconds": sum(each.prefill_seconds for each in stats),
        "loss": float(np.mean(losses)),
    }


def under(lm: tca_jax.LM, name: str, profile: tca_jax.Profile, window: int, block_size: int) -> tca_jax.LM:
    """The model under a method: "full", "tca" with the profile, or another one at the same window."""
    if name in ("full", "tca"):
        return lm.with_profile(profile if name == "tca" else None)
    geometry = {"window": window, "block_size": block_size}
    parts = [part for part in name.split("+") if part != "full"]
    return lm.with_method(name, **(dict.fromkeys(parts, geometry) if "+" in name else geometry))


def main(options: argparse.Namespace) -> None:
    try:
        lm = tca_jax.load(options.model)
        profile = tca_jax.Profile.load(options.profile) if options.profile else calibrate(lm, options)
        models = [under(lm, n, profile, options.window, options.block_size) for n in options.methods.split(",")]
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    options.out.mkdir(parents=True, exist_ok=True)
    profile.save(options.out / "profile")
    texts = documents(options.seed + 1, options.bytes, options.documents, "held-out")
    print(f"{'method':<22}{'prefix':>8}{'late':>8}{'KV bytes':>10}{'s to read':>11}{'loss':>8}")
    results = []
    for model in models:
        r = measure(model, texts, options.room)
        costs = f"{r['kv_share']:>10.1%}{r['read_seconds']:>11.2f}{r['loss']:>8.3f}"
        print(f"{r['method']:<22}{r['prefix']:>8.0%}{r['late']:>8.0%}{costs}", flush=True)
        results.append(r)
    record = {"model": lm.name, "bytes": options.bytes, "results": results}
    (options.out / "compare_methods.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="recall-tiny", help="alias, Hub id or folder")
    parser.add_argument("--methods", default="full,tca,streaming", help="by comma (default: %(default)s)")
    parser.add_argument("--profile", type=Path, help="a profile; without one the model is calibrated")
    parser.add_argument("--kept", type=float, help="most of the cache that is kept; by default what the probes need")
    parser.add_argument("--bytes", type=int, default=2000, help="of a document (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=1, help="with questions (default: %(default)s)")
    parser.add_argument("--window", type=int, default=512, help="of all methods (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=128, help="of all methods (default: %(default)s)")
    parser.add_argument("--room", type=int, default=16, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the documents (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/compare"), help="folder (default: %(default)s)")
    main(parser.parse_args())
