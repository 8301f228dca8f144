"""Takes what pages link to outside docs/ into the site: results of benchmarks, the model card, examples, the changelog.

A page's link to `../lab/results/README.md` is one to `lab/results/README.md` there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
#: Files beside docs/ that are part of the site, by patterns.
BESIDE = ("lab/results/*", "examples/*.py", "tca_jax/checkpoints/recall-tiny/*.md", "CHANGELOG.md")


def on_files(files: Any, config: Any) -> Any:
    """Adds the files beside docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    for pattern in BESIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            place = (str(ROOT), config["site_dir"], config["use_directory_urls"])
            files.append(File(name, *place, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between docs/ and what lies beside it as they are in the site, where both have one root."""
    place = Path(page.file.src_uri)
    folder = (DOCS / place if (DOCS / place).exists() else ROOT / place).parent

    def in_site(link: re.Match[str]) -> str:
        path, *anchor = link[1].partition("#")
        target = (folder / path).resolve()
        if not path or not target.exists():
            return link[0]
        moved = os.path.relpath(target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT), place.parent)
        return f"]({moved}{''.join(anchor)})"

    return re.sub(r"\]\(([^)\s]+)\)", in_site, markdown)
