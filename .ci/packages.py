"""Fails where a built package lacks a file: `packages.py DIST.whl DIST.tar.gz`, from the repository's root.

With `--release v1.2.3` also where it is not ready to be published: another version, or addresses without an owner.
"""

import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path


def files(*folders: str) -> set[str]:
    return {path.as_posix() for folder in folders for path in Path(folder).rglob("*.*") if path.suffix != ".pyc"}


def check(path: Path) -> str:
    """The metadata of a package that has all files."""
    code = files("numpyro_fspace") | {"numpyro_fspace/py.typed"}
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = set(wheel.namelist())
            text = wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
        missing = code - names
    else:
        top = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", ".ci/run"}
        with tarfile.open(path) as sdist:
            by_name = {name.partition("/")[2]: name for name in sdist.getnames()}
            text = sdist.extractfile(by_name["PKG-INFO"]).read().decode()
        missing = (code | files("tests", "notebooks") | top) - set(by_name)
    if missing:
        sys.exit(f"{path.name} lacks {sorted(missing)}")
    return text


def trouble_of(metadata: str, tag: str) -> str | None:
    """Why a package with this metadata cannot be published under a tag; None if it can."""
    fields = message_from_string(metadata)
    if tag != f"v{fields['Version']}":
        return f"the tag is {tag} and the version {fields['Version']}"
    if "OWNER" in "".join(fields.get_all("Project-URL", ["OWNER"])):
        return "[project.urls] of pyproject.toml name no owner"
    return None


def main(arguments: list[str]):
    tag = arguments[1] if arguments[:1] == ["--release"] else None
    for path in map(Path, arguments if tag is None else arguments[2:]):
        trouble = None if tag is None else trouble_of(check(path), tag)
        if trouble is not None:
            sys.exit(f"{path.name} cannot be published: {trouble}")
        check(path)
        print(f"{path.name} is complete")


if __name__ == "__main__":
    main(sys.argv[1:])
