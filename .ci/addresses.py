"""Writes the addresses of the repository into what PyPI shows: `addresses.py ACCOUNT/REPOSITORY TAG`, from the root.

The project's links in ``pyproject.toml`` get their owner; the documentation is at GitHub Pages. Links and pictures of
``README.md`` that are relative, which PyPI cannot follow, become those of the tag.
"""

import re
import sys
from pathlib import Path

PLACE, PAGES = "OWNER/numpyro_fspace", "OWNER.github.io/numpyro_fspace"


def with_addresses(text: str, repository: str, tag: str) -> str:
    """``text`` of the README with absolute targets."""

    def absolute(match: re.Match) -> str:
        picture, title, target = match.groups()
        title = with_addresses(title, repository, tag)  # a picture that is a link
        if target.startswith(("http://", "https://", "#", "mailto:")):
            return f"{picture}[{title}]({target})"
        host = "https://raw.githubusercontent.com/{}/{}/{}" if picture else "https://github.com/{}/blob/{}/{}"
        return f"{picture}[{title}]({host.format(repository, tag, target)})"

    return re.sub(r"(!?)\[((?:!\[[^\]]*\]\([^)\s]+\)|[^\[\]])*)\]\(([^)\s]+)\)", absolute, text)


def main(repository: str, tag: str):
    project, readme = Path("pyproject.toml"), Path("README.md")
    owner, name = repository.split("/")
    pages = f"{owner.lower()}.github.io/{name}"
    project.write_text(project.read_text().replace(PLACE, repository).replace(PAGES, pages))
    readme.write_text(with_addresses(readme.read_text(), repository, tag).replace(PLACE, repository))


if __name__ == "__main__":
    main(*sys.argv[1:])
