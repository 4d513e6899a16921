"""What is known of an experiment before it runs: its methods, its data, its time, and the figures published of it."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

from numpyro_fspace.experiments.records import record, run_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "NAMES",
    "Experiment",
    "Job",
    "Settings",
    "check_activation",
    "find",
    "hidden_layers",
    "jobs",
    "parse_setting",
    "run",
]

#: Experiments, by the names of their modules.
NAMES = (
    "extrapolation",
    "kernels",
    "calibration",
    "coverage",
    "uci",
    "two_moons",
    "langevin",
    "ablations",
    "ocean",
    "co2",
    "images",
    "bandit",
    "tabular_ood",
)

#: Settings that may be 0; other numbers must be positive.
MAY_BE_ZERO = {"num_warmup", "num_gp_steps", "nugget", "warm_start", "weight_scale_sd"}
#: The largest number that a setting may be.
MOST = 1e9
#: Seeds below it; others would give the key of one of these.
NUM_SEEDS = 2**32

S = TypeVar("S", bound="Settings")


@dataclass(frozen=True)
class Settings:
    """The numbers of a run; each experiment has a dataclass of its own."""

    #: What changes for a tiny run, to see that everything works.
    QUICK: ClassVar[Mapping[str, object]] = {}

    def quick(self: S) -> S:
        """The same run at a size for tests."""
        return replace(self, **self.QUICK)

    def updated(self: S, settings: Mapping[str, object]) -> S:
        """The same run with some numbers changed.

        Raises:
            ValueError: for a name that is none of the attributes, a value that is not of its type, or a number that is
                infinite, negative, or 0 where it must be positive.
        """
        types = {item.name: str(item.type) for item in fields(self)}
        for name in settings:
            if name not in types:
                raise ValueError(f"unknown setting {name!r}; choose from {', '.join(types)}.")
        return replace(self, **{name: _converted(name, value, types[name]) for name, value in settings.items()})


def parse_setting(text: str) -> tuple[str, object]:
    """``"name=value"`` as a name and a Python value; a word is a string."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, value


def hidden_layers(config) -> list:
    """Dense layers of ``config.widths``, each with ``config.activation`` behind it, for a flax network."""
    import jax
    from flax import linen as nn

    activation = getattr(jax.nn, config.activation)
    return [layer for width in config.widths for layer in (nn.Dense(width), activation)]


def check_activation(name: str) -> None:
    """
    Raises:
        ValueError: if ``jax.nn`` has no function of this name.
    """
    import jax

    if not callable(getattr(jax.nn, name, None)):
        raise ValueError(f"activation={name!r} is unknown; give the name of a function of jax.nn: relu, tanh.")


def _converted(name: str, value, kind: str):
    """``value`` as the type that is called ``kind``; a whole number is a float too, so that 1 and 1.0 are one run."""
    if value is None and kind.endswith(" | None"):
        return None
    known = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}
    types = known.get(kind.removesuffix(" | None"), (tuple,))
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"setting {name}={value!r} must be of type {kind}.")
    if isinstance(value, tuple):
        return tuple(_converted(name, part, "int") for part in value)
    if not isinstance(value, str | bool):
        least = "0 or more" if name in MAY_BE_ZERO else "positive"
        if not 0 <= value <= MOST or (value == 0 and name not in MAY_BE_ZERO):
            raise ValueError(f"setting {name}={value!r} must be {least} and at most {MOST:g}.")
    return float(value) if isinstance(value, int) and float in types else value


