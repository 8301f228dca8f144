"""`tca-jax eval --suite`: what a suite fixes of the command's options, and what may be said otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tca_jax.errors import UserError

if TYPE_CHECKING:
    from tca_jax.engine.prompts import Encoder
    from tca_jax.lab.evaluation import Builder, MethodSpec, Plan, Sources
    from tca_jax.lab.evaluation.suites import Part, Suite

_DATA = Path("out/data")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A suite as it is asked for.

    Attributes:
        suite: The suite.
        data: Folder of public files.
        methods: The suite's methods, or those that the user named.
        lengths: The suite's lengths or the user's, as the command takes them.
        samples: The suite's number of samples or the user's.
        out: Folder of the results.
    """

    suite: Suite
    data: Path
    methods: str
    lengths: str
    samples: int
    out: Path

    def settings(self, lm: Encoder, lengths: Sequence[int], seed: int) -> dict[str, Any]:
        """What the folder of results is of."""
        from tca_jax.lab.evaluation.suites import suite_settings

        return suite_settings(self.suite, lm, lengths=lengths, samples=self.samples, seed=seed)

    def plan(
        self,
        lm: Encoder,
        methods: tuple[MethodSpec, ...],
        sources: Sources,
        lengths: Sequence[int],
        *,
        seed: int,
        batch: int,
    ) -> dict[Part, Plan]:
        """The plans of its parts; fetches files that are not there.

        Raises:
            ValueError: the folder of results is of something else, a file cannot be had, or a task cannot be run.
        """
        from tca_jax.lab.evaluation import longbench
        from tca_jax.lab.evaluation.data_files import find_sources
        from tca_jax.lab.evaluation.plan import require_lengths
        from tca_jax.lab.evaluation.suites import plan_suite, require_same_settings

        require_lengths(lm, lengths)
        require_same_settings(self.out, self.suite, self.settings(lm, lengths, seed))
        if "longbench" in self.suite.needs:
            longbench.require_libraries()
        found = find_sources(self.data, self.suite.needs, sources, lengths)
        return plan_suite(self.suite, lm, methods, found, lengths=lengths, samples=self.samples, seed=seed, batch=batch)

    def run(
        self, plans: Mapping[Part, Plan], builder: Builder, lengths: Sequence[int], *, seed: int
    ) -> list[dict[str, Any]]:
        """Runs the suite; all records, each with its "part"."""
        from tca_jax.lab.evaluation.suite_run import run_suite

        records = run_suite(self.suite, plans, builder, self.out, self.settings(builder.lm, lengths, seed))
        return [{"part": part, **record} for part, of_part in records.items() for record in of_part]


def asked_suite(
    name: str | None, data: Path | None, given: Mapping[str, Any], fixed: Mapping[str, Any]
) -> Asked | None:
    """The suite that the options ask for; None where they name none.

    Args:
        name: `--suite`.
        data: `--data`.
        given: The options methods, lengths, samples and out; None for those that the user left out.
        fixed: Options that make a suite what it is, likewise.

    Raises:
        ValueError: there is no such suite, or it fixes an option that the user gave.
    """
    from tca_jax.lab.evaluation.suites import get_suite

    if name is None:
        if data is not None:
            raise UserError(f"--data {data}: holds the files of a suite: name one with --suite")
        return None
    suite = get_suite(name)
    for option, value in fixed.items():
        if value is not None:
            raise UserError(
                f"--{option.replace('_', '-')} is fixed by --suite {name}: leave it out, or leave out --suite"
            )
    lengths = ",".join(map(str, suite.lengths))
    own = {"methods": suite.methods, "lengths": lengths, "samples": suite.samples, "out": Path("out") / name}
    values: dict[str, Any] = {option: own[option] if value is None else value for option, value in given.items()}
    return Asked(suite, data or _DATA, **values)
