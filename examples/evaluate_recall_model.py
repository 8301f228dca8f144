"""Evaluates recall-tiny: calibrates it, asks the same questions under several methods and writes the model card.

python examples/evaluate_recall_model.py recall-tiny                   # one GPU; --jobs 8: methods side by side
python examples/evaluate_recall_model.py recall-tiny --part probes     # which probes find what, over seeds of texts
python examples/evaluate_recall_model.py recall-tiny --part prefill    # what a sparser prefill costs
python examples/evaluate_recall_model.py smoke --smoke                 # any machine: runs every step
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from recall_card import write_card

import tca_jax
from tca_jax import TCAConfig, methods
from tca_jax.calibration.profile import Profile
from tca_jax.calibration.rows import densest_within, kept_share
from tca_jax.recall import PROTOCOLS, TASKS, Document
from tca_jax.recall.evaluation import Asked, ask, draw_documents
from tca_jax.recall.protocols import asked, chat_answer, chat_document, chat_question

PROBE_KINDS = ("pairs", "copy", "text")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        tokens: Tokens of a prompt, and of a calibration text.
        window: TCA's window at that length.
        questions: Questions of each task under each protocol.
        texts: Calibration texts.
        tau: Attention that a prefill row must retain: a sparser prefill than the default's leaves more for the cache.
        seed: Draws the questions; calibration draws its own texts, from the training split.
    """

    tokens: int = 8192
    window: int = 512
    questions: int = 100
    texts: int = 144
    tau: float = 0.85
    seed: int = 0

    @property
    def config(self) -> TCAConfig:
        """TCA's hyperparameters."""
        return TCAConfig(window=self.window, tau=self.tau)


SMOKE = Plan(tokens=2560, window=128, questions=1, texts=1)


# --- calibration ---


def calibration_documents(plan: Plan, seed: int) -> list[Document]:
    """Documents of the training split, every task's question the first of some."""
    tasks = list(TASKS) * plan.texts
    return [
        draw_documents((plan.seed, 100 + seed, i), 1, plan.tokens, task, "train")[0]
        for i, task in zip(range(plan.texts), tasks, strict=False)
    ]


def calibrate(folder: Path, plan: Plan, config: TCAConfig, *, kind: str = "pairs", seed: int = 0) -> Profile:
    """A profile of the model: from its own texts, with probes of a kind; "pairs" are a question about each document."""
    lm = tca_jax.load(folder)
    texts, pairs = zip(
        *(_text_and_pair(lm, *each) for each in enumerate(calibration_documents(plan, seed))), strict=True
    )
    probes: Any = kind if config.tau_probe else None
    return tca_jax.calibrate(lm, texts, config, probes=pairs if probes == "pairs" else probes)


def _text_and_pair(lm: tca_jax.LM, number: int, document: Document) -> tuple[list[int], list[tuple[list[int], ...]]]:
    """A document and its first question as they are asked: two of three in a chat, the others without one."""
    question = document.questions[0]
    if number % 3 == 2:
        parts = (document.text, asked(question) + question.lead, f"{question.answer}.<|eos|>")
    else:
        parts = (chat_document(document.text), chat_question(question), f"{chat_answer(question, number)}<|eos|>")
    text, *pair = (lm.tokenizer(part, add_special_tokens=i == 0)["input_ids"] for i, part in enumerate(parts))
    return text, [tuple(pair)]


def ranked_share(profile: Profile, tokens: int) -> float:
    """Share of the ranked tokens that a prompt's own queries attend to."""
    ranked = profile.config.num_ranked_blocks(tokens) * profile.config.block_size
    kept = profile.prefill_kept_share(tokens).mean() * tokens - (tokens - ranked)
    return float(kept / ranked)


# --- methods ---


