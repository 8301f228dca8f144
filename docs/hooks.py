"""Takes what pages link to outside docs/ into the site: results of benchmarks, the model card, examples, the changelog.

A page's link to `../benchmarks/results/README.md` is one to `benchmarks/results/README.md` there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent.parent
#: Files beside docs/ that are part of the site, by patterns.
BESIDE = ("benchmarks/results/*", "examples/*.py", "tca_jax/checkpoints/recall-tiny/*.md", "CHANGELOG.md")
_OUTWARD = re.compile(r"\]\((?:\.\./)+(?=benchmarks/|examples/|tca_jax/|CHANGELOG)")
_INWARD = re.compile(r"\]\((?:\.\./)*docs/")


def on_files(files: Any, config: Any) -> Any:
    """Adds the files beside docs/."""
    for pattern in BESIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            place = (str(ROOT), config["site_dir"], config["use_directory_urls"])
            files.append(File(name, *place, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links across the border of docs/ as they are in the site, where there is none."""
    up = "../" * page.file.src_uri.count("/")
    if up and not page.file.src_uri.startswith("api/"):  # a file from beside docs/
        return _INWARD.sub(f"]({up}", markdown)
    return _OUTWARD.sub(f"]({up}", markdown)
