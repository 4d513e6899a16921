"""The pictures of the README and of the tutorial: ``python docs/pictures.py`` makes them, in a few minutes.

``with_and_without.png`` shows one network with a prior on its weights, and with a prior on its function; the right
panel is that of the README's program. ``gallery/*.png`` are parts of pictures that the notebooks hold.
``tutorial/*.png`` are made by the program of the page "Getting started".
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import matplotlib
import numpyro
import numpyro.distributions as dist
from flax import nnx
from PIL import Image
from tinygp import kernels

import numpyro_fspace as fs

matplotlib.use("Agg")
from matplotlib import pyplot as plt

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
gp, points = fs.GPPrior(kernels.ExpSquared(0.2)), fs.measurement.space_filling(-1.0, 1.0, 40)
dense = functools.partial(nnx.Linear, rngs=nnx.Rngs(0))
network = nnx.Sequential(dense(1, 50), nnx.tanh, dense(50, 50), nnx.tanh, dense(50, 1))


def prior_of_weights(x, y=None):
    f = fs.random_module("f", network, input_shape=1, prior=dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.5), obs=y)


def prior_of_functions(x, y=None):
    f = fs.gp_network("f", network, gp, points)
    numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.5), obs=y)


PANELS = {
    "Prior on the weights": fs.SGHMC(prior_of_weights),
    "Prior on the function": fs.fSGHMC(prior_of_functions),
}


def with_and_without(num_warmup: int = 1000, num_samples: int = 1000):
    """Both posteriors, each beside that of the exact Gaussian process (dashed)."""
    x, y = fs.datasets.extrapolation(jax.random.key(0))
    grid = fs.datasets.extrapolation_grid()
    exact = gp.condition(x, y, noise_variance=0.25)
    figure, axes = plt.subplots(1, 2, figsize=(6.6, 3.2), sharey=True, layout="constrained")
    for ax, (title, kernel) in zip(axes, PANELS.items(), strict=True):
        mcmc = fs.MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples)
        mcmc.run(jax.random.key(1), x, y)
        f = fs.predict(mcmc, jax.random.key(2), grid)["f"]
        fs.plot_functions(grid, f, x_data=x, y_data=y, reference=exact, num_draws=8, ax=ax)
        for stretch in list(ax.patches):  # far from the data
            stretch.remove()
        ax.get_legend().remove()
        ax.set_title(title, fontsize=12)
        ax.set(xlim=(-1, 1), ylim=(-3.2, 3.2), ylabel="", xticks=(-1, -0.5, 0, 0.5, 1))
    handles, labels = axes[1].get_legend_handles_labels()
    names = {"90 % of f": "90 % band", "draws of f": "draws", "reference": "exact GP"}
    labels = [names.get(label, label) for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


#: Name of a gallery picture: the notebook, the number of its picture, and the part (left, top, right, bottom) shown.
PARTS = {
    "points": ("03_kernels_and_points", 2, (0.515, 0.0, 1.0, 1.0)),
    "classes": ("06_classification_and_ood", 0, (0.0, 0.0, 0.5, 0.485)),
    "rows": ("07_large_data", 0, (0.0, 0.0, 0.66, 1.0)),
    "bandit": ("08_bandit", 2, (0.0, 0.0, 0.5, 1.0)),
}


def gallery_picture(name: str, size: tuple[int, int] = (400, 320)) -> Image.Image:
    """A part of a notebook's picture, centered on a white ground of this size."""
    notebook, number, part = PARTS[name]
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text())["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    pictures = [data["image/png"] for data in outputs if "image/png" in data]
    picture = Image.open(io.BytesIO(base64.b64decode("".join(pictures[number])))).convert("RGB")
    sides = (picture.width, picture.height) * 2
    picture = picture.crop(tuple(round(share * side) for share, side in zip(part, sides, strict=True)))
    scale = min(size[0] / picture.width, size[1] / picture.height)
    picture = picture.resize((round(scale * picture.width), round(scale * picture.height)), Image.Resampling.LANCZOS)
    ground = Image.new("RGB", size, "white")
    ground.paste(picture, ((size[0] - picture.width) // 2, (size[1] - picture.height) // 2))
    return ground


def tutorial(folder: Path):
    """Run the program of "Getting started", which saves its pictures to its working directory."""
    page = (Path(__file__).parent / "getting-started.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        exec(compile("\n".join(blocks), "getting-started.md", "exec"), {})
        for path in Path(place).glob("*.png"):
            Image.open(path).convert("RGB").quantize(128).save(folder / path.name, optimize=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    for part in ("gallery", "tutorial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        gallery_picture(name).quantize(64).save(folder / "gallery" / f"{name}.png", optimize=True)
    tutorial(folder / "tutorial")
    with_and_without().savefig(folder / "with_and_without.png", dpi=150)