def method_table(folder: Path, plan: Plan) -> dict[str, Callable[[], methods.Method]]:
    """Every method of the ablation by its name in the table."""
    profile = Profile.load(folder / "profile")
    config, narrow = profile.config, profile.prefill_candidates
    bare = dataclasses.replace(config, reserve=0)

    def within(kept: float) -> np.ndarray:
        return densest_within(kept, plan.tokens, profile.probe_scores, narrow, config)

    quarter = within(0.25)
    share = kept_share(config, plan.tokens, quarter, narrow).mean()
    shares = [Profile.uniform(config, *quarter.shape, row).kept_share(plan.tokens).mean() for row in range(15)]
    uniform = int(np.argmin(np.abs(np.asarray(shares) - share)))
    return {
        "full": lambda: methods.BASELINE,
        "TCA": profile.method,
        "whole heads, 25% kept": lambda: methods.tca(quarter, config, prefill_candidates=narrow),
        "whole heads, 20% kept": lambda: methods.tca(within(0.2), config, prefill_candidates=narrow),
        "whole heads, 25% kept, no reserve": lambda: methods.tca(quarter, bare, prefill_candidates=narrow),
        "whole heads, 25% kept, one row": lambda: methods.tca(quarter, config),
        "no probes": lambda: methods.tca(narrow, config),
        "uniform budgets": lambda: methods.tca(uniform, config),
        "paper()": lambda: Profile.load(folder / "profile-paper").method(),
    }


# --- parts, each a list of jobs that run anywhere and give JSON ---


def draw_tasks(plan: Plan) -> dict[str, list[Document]]:
    """The documents that each task's questions are about, the same for every method."""
    return {task: draw_documents((plan.seed, 2), plan.questions, plan.tokens, task) for task in TASKS}


def ask_tasks(lm: tca_jax.LM, documents: dict[str, list[Document]], protocol: str) -> dict[str, Asked]:
    """Each task's questions under a protocol."""
    return {task: ask(lm, of_task, protocol) for task, of_task in documents.items()}


def right_shares(answers: dict[str, Asked]) -> dict[str, float]:
    """Share of right answers of each task."""
    return {task: float(np.mean(of_task.right)) for task, of_task in answers.items()}


def measure_method(folder: Path, plan: Plan, name: str, protocols: tuple[str, ...] = PROTOCOLS) -> dict[str, Any]:
    """Share of right answers of one method, by protocol and task."""
    start = time.monotonic()
    lm = tca_jax.load(folder).with_method(method_table(folder, plan)[name]())
    result: dict[str, Any] = {"method": name, "questions": plan.questions, "right": {}}
    documents = draw_tasks(plan)
    for protocol in protocols:
        answers = ask_tasks(lm, documents, protocol)
        result["right"][protocol] = right_shares(answers)
        result["kv_cache_share"] = list(answers.values())[-1].kv_cache_share
        share = f"{result['kv_cache_share']:.1%}"
        print(f"{name:>20} {share:>6} {protocol:>8}: {_shares(result['right'][protocol])}", flush=True)
    return {**result, "seconds": round(time.monotonic() - start)}


