"""``fspace reproduce``: the runs behind the pages of docs/results, in about nine core hours."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from numpyro_fspace.experiments.catalog import Job, find, jobs, run
from numpyro_fspace.experiments.records import check, read, write
from numpyro_fspace.experiments.tables import table


@dataclass(frozen=True, kw_only=True)
class Request:
    """Some runs of an experiment: every method on every data set, split and seed.

    Attributes:
        methods: names of the methods.
        datasets: names of the data sets; empty takes the first.
        num_splits: splits 0 to ``num_splits`` - 1.
        num_seeds: seeds 0 to ``num_seeds`` - 1.
        settings: settings of the config that differ from the defaults.
    """

    methods: Sequence[str]
    datasets: Sequence[str] = ()
    num_splits: int = 1
    num_seeds: int = 1
    settings: Mapping[str, object] = field(default_factory=dict)


SAMPLERS = ("fsghmc", "fsgld", "sghmc", "sgld")
TABLES = ("yacht", "boston", "energy", "concrete", "wine_red")
UPDATES = {"num_updates": 3000}
#: Priors of the weights that are narrower than N(0, 2²).
NARROWER = ({"weight_sd": 1.0}, {"weight_sd": None, "weight_scale": 3.0})
EXACT = {"exact": True}
EIGHTY, SEVENTY = {"train_share": 0.8}, {"train_share": 0.7, "widths": (16, 16, 16), "activation": "relu"}
VARYING = {"varying_noise": True}
#: The kernel of higher marginal likelihood on airfoil.
ROUGH = {"kernel": "matern"}

#: Pages whose runs are those of another experiment.
EXPERIMENTS = {"protocols": "uci"}
#: The runs by page. Splits and seeds are as few as show the differences that the pages speak of.
PLAN: Mapping[str, tuple[Request, ...]] = {
    "extrapolation": (
        Request(methods=("fsghmc",), num_seeds=5, settings=EXACT),
        Request(methods=SAMPLERS, num_seeds=5),
        *(Request(methods=("fsghmc", "sghmc"), num_seeds=5, settings=weights) for weights in NARROWER),
        Request(methods=("gp", "svgp", "bbb", "laplace", "ensemble", "vip")),
        Request(methods=("gfsvi", "tfsvi", "gwi", "fvi", "fvimc", "fvimc_kl", "fbnn", "ifbnn"), settings=UPDATES),
    ),
    "kernels": (
        Request(methods=("fsghmc",), datasets=("rbf", "rbf_short", "rbf_long", "matern12", "periodic"), settings=EXACT),
        Request(methods=("gp", "gfsvi", "tfsvi", "bbb", "laplace"), datasets=("rbf", "matern12")),
        Request(methods=("gp", "gfsvi"), datasets=("periodic", "rbf_short", "rbf_long")),
        Request(methods=("fbnn", "fvi"), datasets=("rbf",)),
    ),
    "calibration": (
        Request(methods=("fsghmc", "sghmc", "gfsvi"), settings={"widths": (50, 50)}),
        Request(methods=("fsghmc",), settings={"widths": (50, 50), **EXACT}),
    ),
    "coverage": (
        Request(methods=("gp", "fsghmc"), settings={"num_sets": 50}),
        Request(methods=("fsghmc",), settings={"num_sets": 50, **EXACT}),
    ),
    "uci": (
        Request(methods=("fsghmc", "sghmc"), datasets=(*TABLES, "kin8nm"), num_splits=3),
        Request(methods=("fsghmc",), datasets=(*TABLES, "kin8nm"), num_splits=3, settings=EXACT),
        Request(methods=("fsgld",), datasets=TABLES, num_splits=3),
        Request(
            methods=("gfsvi",), datasets=TABLES, num_splits=3, settings={"num_updates": 1500, "learning_rate": 0.01}
        ),
    ),
    "protocols": (
        Request(methods=("gp", "fsghmc"), datasets=("airfoil",), num_splits=3, settings=EIGHTY),
        Request(methods=("gp", "fsghmc"), datasets=("airfoil",), num_splits=3, settings={**EIGHTY, **EXACT, **ROUGH}),
        Request(methods=("fsghmc",), datasets=("airfoil",), num_splits=3, settings={**EIGHTY, **VARYING}),
        Request(methods=("fsghmc",), datasets=("bikesharing",), num_splits=2, settings={**EIGHTY, **VARYING}),
        Request(methods=("gp", "fsghmc"), datasets=("airfoil", "energy"), num_splits=3, settings=SEVENTY),
        Request(methods=("fsghmc",), datasets=("energy",), num_splits=3, settings={**SEVENTY, **VARYING}),
        Request(methods=("fsghmc",), datasets=("bikesharing",), settings=SEVENTY),
    ),
    "two_moons": (
        Request(methods=("fsghmc",), settings=EXACT),
        Request(methods=("gp", "fsghmc", "sghmc", "laplace", "bbb")),
        Request(methods=("gfsvi", "tfsvi", "fvi", "fvimc"), settings=UPDATES),
    ),
    "langevin": (
        Request(methods=("function", *(f"weight{n}" for n in (20, 50, 100, 200, 500))), datasets=("n3_depth2",)),
        Request(methods=("function", "weight20", "weight50"), datasets=("n3_depth3",)),
        Request(methods=("weight100",), datasets=("n3_depth3",), settings={"num_chains": 200}),
    ),
    "ablations": (
        Request(
            methods=(
                "fsghmc",
                *(f"fsghmc:num_samples={n}" for n in (8, 75)),
                *(f"fsghmc:num_points={n}" for n in (10, 40)),
                *(f"fsghmc:kernel={name}" for name in ("matern", "linear")),
                "fsghmc:num_gp_steps=10",
                "fsghmc:warm_start=0.0",
                "fsghmc:anchored=False",
            ),
            num_splits=3,
        ),
    ),
    "ocean": (Request(methods=("gp", "fsghmc", "sghmc"), num_seeds=3),),
    "co2": (Request(methods=("fsghmc",), settings=EXACT), Request(methods=("gp", "fsghmc", "sghmc"))),
    "images": (Request(methods=("fsghmc", "sghmc", "gfsvi"), datasets=("mnist", "fashion_mnist")),),
    "bandit": (
        Request(methods=("gp", "sghmc", "fsghmc"), datasets=("p0.4", "p0.5", "p0.6"), num_seeds=2),
        Request(methods=("bbb", "greedy", "uniform"), datasets=("p0.4", "p0.5", "p0.6")),
    ),
    "tabular_ood": (
        Request(methods=("fsghmc",), datasets=TABLES, settings=EXACT),
        Request(methods=("gp", "fsghmc", "sghmc", "bbb"), datasets=TABLES),
    ),
}


def planned(name: str, *, quick: bool = False, progress: bool = False) -> list[Job]:
    """The jobs of a page in ``PLAN``; with ``quick`` a tiny run of the first method of each request."""
    found: list[Job] = []
    for request in PLAN[name]:
        exact = {k: v for k, v in request.settings.items() if k == "exact"}
        found += jobs(
            EXPERIMENTS.get(name, name),
            methods=request.methods[:1] if quick else request.methods,
            datasets=(request.datasets[:1] if quick else request.datasets) or None,
            num_splits=1 if quick else request.num_splits,
            seeds=range(1 if quick else request.num_seeds),
            settings=exact if quick else request.settings,
            quick=quick,
            progress=progress,
        )
    return found


@functools.cache
def provenance() -> dict[str, str | None]:
    """The commit of the source, if it is a clone with git, and the class of the machine."""
    import jax

    is_clone = _git("ls-files", "--error-unmatch", Path(__file__).name)  # and not installed within another one
    commit = _git("rev-parse", "--short", "HEAD") if is_clone else None
    if commit and _git("status", "--porcelain", "--untracked-files=no"):
        commit += "+"  # with changes that are not committed
    device = jax.devices()[0]
    kind = platform.machine() if device.platform == "cpu" else device.device_kind
    return {"commit": commit, "machine": f"{kind}, {os.cpu_count()} cores, jax {jax.__version__}"}


def _git(*arguments: str) -> str | None:
    """What git says about the source, None where it is no clone."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def reproduce(
    names: Sequence[str] = tuple(PLAN),
    folder: str | Path = "fspace-results",
    *,
    quick: bool = False,
    progress: bool = False,
) -> Iterator[str]:
    """Make the runs of ``PLAN``, and yield a line of text at each step.

    ``folder`` gets ``NAME.jsonl``, the records, each with the version, commit, seed, settings, machine and seconds of
    its run; ``NAME.md``, their table; and ``NAME.png``, their picture. Runs that have a record are skipped, so that the
    same call continues after an interruption.

    Args:
        names: pages, each an experiment or a name in ``EXPERIMENTS``.
        folder: of the files.
        quick: whether to make a few tiny runs, to see that everything works.
        progress: whether to show progress bars.

    Raises:
        ValueError: for an unknown name, or a file that holds something other than records.
        RuntimeError: at the end, if experiments could not be run; the message says which and why.
    """
    unknown = [name for name in names if name not in PLAN]
    if unknown:
        raise ValueError(f"{unknown} are unknown; choose from {', '.join(PLAN)}.")
    folder, failed = Path(folder), dict[str, str]()
    for name in names:
        path, todo = folder / f"{name}.jsonl", planned(name, quick=quick, progress=progress)
        source = EXPERIMENTS.get(name, name)
        check(path)
        try:
            for line in run(source, todo, read(path)):
                write(line | provenance(), path)
                yield f"{name}: {line['method']} on {line['dataset']}, split {line['split']}, seed {line['seed']}"
        except (ValueError, OSError, ImportError) as error:
            failed[name] = str(error)
            yield f"{name}: {error}"
        records, experiment = read(path), find(source)
        if records:
            text = table(experiment, records)
            (folder / f"{name}.md").write_text(text + "\n")
            if experiment.picture is not None:
                experiment.picture(records).savefig(folder / f"{name}.png", dpi=150, bbox_inches="tight")
            yield text
    if failed:
        reasons = "; ".join(f"{name} ({why})" for name, why in failed.items())
        raise RuntimeError(f"some experiments are not complete: {reasons}")
