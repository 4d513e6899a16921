"""The guides: code that runs as printed, links that lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import numpyro
import pytest
from PIL import Image
from scipy.stats import multivariate_normal
from tinygp import kernels

import numpyro_fspace as fs
from numpyro_fspace.experiments import catalog

ROOT = Path(__file__).parent.parent
#: Numbers of draws, updates and rows, made small: what is checked is that the calls exist and go together.
LONG = re.compile(
    r"""((num_warmup|num_samples|num_updates|num_steps|checkpoint_every)(=|": )|subsample_size=(?=100\)))\d+"""
    r"|(?<=jax\.random\.key\(0\), )2000(?=, x)|(?<=f\.reshape\(4, )1000"
)
SHORT_STAGES = "num_stages=3, num_updates=10, num_warmup=10, num_samples=10, num_transform_steps=10"


def shortened(block):
    """The block with few draws, small minibatches, and few images as measurement points."""
    block = block.replace("num_stages=5", SHORT_STAGES).replace("images[:100].reshape(100,", "images[:10].reshape(10,")
    return LONG.sub(lambda match: f"{match[1] or ''}10", block)


def is_finite(names, *of):
    """Whether all values of these variables are finite."""
    return all(bool(np.isfinite(leaf).all()) for name in of for leaf in jax.tree.leaves(names[name]))


def check_readme(names):
    assert names["f"].shape == (10, 201, 1) and is_finite(names, "f")
    assert Path("functions.png").stat().st_size > 10_000


def check_getting_started(names):
    assert names["f"].shape == (40, 201) and is_finite(names, "f", "y_new")
    assert names["of_network"].shape == (10, 201) and names["of_process"].shape == (500, 201)
    np.testing.assert_array_equal(names["f_again"].squeeze(-1), names["f"])
    assert all(Path(name).stat().st_size > 10_000 for name in ("prior.png", "posterior.png"))


def check_large_data(names):
    assert names["f"].shape == (10, 44) and is_finite(names, "f", "draws")  # ten draws at the table's test rows
    assert is_finite({"draws": names["on_disk"].get_samples()}, "draws")


def check_saving(names):
    assert names["f"].shape == names["first"].shape == (10, 201, 1) and is_finite(names, "f", "first")
    assert names["inference"].posterior["f"].shape[:2] == (1, 10)
    assert names["joined"].shape == (1, 20, 201, 1)
    assert names["third"].shape == (10, 201, 1) and is_finite(names, "third")


def check_choosing(names):
    assert names["narrow"].shape == names["wide"].shape == names["process"].shape == (5, 101)
    assert np.std(names["wide"]) > 5 * np.std(names["narrow"])  # what the page says of them
    x, labels = names["x"], names["labels"]
    mcmc = fs.MCMC(fs.fSGHMC(names["model"]), num_warmup=10, num_samples=10, progress_bar=False)  # its classifier
    mcmc.run(jax.random.key(0), x, labels)
    probabilities = jax.nn.softmax(fs.predict(mcmc, jax.random.key(1), x)["f"])
    assert probabilities.shape == (10, len(x), 2) and np.isfinite(probabilities).all()
    assert names["f_by_nuts"].shape == (10, 20, 1) and is_finite(names, "f_by_nuts")


def check_partly_bayesian(names):
    """Frozen weights have no draws; restored ones are those that were saved; no factors leave the network as it is."""
    for f in ("f_last", "f_process", "f_torch"):
        assert names[f].shape[1:] == (400, 1) and is_finite(names, f)
    frozen, backbone = (fs.model.weights_by_path(names[k]) for k in ("frozen", "backbone"))
    jax.tree.map(np.testing.assert_array_equal, frozen, backbone)
    jax.tree.map(np.testing.assert_array_equal, names["from_torch"], dict(names["backbone"]))
    draws, targets = names["mcmc"].get_samples(), names["targets"]
    assert set(draws) == {f"f.{path}.{factor}" for path in targets for factor in "AB"}
    assert names["probabilities"].shape == (60, 2) and is_finite(names, "probabilities")
    init, apply = names["low_rank"](names["transformer"], names["pretrained"], targets, 2)
    factors, tokens = init(jax.random.key(0), (6,)), names["tokens"]
    whole = names["transformer"].apply({"params": names["pretrained"]}, tokens)
    np.testing.assert_allclose(apply(factors, tokens), whole, rtol=1e-5, atol=1e-6)
    factors[targets[0]]["B"] += 1.0
    assert not np.allclose(apply(factors, tokens), whole, atol=1e-3)


def check_trust(names):
    assert names["f"].shape == (10, 100, 1) and is_finite(names, "f", "low", "high", "difference")
    assert Path("report.png").stat().st_size > 10_000
    assert np.all(names["low"] < names["high"]) and 0.7 < names["inside"] <= 1.0  # three standard errors of 50 rows
    assert names["difference"].shape == (60,) and names["gain"] > 3 * names["error"]  # of a sine over a line


def check_tables(names):
    assert names["mean"].shape == names["sd"].shape == names["low"].shape == (42,)
    assert names["functions"].shape == (10, 42)
    np.testing.assert_allclose(names["parts"].total, names["sd"] ** 2)
    assert names["probabilities"].shape == (150, 3)


def check_models(names):
    assert names["noise_sd"].shape == names["function_sd"].shape == (50,) and is_finite(
        names, "noise_sd", "function_sd"
    )
    assert np.ptp(names["noise_sd"]) > 0  # the noise depends on the inputs
    assert names["several"].get_samples()["sigma"].shape == (10, 2)
    assert names["probability"].shape == (50, 1) and names["probabilities"].shape == (50, 3)
    np.testing.assert_allclose(names["probabilities"].sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(names["digit_probabilities"].sum(-1), np.ones(497), rtol=1e-5)
    assert names["of_labels"].mean.shape == (50, 3) and is_finite(names, "auc") and 0 <= names["auc"] <= 1
    assert np.all(names["low"] < names["high"])
    assert np.all(names["low_rate"] < names["high_rate"]) and np.all(names["fewest"] <= names["most"])
    with numpyro.handlers.seed(rng_seed=0):
        assert names["one_for_each_input"](2).sample(jax.random.key(0), np.eye(2), (3,)).shape[:2] == (3, 2)
    assert len(names["kept"]) == 80 and names["y_missing"].shape == (10, 20)
    assert names["beyond"].shape == (10, 100) and is_finite(names, "y_missing", "beyond")


def check_variational(names):
    assert names["f"].shape[1:] == (30, 1) and is_finite(names, "f")
    assert names["data"].posterior["f"].shape[-2:] == (30, 1)


def check_migrating(names):
    assert names["f"].shape == names["f_network"].shape == (10, 201) and is_finite(names, "f", "f_network")
    assert is_finite({"weights": names["state"].position["params"]}, "weights")


def check_contributing(names):
    """The examples are what they say: a random walk, N(0, 1) at its leftmost input; a squared difference."""
    x = np.array([[0.3], [-0.5], [1.1]])
    prior, f = names["Smooth"](), np.array([0.2, -0.4, 1.0])
    beyond = x[:, 0] - x.min()
    covariance = 1.0 + np.minimum(beyond[:, None], beyond)
    exact = multivariate_normal(np.zeros(3), covariance).logpdf(f)
    # without the constant of the first value
    np.testing.assert_allclose(prior.log_prob(x, f), exact + 0.5 * np.log(2 * np.pi), rtol=1e-5)
    draws = prior.sample(jax.random.key(0), x, (40_000,))
    np.testing.assert_allclose(np.cov(draws, rowvar=False), covariance, atol=0.06)  # over five standard errors
    process = fs.GPPrior(kernels.ExpSquared(0.5), nugget=1e-9)
    twice = SimpleNamespace(
        mean=lambda x: np.ones((3, 1)), root=lambda x: np.full((3, 1, 1), 2.0)
    )  # sd 2, prior's is 1
    divergence = names["loss"].divergence(twice, process, x)
    np.testing.assert_allclose(divergence, 3 * (1 + np.log(4.0) ** 2), rtol=1e-5)


GUIDES = {
    "README.md": check_readme,
    "docs/getting-started.md": check_getting_started,
    "docs/large-data.md": check_large_data,
    "docs/saving.md": check_saving,
    "docs/tables.md": check_tables,
    "docs/models.md": check_models,
    "docs/choosing.md": check_choosing,
    "docs/partly-bayesian.md": check_partly_bayesian,
    "docs/trust.md": check_trust,
    "docs/variational.md": check_variational,
    "docs/migrating.md": check_migrating,
    "docs/contributing.md": check_contributing,
}


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES)
def test_code_of_a_guide_runs(page, tmp_path, monkeypatch):
    """All Python blocks of a page, one after another in one namespace."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.save("x.npy", rng.normal(size=(2048, 3)).astype(np.float32))  # data on disk, where a guide reads some
    np.save("y.npy", np.sin(np.load("x.npy")[:, 0]) + 0.1 * rng.normal(size=2048).astype(np.float32))
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # chains this short may run hot, or rest, and say so
        warnings.filterwarnings("ignore", "f never moves", UserWarning)
        for block in blocks:
            exec(compile(shortened(block), page, "exec"), names)
        GUIDES[page](names)


def readme_program():
    """The first Python block of the README, which the index of the pages includes."""
    return re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)[1]


def test_the_program_of_the_readme_is_short():
    lines = [line for line in readme_program().splitlines() if line.strip()]
    assert len(lines) <= 15 and max(map(len, lines)) <= 100


def program(name):
    """A Python file of the folder ``docs``, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pictures():
    """The script that makes the README's pictures."""
    return program("pictures")


def test_gallery_pictures_are_parts_of_the_notebooks(pictures):
    """All that the README shows can be made, and has colors; the stored files have the same size."""
    shown = set(re.findall(r"docs/gallery/(\w+)\.png", (ROOT / "README.md").read_text()))
    assert shown == set(pictures.PARTS)
    for name in shown:
        picture = pictures.gallery_picture(name)
        with Image.open(ROOT / "docs" / "gallery" / f"{name}.png") as stored:
            assert picture.size == stored.size == (400, 320)
        assert len(picture.getcolors(maxcolors=10**6)) > 100


def test_pages_show_pictures_that_the_notebooks_hold():
    """A picture is named after its cell and output, which move when a notebook is edited or prints one thing more."""
    shown = [
        (page.name, *match)
        for page in (ROOT / "docs").rglob("*.md")
        for match in re.findall(r"notebooks/(\w+)_files/\1_(\d+)_(\d+)\.png", page.read_text())
    ]
    assert len(shown) >= 8
    for page, notebook, cell, output in shown:
        cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
        assert "image/png" in cells[int(cell)]["outputs"][int(output)]["data"], (page, notebook, cell, output)


@pytest.mark.slow
def test_picture_of_the_readme(pictures):
    """The right panel is the README's: the same network, points and exact process."""
    left, right = pictures.with_and_without(num_warmup=10, num_samples=10).axes
    assert left.get_title() != right.get_title()
    for ax in (left, right):
        assert {"90 % of f", "draws of f", "reference", "data"} <= set(ax.get_legend_handles_labels()[1])
    program = readme_program()
    assert "ExpSquared(0.2)" in program and "space_filling(-1.0, 1.0, 40)" in program and "0.25" in program


def test_every_page_with_code_is_run():
    with_code = {page for page in PAGES if re.search(r"^```python", page.read_text(), flags=re.M)}
    assert with_code == {ROOT / page for page in GUIDES}


BUILT = ROOT / "docs" / "notebooks"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SUBPAGES = [page for folder in ("api", "notes", "results") for page in sorted((ROOT / "docs" / folder).glob("*.md"))]


def links(text):
    """Targets of the links and pictures outside code, without those to the web."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]


def headings(path):
    """Anchors of a page: its headings in lower case, words joined by hyphens."""
    found = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES + SUBPAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """In a clone, where the pictures of notebooks (another test looks for them) are not yet made."""
    for target in links(page.read_text()):
        name, _, anchor = target.partition("#")
        path = (page.parent / name if name else page).resolve()
        if path.is_relative_to(BUILT) and path.suffix == ".png":
            continue
        assert path.exists() and not path.is_relative_to(BUILT), f"{page.name} links to {target}"
        assert not anchor or anchor in headings(path), f"{page.name} links to {target}: no such heading"


def test_links_to_notebooks_lead_to_their_pages_in_the_build():
    """``docs/conf.py`` writes them anew: each is then the path, from its page, of a page made of a notebook."""
    pytest.importorskip("sphinx")
    conf = program("conf")
    made = {(BUILT / f"{path.stem}.md").resolve() for path in (ROOT / "notebooks").glob("*.ipynb")}
    found = []
    for page in (page for page in PAGES + SUBPAGES if page.is_relative_to(ROOT / "docs")):
        source = [page.read_text()]
        before = links(source[0])
        conf.link_rendered_notebooks(None, None, source)
        changed = [(old, new) for old, new in zip(before, links(source[0]), strict=True) if old != new]
        assert [old for old, _ in changed] == [old for old in before if ".ipynb" in old]
        found += [(page.parent / new.partition("#")[0]).resolve() for _, new in changed]
    assert set(found) == made  # the gallery has all of them


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_links_of_notebooks_lead_somewhere(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    prose = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for target in links(prose):
        name, _, anchor = target.partition("#")
        path = (notebook.parent / name).resolve()
        assert path.exists(), f"{notebook.name} links to {target}"
        assert not anchor or anchor in headings(path), f"{notebook.name} links to {target}: no such heading"


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_code_of_notebooks_fits_a_page(notebook):
    """The pages show 88 columns of code without a scroll bar."""
    cells = json.loads(notebook.read_text())["cells"]
    lines = [line for c in cells if c["cell_type"] == "code" for line in "".join(c["source"]).splitlines()]
    assert lines
    assert [line for line in lines if len(line) > 88] == []


def test_links_finds_links():
    assert links("[a](b.md) ![c](d.png) `[x](y)` [web](https://z)\n```\n[e](f)\n```\n") == ["b.md", "d.png"]


def test_every_key_of_a_record_is_explained():
    table = (ROOT / "docs" / "experiments.md").read_text().split("## Records")[1].split("## Results")[0]
    explained = set(re.findall(r"`(\w+)`", table))
    written = {key for name in catalog.NAMES for key in catalog.find(name).columns}
    for path in (ROOT / "docs" / "results").glob("*.jsonl"):
        written |= {key for line in path.read_text().splitlines() for key in json.loads(line)}
    names_of_the_run = {"experiment", "dataset", "method", "split", "seed", "version"}
    assert written - explained <= names_of_the_run
