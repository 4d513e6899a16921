"""Sphinx configuration; ``sphinx-build -W -b html docs docs/_build/html`` builds the pages."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from sphinx.util import logging

import numpyro_fspace

project = "numpyro_fspace"
author = "The numpyro_fspace authors"
copyright = f"2026, {author}"
release = version = numpyro_fspace.__version__

#: MathJax is part of the pages, so that equations are set without a network.
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",
    "myst_parser",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
default_role = "py:obj"

html_theme = "furo"
html_title = f"numpyro_fspace {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
#: Copied code leaves out the prompts of docstrings, and their output.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Reference"]

#: Namespaces whose every public name has an entry in the API pages.
NAMESPACES = (
    numpyro_fspace,
    numpyro_fspace.baselines,
    numpyro_fspace.variational.guides,
    numpyro_fspace.model,
    numpyro_fspace.model.measurement,
    numpyro_fspace.priors,
    numpyro_fspace.metrics,
    numpyro_fspace.preconditioners,
    numpyro_fspace.sgmcmc,
    numpyro_fspace.datasets,
)


#: Parts of a docstring's line that are not prose: literals, mathematics.
MARKUP = re.compile(r"(``.*?``|:\w+:`.*?`)")


def escape_plain_formulas(app, what, name, obj, options, lines):
    """Keep ``|p|`` and ``[*shape, M]`` in prose from being read as substitutions and emphasis."""
    skip_to = None
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if skip_to is not None and line.strip() and indent <= skip_to:
            skip_to = None
        if line.lstrip().startswith(".. math::"):
            skip_to = indent
        if skip_to is None and not line.lstrip().startswith((">>>", "...")):
            parts = MARKUP.split(line)
            parts[::2] = [re.sub(r"\*(?=\w+[,\]])", r"\\*", part).replace("|", r"\|") for part in parts[::2]]
            lines[i] = "".join(parts)


def check_coverage(app, env):
    """Warn of public names without an entry (with ``-W``, an error)."""
    documented = set(env.get_domain("py").objects)
    for namespace in NAMESPACES:
        for name in namespace.__all__:
            value = getattr(namespace, name)
            full = value.__name__ if inspect.ismodule(value) else f"{namespace.__name__}.{name}"
            is_on_top = getattr(numpyro_fspace, name, None) is value and f"numpyro_fspace.{name}" in documented
            if full not in documented and not is_on_top:
                logging.getLogger(__name__).warning("%s is public but has no entry in the API pages", full)


def render_notebooks(app):
    """Notebooks as pages ``notebooks/*.md``, with the outputs that are stored in them; nothing is executed."""
    from nbconvert import MarkdownExporter

    out = Path(app.srcdir) / "notebooks"
    for path in sorted(Path(app.srcdir).parent.glob("notebooks/*.ipynb")):
        resources = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
        text, resources = MarkdownExporter().from_filename(str(path), resources)
        (out / f"{path.stem}_files").mkdir(parents=True, exist_ok=True)
        text = text.replace("](../docs/", "](../")  # the notebooks link to pages as on GitHub
        (out / f"{path.stem}.md").write_text(re.sub(r"\]\((\d\d_\w+)\.ipynb\)", r"](\1.md)", text))
        for name, content in resources["outputs"].items():
            (out / name).write_bytes(content)


def link_rendered_notebooks(app, docname, source):
    """Lead links to notebooks, which are written as they work on GitHub, to the pages made of them."""
    source[0] = re.sub(r"\]\(\.\./((?:\.\./)*notebooks/\w+)\.ipynb", r"](\1.md", source[0])


def setup(app):
    app.connect("builder-inited", render_notebooks)
    app.connect("source-read", link_rendered_notebooks)
    app.connect("autodoc-process-docstring", escape_plain_formulas, priority=100)
    app.connect("env-check-consistency", check_coverage)
