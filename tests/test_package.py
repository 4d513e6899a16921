"""The package as a whole: what importing it does, its layers, its docstrings and their examples."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import importlib.util
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
    """No device is initialized (so no key or array was made), no JAX setting or warning filter is touched."""
    assert imported["backend"][0] == imported["backend"][1]
    assert imported["config"] and imported["filters"]


# ---- layers ------------------------------------------------------------------------------------------------


def imports_of(path, types_too=True):
    """Top-level names, or dotted names of our own modules, that a file imports, in functions too."""
    found = set()
    tree = ast.parse(path.read_text())
    for block in ast.walk(tree) if not types_too else ():
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            block.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name if name.startswith("numpyro_fspace") else name.split(".")[0] for name in found}


FILES = {path.relative_to(ROOT).as_posix(): imports_of(path) for path in sorted(ROOT.rglob("*.py"))}


def test_the_algorithms_stand_alone():
    """sgmcmc imports neither NumPyro nor the rest of the package, but for what is common to all matrix products."""
    files = {name: found for name, found in FILES.items() if name.startswith("sgmcmc/") or name == "_xla.py"}
    assert len(files) > 1
    for name, found in files.items():
        ours = {
            m
            for m in found
            if m.startswith("numpyro_fspace") and not m.startswith(("numpyro_fspace.sgmcmc", "numpyro_fspace._xla"))
        }
        assert not ours and "numpyro" not in found, name


@pytest.mark.parametrize(
    "module, allowed",
    [
        ("arviz", ("posterior/arviz_export.py", "posterior/stacking.py")),
        ("tinygp", ("priors/", "baselines/", "benchmarks/", "estimators/", "experiments/")),
        ("matplotlib", ("posterior/plot_functions.py", "mcmc/reporting/plot_report.py", "estimators/", "experiments/")),
        ("blackjax", ("sgmcmc/", "benchmarks/", "experiments/")),
        ("torch", ("benchmarks/",)),
        ("equinox", ("model/networks/adapters.py", "experiments/")),
        ("safetensors", ("model/networks/frozen_weights.py",)),
        ("sklearn", ("datasets/", "estimators/", "experiments/")),
        ("pandas", ("estimators/",)),
    ],
)
def test_optional_packages_stay_in_their_place(module, allowed):
    where = [name for name, found in FILES.items() if module in found]
    assert [name for name in where if not name.startswith(allowed)] == []


#: Each package uses itself and those before it; experiments, benchmarks and the command use public names alone.
LAYERS = ("_checks", "_xla", "metrics", "datasets", "sgmcmc", "priors", "model", "posterior", "mcmc", "variational")
LAYERS += ("baselines", "estimators", "experiments", "benchmarks", "__main__")
#: Modules whose names are public: ``fs.measurement.box``.
NAMESPACES = ("model.measurement", "posterior.diagnostics", "sgmcmc.preconditioners", "variational.guides")


def ours(found):
    """Dotted names of our own in a set of imports, without the package's."""
    return {name.removeprefix("numpyro_fspace.") for name in found if name.startswith("numpyro_fspace.")}


def test_imports_point_one_way():
    for name, found in FILES.items():
        layer = name.split("/")[0].removesuffix(".py")
        if layer in LAYERS:
            above = LAYERS[LAYERS.index(layer) + 1 :]
            assert not [m for m in ours(found) if m.split(".")[0] in above], name


def test_modules_import_in_no_circle():
    modules = {"numpyro_fspace." + n.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for n in FILES}
    graph = {}
    for name in FILES:
        module = "numpyro_fspace." + name.removesuffix(".py").replace("/", ".")
        if not name.endswith("__init__.py"):
            graph[module] = (imports_of(ROOT / name, types_too=False) & modules) - {module}
    done: set[str] = set()

    def visit(module, path):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_experiments_and_benchmarks_use_public_names():
    packages = {layer for layer in LAYERS[:11] if not layer.startswith("_")}
    for name, found in FILES.items():
        if name.startswith(("experiments/", "benchmarks/")):
            for dotted in ours(found):
                package, _, rest = dotted.partition(".")
                if package in packages - {"datasets", "baselines"} and rest:
                    is_public = rest in importlib.import_module(f"numpyro_fspace.{package}").__all__
                    assert is_public or dotted.startswith(NAMESPACES), f"{name} imports {dotted}"


def test_modules_are_short():
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in FILES}
    assert {name: length for name, length in lengths.items() if length > 300} == {}


def test_the_root_is_a_short_list():
    assert len([p for p in ROOT.iterdir() if p.name != "__pycache__"]) <= 17
    assert len([n for n in fs.__all__ if not inspect.ismodule(getattr(fs, n))]) <= 30


@pytest.mark.parametrize("name", fs._MOVED)
def test_names_of_the_last_version_still_work_and_warn(name):
    with pytest.warns(DeprecationWarning, match=f"fs.{name} is now"):
        value = getattr(fs, name)
    assert value.__name__.split(".")[-1] == fs._MOVED[name].split(".")[-1]


@pytest.mark.parametrize(
    "call",
    [
        lambda: fs.datasets.load_diabetes(standardise=True),
        lambda: fs.baselines.ensemble(None, None, optimiser=None),
        lambda: fs.baselines.laplace(None, None, optimiser=None),
        lambda: fs.FVIMC(None, optimiser=None),
        lambda: fs.variational.linearize(None, centre={}),
    ],
)
def test_arguments_of_the_last_version_still_work_and_warn(call):
    with pytest.warns(DeprecationWarning, match="is now"), contextlib.suppress(Exception):
        call()  # the model is none


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


def test_the_mutation_run_names_files_that_exist():
    top = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location("mutate", top / ".ci" / "mutate.py")
    mutate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutate)
    names = {name for tests in mutate.TESTS.values() for name in tests.split()}
    assert [key for key in mutate.TESTS if not (ROOT / key).exists()] == []
    assert [name for name in names if not (top / "tests" / f"{name}.py").exists()] == []
    assert mutate.tests_of(mutate.PACKAGE / "model/potential.py") == mutate.TESTS["model/potential.py"].split()


# ---- examples ------------------------------------------------------------------------------------------------

EXAMPLE_LINE = re.compile(r"^ *((?:>>>|\.\.\.)(?: .*)?)$", flags=re.M)


def test_examples_fit_a_page():
    """The pages show 88 columns of code, prompts included, without a scroll bar."""
    lines = [f"{name}: {line}" for name in FILES for line in EXAMPLE_LINE.findall((ROOT / name).read_text())]
    assert len(lines) > 400
    assert [line for line in lines if len(line.partition(": ")[2]) > 88] == []


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
