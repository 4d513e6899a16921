"""Execute notebooks, and fail if a cell does.

    python .ci/notebooks.py notebooks/*.ipynb            # as they stand; their outputs are stored in them
    python .ci/notebooks.py --small notebooks/*.ipynb    # tiny runs, to see that everything works; nothing is stored

A cell's metadata may have an entry ``small``: texts of its source, and what replaces them in a tiny run.
"""

import argparse
import base64
import io
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image


def execute(path: Path, small: bool) -> str:
    """Execute a notebook; returns a line of text."""
    notebook, start = nbformat.read(path, as_version=4), time.perf_counter()
    if small:
        for cell in notebook.cells:
            for old, new in cell.metadata.get("small", {}).items():
                if cell.source.count(old) != 1:
                    raise ValueError(f"{path}: {old!r} stands {cell.source.count(old)} times in its cell")
                cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=3600, record_timing=False, resources={"metadata": {"path": path.parent}}).execute()
    if not small:
        nbformat.write(without_machine(notebook), path)
    return f"{path.name} {time.perf_counter() - start:.0f} s"


def without_machine(notebook):
    """The notebook without paths of temporary files and warnings of missing widgets, its pictures in 256 colors."""
    for cell in notebook.cells:
        kept = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                text = re.sub(r".*TqdmWarning: IProgress not found.*\n.*\n", "", output.text)
                text = re.sub(r"\S*(ipykernel_\d+|numpyro_fspace)/\S*\.py:\d+: ", "", text)
                output.text = re.sub(r"\n{3,}", "\n\n", text)
                if not text.strip():
                    continue
                if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                    kept[-1].text += output.text
                    continue
            elif "image/png" in output.get("data", {}):
                picture = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
                picture.convert("RGB").quantize(256).save(stored := io.BytesIO(), "png", optimize=True)
                output.data["image/png"] = base64.b64encode(stored.getvalue()).decode()
            kept.append(output)
        if "outputs" in cell:
            cell.outputs = kept
    return notebook


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny runs; nothing is stored")
    parser.add_argument("--jobs", type=int, default=1, help="how many are executed at once")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for line in pool.map(lambda path: execute(path, arguments.small), arguments.notebooks):
            print(line, flush=True)
