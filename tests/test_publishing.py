"""What PyPI and GitHub are given: metadata, extras, workflows, addresses."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import numpyro_fspace as fs

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def script(name):
    """A module of .ci."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- extras --------------------------------------------------------------------------------------------------------


def without(monkeypatch, *names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def posterior():
    def model(y=None):
        w = fs.model.random_module("f", (lambda key, shape: {"w": jnp.ones(1)}, lambda w, x: x * w["w"]), input_shape=1)
        w(jnp.ones((1, 1)))

    return fs.Posterior(model, {"f.w": np.ones((2, 1))})


@pytest.mark.parametrize(
    "missing, call, extra",
    [
        ("arviz", lambda: fs.to_arviz(posterior()), "arviz"),
        ("matplotlib.pyplot", lambda: fs.plot_functions(np.arange(3.0), np.zeros((2, 3))), "plots"),
        ("sklearn", fs.datasets.load_diabetes, "examples"),
    ],
)
def test_what_needs_an_extra_names_it(monkeypatch, missing, call, extra):
    without(monkeypatch, missing)
    with pytest.raises(ImportError, match=rf'pip install "numpyro_fspace\[{extra}\]"'):
        call()
    assert extra in PROJECT["optional-dependencies"]


@pytest.mark.parametrize("sampler", [fs.sgmcmc.sgld, fs.sgmcmc.sghmc])
def test_so_does_the_bridge_to_blackjax(monkeypatch, sampler):
    without(monkeypatch, "blackjax.base", "blackjax")
    with pytest.raises(ImportError, match="pip install blackjax"):
        sampler.as_top_level_api(lambda w, key: jnp.sum(w**2), 0.1)


def test_the_package_alone_asks_for_little():
    names = {re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names == {
        "jax",
        "jaxlib",
        "numpy",
        "scipy",
        "numpyro",
        "tinygp",
        "optax",
        "tqdm",
        "threadpoolctl",
        "flax",
    }


# ---- metadata and workflows ----------------------------------------------------------------------------------------


def test_classifiers_and_the_matrix_name_the_same_pythons():
    named = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)}
    assert set(WORKFLOWS["tests"]["jobs"]["tests"]["strategy"]["matrix"]["python"]) == named
    assert min(named) == PROJECT["requires-python"].removeprefix(">=")


def test_only_the_last_step_of_a_release_may_publish():
    """By trusted publishing: a job in the environment that PyPI knows, with a token of its own and no secret."""
    release = WORKFLOWS["release"]
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads "on" as true
    assert release["permissions"] == {"contents": "read"}
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"]["name"] == "pypi"
    assert publish["needs"] == "build" and "secrets" not in (ROOT / ".github/workflows/release.yml").read_text()


@pytest.mark.parametrize("name", WORKFLOWS)
def test_files_that_workflows_run_exist(name):
    steps = [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]
    scripts = re.findall(r"python (\.ci/\w+\.py)", " ".join(step.get("run", "") for step in steps))
    extras = {e for step in steps for e in re.findall(r"\.\[([\w,]+)\]", step.get("run", ""))}
    assert all((ROOT / path).exists() for path in scripts)
    assert {e for group in extras for e in group.split(",")} <= set(PROJECT["optional-dependencies"])


def test_forms_for_issues_are_yaml():
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) >= 2
    for path in forms:
        if path.stem != "config":
            form = yaml.safe_load(path.read_text())
            assert {"name", "description", "body"} <= set(form)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {"ruff", "ruff-format", "mypy"} <= {hook["id"] for repo in hooks["repos"] for hook in repo["hooks"]}


# ---- releases ------------------------------------------------------------------------------------------------------

METADATA = "Metadata-Version: 2.4\nName: numpyro_fspace\nVersion: 1.2.3\nProject-URL: Source, https://github.com/{}/n\n"


def test_a_package_that_is_not_ready_is_not_published():
    trouble_of = script("packages").trouble_of
    assert trouble_of(METADATA.format("someone"), "v1.2.3") is None
    assert "the tag is v1.2.4 and the version 1.2.3" in trouble_of(METADATA.format("someone"), "v1.2.4")
    assert "name no owner" in trouble_of(METADATA.format("OWNER"), "v1.2.3")
    assert "name no owner" in trouble_of("Version: 1.2.3\n", "v1.2.3")


def test_addresses_of_a_release(tmp_path, monkeypatch):
    """No link of the README stays relative, and no address without an owner."""
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.chdir(tmp_path)
    script("addresses").main("someone/else", "v1.2.3")
    readme, project = Path("README.md").read_text(), Path("pyproject.toml").read_text()
    assert "https://raw.githubusercontent.com/someone/else/v1.2.3/docs/with_and_without.png" in readme
    assert "](https://github.com/someone/else/blob/v1.2.3/docs/index.md)" in readme
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", readme, flags=re.M | re.S)
    assert [t for t in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in t] == []
    assert "OWNER/" not in readme + project
    urls = tomllib.loads(project)["project"]["urls"]
    assert {"Source", "Documentation", "Changelog", "Issues"} <= set(urls)
    assert urls.pop("Documentation") == "https://someone.github.io/else"
    assert all(url.startswith("https://github.com/someone/else") for url in urls.values())


def test_addresses_leave_other_links_alone():
    text = "[a](https://x/y) [b](#c) [d](docs/e.md#f)"
    found = script("addresses").with_addresses(text, "o/r", "v1")
    assert found == "[a](https://x/y) [b](#c) [d](https://github.com/o/r/blob/v1/docs/e.md#f)"


def test_addresses_of_a_picture_that_is_a_link():
    found = script("addresses").with_addresses("[![a](p.png)](b.md) [![c](https://x/c)](LICENSE)", "o/r", "v1")
    picture = "![a](https://raw.githubusercontent.com/o/r/v1/p.png)"
    badge = "[![c](https://x/c)](https://github.com/o/r/blob/v1/LICENSE)"
    assert found == f"[{picture}](https://github.com/o/r/blob/v1/b.md) {badge}"


def test_the_citation_is_of_this_package():
    readme = (ROOT / "README.md").read_text()
    assert "@software{numpyro_fspace," in readme and "@article{wu2024functional," in readme
