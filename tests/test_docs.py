"""The guides: code that runs as printed, links that lead somewhere."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
#: Numbers of draws and updates, made small: what is checked is that the calls exist and go together.
LONG = re.compile(r"(num_warmup|num_samples|num_updates)=\d+|(?<=jax\.random\.key\(0\), )2000(?=, x)")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["migrating.md"])
def test_code_of_a_guide_runs(page):
    """All Python blocks of a page, one after another in one namespace."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), flags=re.M | re.S)
    assert blocks
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # chains this short may run hot, and say so
        for block in blocks:
            short = LONG.sub(lambda match: f"{match[1]}=10" if match[1] else "10", block)
            exec(compile(short, page, "exec"), names)
    assert names["f"].shape == (10, 201)
    assert bool(jax.numpy.isfinite(names["state"].position["params"]["layers_0"]["kernel"]).all())


BUILT = ROOT / "docs" / "notebooks"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def links(text):
    """Targets of the links and pictures outside code, without those to the web."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]


def headings(path):
    """Anchors of a page: its headings in lower case, words joined by hyphens."""
    found = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in links(page.read_text()):
        name, _, anchor = target.partition("#")
        path = (page.parent / name if name else page).resolve()
        if path.is_relative_to(BUILT):  # pages and pictures that the build makes of the notebooks
            stem = path.relative_to(BUILT).parts[0].removesuffix(".md").removesuffix("_files")
            path = ROOT / "notebooks" / f"{stem}.ipynb"
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in headings(path), f"{page.name} links to {target}: no such heading"


def test_links_finds_links():
    assert links("[a](b.md) ![c](d.png) `[x](y)` [web](https://z)\n```\n[e](f)\n```\n") == ["b.md", "d.png"]
