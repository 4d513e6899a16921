"""Fails where a built package lacks a file: `packages.py DIST.whl DIST.tar.gz`, from the repository's root."""

import sys
import tarfile
import zipfile
from pathlib import Path


def files(*folders: str) -> set[str]:
    return {path.as_posix() for folder in folders for path in Path(folder).rglob("*.*") if path.suffix != ".pyc"}


code = files("numpyro_fspace") | {"numpyro_fspace/py.typed"}
source = code | files("tests", "notebooks") | {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"}

for path in map(Path, sys.argv[1:]):
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            missing = code - set(wheel.namelist())
    else:
        with tarfile.open(path) as sdist:
            missing = source - {name.partition("/")[2] for name in sdist.getnames()}
    if missing:
        sys.exit(f"{path.name} lacks {sorted(missing)}")
    print(f"{path.name} is complete")