def _asked_of(plan: Plan, name: str) -> Plan:
    """Half as many questions for what is only there to be compared with."""
    half = max(1, plan.questions // 2)
    return plan if name in ("full", "TCA") else dataclasses.replace(plan, questions=half)


def measure_probes(folder: Path, plan: Plan, kind: str, seed: int) -> dict[str, Any]:
    """Which heads a kind of probe finds from one draw of texts, and what the profile keeps and answers."""
    profile = calibrate(folder, plan, plan.config, kind=kind, seed=seed)
    scores = np.take_along_axis(profile.probe_scores, profile.prefill_candidates[..., None], -1)[..., 0]
    order = np.argsort(scores.ravel(), kind="stable")
    result = {
        "probes": kind,
        "seed": seed,
        "how": dict(profile.probes),
        "kept_share": float(profile.kept_share(plan.tokens).mean()),
        "prefill_kept_share": float(profile.prefill_kept_share(plan.tokens).mean()),
        "worst_heads": [
            {"layer": int(i // scores.shape[1]), "head": int(i % scores.shape[1]), "score": float(scores.ravel()[i])}
            for i in order[:6]
        ],
    }
    if seed == 0:
        lm = tca_jax.load(folder, profile=profile)
        result["right"] = right_shares(ask_tasks(lm, draw_tasks(plan), "late"))
    print(f"{kind:>8} seed {seed}: kept {result['kept_share']:.3f} {result.get('right', '')}", flush=True)
    return result


def measure_prefill(folder: Path, plan: Plan, row: int) -> dict[str, Any]:
    """What a sparser prefill costs while the cache keeps everything: tracking, and the loss inside the prompt."""
    lm = tca_jax.load(folder)
    config = plan.config
    dense = np.full((lm.config.num_layers, lm.config.num_kv_heads), config.num_candidates, np.int32)
    method = methods.tca(dense, config, prefill_candidates=np.full_like(dense, row))
    documents = draw_documents((plan.seed, 3), plan.questions, plan.tokens, "tracking")
    far = [doc for doc in documents if _least_hop(doc) > plan.window + config.block_size]
    answers = ask(lm.with_method(method), far, "late") if far else None
    texts = [document.text for document in documents[:8]]
    scores = tca_jax.score(lm.with_method(method), texts)
    result = {
        "row": row,
        "prefill_kept_share": float(Profile.uniform(config, *dense.shape, row).kept_share(plan.tokens).mean()),
        "questions": len(far),
        "tracking": None if answers is None else float(np.mean(answers.right)),
        "prompt_loss": float(-np.mean(np.concatenate([np.asarray(row) for row in scores.logprobs]))),
    }
    print(result, flush=True)
    return result


def _least_hop(document: Document) -> int:
    """Bytes between the two facts of a chain that stand closest, of those that follow each other in it."""
    chain = [fact for fact in document.questions[0].facts if fact.key in document.questions[0].sentence]
    places = [document.place(fact) for fact in chain]
    return min(abs(a - b) for a, b in itertools.pairwise(places))


def _shares(right: dict[str, float]) -> str:
    return "  ".join(f"{task} {share:.0%}" for task, share in right.items())


def _prepare_worker(counter: Any, gpus: int) -> None:
    """One of the GPUs for each worker; JAX has been imported here but not started."""
    import os

    with counter.get_lock():
        number, counter.value = counter.value, counter.value + 1
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if gpus > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % gpus)


def run_jobs(jobs: list[tuple[Any, ...]], workers: int, gpus: int) -> list[Any]:
    """Results of `job[0](*job[1:])` for each job, in processes of their own where `workers` > 1."""
    if workers == 1:
        return [job[0](*job[1:]) for job in jobs]
    context = multiprocessing.get_context("spawn")
    counter = context.Value("i", 0)
    with ProcessPoolExecutor(workers, context, _prepare_worker, (counter, gpus)) as pool:
        return [future.result() for future in [pool.submit(*job) for job in jobs]]


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(help="The trained model; its profile and card are written into it.")],
    part: Annotated[str, typer.Option(help="table, short (full and TCA alone), probes or prefill.")] = "table",
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that they share.")] = 1,
    calibration: Annotated[bool, typer.Option(help="Calibrate; without, the folder's profile is used.")] = True,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each task under each protocol.")] = 100,
    smoke: Annotated[bool, typer.Option("--smoke", help="One question each on short text: runs all.")] = False,
) -> None:
    """Calibrate recall-tiny, compare attention methods on its tasks and write the model card."""
    plan = SMOKE if smoke else Plan(questions=questions)
    if part in ("table", "short"):
        if calibration:
            calibrate(folder, plan, plan.config).save(folder / "profile")
            calibrate(folder, plan, TCAConfig.paper(window=plan.window)).save(folder / "profile-paper")
        names = list(method_table(folder, plan)) if part == "table" else ["full", "TCA"]
        profile = Profile.load(folder / "profile")
        results: Any = {
            "plan": dataclasses.asdict(plan),
            "kept_share": float(profile.kept_share(plan.tokens).mean()),
            "prefill_share": ranked_share(profile, plan.tokens),
            "dense_heads": int((profile.candidates == profile.config.num_candidates).sum()),
            "heads": int(profile.candidates.size),
            "methods": run_jobs([(measure_method, folder, _asked_of(plan, name), name) for name in names], jobs, gpus),
        }
    elif part == "probes":
        results = run_jobs([(measure_probes, folder, plan, k, s) for k in PROBE_KINDS for s in range(5)], jobs, gpus)
    elif part == "prefill":
        results = run_jobs([(measure_prefill, folder, plan, row) for row in (0, 2, 4, 7, 10, 14)], jobs, gpus)
    else:
        raise typer.BadParameter(f"part = {part!r}: must be table, short, probes or prefill")
    name = "evaluation" if part in ("table", "short") else part
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    write_card(folder)


if __name__ == "__main__":
    app()
