"""The package as a whole: what importing it does, its layers, its docstrings and their examples."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
import warnings
from importlib import metadata
from pathlib import Path

import pytest

import numpyro_fspace as fs

ROOT = Path(fs.__file__).parent
MODULES = sorted(
    m.name for m in pkgutil.walk_packages([str(ROOT)], "numpyro_fspace.") if not m.name.endswith("__main__")
)

PROBE = """
import json, sys, warnings
import numpyro
before = set(sys.modules)
from jax._src import xla_bridge
import jax
config = dict(jax.config.values)
filters = list(warnings.filters)
backend = xla_bridge.backends_are_initialized()
import numpyro_fspace
report = dict(
    new=sorted(set(m.split(".")[0] for m in set(sys.modules) - before)),
    backend=[backend, xla_bridge.backends_are_initialized()],
    config=config == dict(jax.config.values),
    filters=filters == list(warnings.filters),
)
print(json.dumps(report))
"""


def subprocess_json(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def imported():
    return subprocess_json(PROBE)


# ---- importing ---------------------------------------------------------------------------------------------


def test_import_costs_nothing_beyond_numpyro(imported):
    """No third-party package is loaded that numpyro had not loaded: the import takes numpyro's time and a little."""
    third_party = [m for m in imported["new"] if m not in sys.stdlib_module_names and not m.startswith("numpyro")]
    assert third_party == []


def test_import_changes_nothing(imported):
    """No device is initialised (so no key or array was made), no JAX setting or warning filter is touched."""
    assert imported["backend"][0] == imported["backend"][1]
    assert imported["config"] and imported["filters"]


# ---- layers ------------------------------------------------------------------------------------------------


def imports_of(path):
    """Top-level names, or dotted names of our own modules, imported anywhere in a file (also in functions)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name if name.startswith("numpyro_fspace") else name.split(".")[0] for name in found}


FILES = {path.relative_to(ROOT).as_posix(): imports_of(path) for path in sorted(ROOT.rglob("*.py"))}


def test_the_algorithms_stand_alone():
    """sgmcmc imports neither NumPyro nor the rest of the package."""
    files = {name: found for name, found in FILES.items() if name.startswith("sgmcmc/")}
    assert files
    for name, found in files.items():
        ours = {m for m in found if m.startswith("numpyro_fspace") and not m.startswith("numpyro_fspace.sgmcmc")}
        assert not ours and "numpyro" not in found, name


@pytest.mark.parametrize(
    "module, allowed",
    [
        ("arviz", ("inference_data.py",)),
        ("tinygp", ("priors/", "baselines/", "benchmarks/", "experiments/", "cli.py")),
        ("matplotlib", ("plots.py", "experiments/", "cli.py")),
        ("blackjax", ("sgmcmc/", "benchmarks/", "experiments/")),
        ("torch", ("benchmarks/",)),
        ("equinox", ("network_kinds.py", "experiments/")),
        ("sklearn", ("datasets/", "experiments/")),
    ],
)
def test_optional_packages_stay_in_their_place(module, allowed):
    where = [name for name, found in FILES.items() if module in found]
    assert [name for name in where if not name.startswith(allowed)] == []


def test_experiments_and_benchmarks_are_on_top():
    for name, found in FILES.items():
        if not name.startswith(("experiments/", "benchmarks/", "cli", "__main__")):
            above = tuple(f"numpyro_fspace.{part}" for part in ("experiments", "benchmarks", "cli"))
            assert not any(m.startswith(above) for m in found), name


# ---- the public surface --------------------------------------------------------------------------------------


def public_objects():
    for name in fs.__all__:
        value = getattr(fs, name)
        yield f"fs.{name}", value
        if inspect.ismodule(value):
            for inner in getattr(value, "__all__", []):
                if callable(getattr(value, inner)):
                    yield f"fs.{name}.{inner}", getattr(value, inner)


def test_all_is_sorted_out():
    assert len(set(fs.__all__)) == len(fs.__all__)
    assert fs.__version__.count(".") == 2


@pytest.mark.parametrize("name, value", list(public_objects()), ids=[name for name, _ in public_objects()])
def test_public_names_have_docstrings(name, value):
    doc = inspect.getdoc(value)
    assert doc
    if inspect.isclass(value):
        assert value.__doc__ != (value.__base__.__doc__ if value.__base__ else None)
        missing = [
            method
            for method, fn in vars(value).items()
            if inspect.isfunction(fn) and not method.startswith("_") and not inspect.getdoc(getattr(value, method))
        ]
        assert [m for m in missing if m not in PROTOCOL] == []


#: Methods whose meaning is fixed by NumPyro's kernels and distributions.
PROTOCOL = ("model", "init", "sample", "log_prob", "postprocess_fn", "get_constrain_fn", "refresh", "wrap_model")
PROTOCOL += ("get_diagnostics_str", "mean_function", "covariance_function", "run")


# ---- the distribution ----------------------------------------------------------------------------------------


def test_types_are_shipped():
    """Without the marker a type checker ignores every annotation of the package."""
    assert (ROOT / "py.typed").is_file()


def test_version_is_that_of_the_distribution():
    try:
        installed = metadata.version("numpyro_fspace")
    except metadata.PackageNotFoundError:
        pytest.skip("numpyro_fspace is imported from a folder, not installed")
    assert fs.__version__ == installed


def test_extras_that_are_named_exist():
    """pip only warns of an extra that does not exist, and installs the rest."""
    top = Path(__file__).parents[1]
    extras = set(tomllib.loads((top / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    texts = [top / "README.md", *(top / "docs").glob("*.md"), *ROOT.rglob("*.py")]
    named = [re.findall(r"(?:[\"' ]\.|numpyro_fspace)\[([a-z,]+)\]", path.read_text()) for path in texts]
    found = {extra for names in named for name in names for extra in name.split(",")}
    assert {"examples", "test", "docs"} <= found <= extras


# ---- examples ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["numpyro_fspace", *MODULES])
def test_examples(name):
    """Every docstring's example runs and gives what it says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # examples run short chains, which may say so
        result = doctest.testmod(
            importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
        )
    assert result.failed == 0, f"{result.failed} examples of {name} failed"