class Job(NamedTuple, Generic[S]):
    """One run of an experiment.

    Attributes:
        method: its name.
        dataset: name of the data set.
        split: number of the split into training and test data.
        seed: of the run, and of data that are drawn.
        config: every number of the run.
        progress: show a progress bar.
    """

    method: str
    dataset: str
    split: int
    seed: int
    config: S
    progress: bool = False


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment of ``fspace run``.

    Attributes:
        summary: what it asks, in a line.
        run: a job's results, by the keys of a record (see ``record``); under ``curves``, what the picture is made of.
        config: the numbers of a run.
        methods: those it can run.
        defaults: those it runs if none is named.
        datasets: those it has; the first is run if none is named.
        num_splits: splits of a data set, by name; one of those it does not name.
        files: what it reads from the data directory.
        minutes: of one run on one core, about.
        columns: keys of the table, and their headings.
        published: figures of a paper by data set and method, under the keys of the table.
        source: the paper.
        picture: records to a figure.
        unused: settings of its config that mean nothing to it.
    """

    summary: str
    run: Callable[[Job], dict]
    config: Settings
    methods: tuple[str, ...]
    defaults: tuple[str, ...]
    datasets: tuple[str, ...]
    num_splits: Mapping[str, int] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    minutes: float
    columns: Mapping[str, str]
    published: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)
    source: str = ""
    picture: Callable[[Sequence[dict]], Figure] | None = None
    unused: tuple[str, ...] = ()


def find(name: str) -> Experiment:
    """The experiment called ``name``, one of ``NAMES``."""
    return importlib.import_module(f"numpyro_fspace.experiments.{name}").EXPERIMENT


def jobs(
    name: str,
    *,
    methods: Sequence[str] | None = None,
    datasets: Sequence[str] | None = None,
    num_splits: int = 1,
    seeds: Iterable[int] = (0,),
    settings: Mapping[str, object] | None = None,
    quick: bool = False,
    progress: bool = False,
) -> list[Job]:
    """The runs of an experiment that are asked for: every data set, split, seed and method.

    Args:
        name: one of ``NAMES``.
        methods, datasets: names; the experiment's defaults if None.
        num_splits: splits 0 to ``num_splits - 1``.
        seeds: of the runs, from 0 to 2³² − 1.
        settings: numbers of the config to change.
        quick: tiny runs.
        progress: show progress bars.

    Raises:
        ValueError: for a method, data set, split or setting that the experiment doesn't have, or doesn't use, or a seed
            out of range.
    """
    experiment, seeds = find(name), list(seeds)
    for seed in seeds:
        if not 0 <= seed < NUM_SEEDS:
            raise ValueError(f"seed={seed} must lie between 0 and {NUM_SEEDS - 1}.")
    methods = experiment.defaults if methods is None else methods
    datasets = experiment.datasets[:1] if datasets is None else datasets
    for what, asked, known in (
        ("method", methods, experiment.methods),
        ("dataset", datasets, experiment.datasets),
    ):
        for word in asked:
            if word not in known:
                raise ValueError(f"{name} has no {what} {word!r}; choose from {', '.join(known)}.")
    for dataset in datasets:
        most = experiment.num_splits.get(dataset, 1)
        if num_splits > most:
            raise ValueError(f"{name} has no splits of {dataset} beyond {most}, and num_splits={num_splits}.")
    for setting in settings or {}:
        if setting in experiment.unused:
            raise ValueError(f"{name} does not use the setting {setting!r}.")
    config = (experiment.config.quick() if quick else experiment.config).updated(settings or {})
    return [
        Job(method, dataset, split, seed, config, progress)
        for dataset, split, seed, method in itertools.product(datasets, range(num_splits), seeds, methods)
    ]


def run(name: str, todo: Iterable[Job], done: Iterable[Mapping] = ()) -> Iterator[dict]:
    """Records of the runs of an experiment, one after the other; those among ``done`` are left out."""
    from numpyro_fspace import __version__

    experiment, seen = find(name), {run_of(line) for line in done}
    for job in todo:
        named = {"experiment": name, "dataset": job.dataset, "method": job.method, "split": job.split, "seed": job.seed}
        config = json.loads(json.dumps(asdict(job.config)))
        asked = run_of(named | {"config": config, "version": __version__})
        if asked not in seen:
            seen.add(asked)
            yield record(**named, **experiment.run(job), config=config)
