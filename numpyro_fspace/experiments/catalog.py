"""The catalog of experiments: their settings, methods, data, running time and published figures."""

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

#: Settings that may be 0; all other numbers must be positive.
MAY_BE_ZERO = {"num_warmup", "num_gp_steps", "nugget", "warm_start", "weight_scale_sd"}
#: Largest value of a setting.
MOST = 1e9
#: Seeds are smaller than this number; larger seeds would repeat the key of a smaller one.
NUM_SEEDS = 2**32

S = TypeVar("S", bound="Settings")


@dataclass(frozen=True)
class Settings:
    """The settings of a run; each experiment has its own subclass."""

    #: Settings of a tiny run that only checks that everything works.
    QUICK: ClassVar[Mapping[str, object]] = {}

    def quick(self: S) -> S:
        """The settings of a tiny run, for tests."""
        return replace(self, **self.QUICK)

    def most_splits(self, published: int) -> int:
        """The number of splits of a data set with these settings, given that of its published ones."""
        return published

    def updated(self: S, settings: Mapping[str, object]) -> S:
        """These settings with some values changed.

        Raises:
            ValueError: a name is not an attribute, a value has the wrong type, or a number is infinite, negative, or 0
                although it must be positive.
        """
        types = {item.name: str(item.type) for item in fields(self)}
        for name in settings:
            if name not in types:
                raise ValueError(f"unknown setting {name!r}; choose from {', '.join(types)}.")
        return replace(self, **{name: _converted(name, value, types[name]) for name, value in settings.items()})


def parse_setting(text: str) -> tuple[str, object]:
    """Parse ``"name=value"`` into a name and a Python value; a plain word is a string."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, value


def _converted(name: str, value, kind: str):
    """``value`` as the type named ``kind``. Integers become floats if a float is expected: 1 and 1.0 are one run."""
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
        method: name of the method.
        dataset: name of the data set.
        split: number of the split into training and test data.
        seed: seed of the run and of random data.
        config: settings of the run.
        progress: whether to show a progress bar.
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
        summary: the question it answers, in one line.
        run: computes the results of a job by the keys of a record (see ``record``); ``curves`` has the data of the
            picture.
        config: default settings of a run.
        methods: names of all methods.
        defaults: the methods that run if none is named.
        datasets: names of the data sets; the first one is used if none is named.
        num_splits: number of splits by data set; 1 for data sets that are not listed.
        files: files that it reads from the data directory.
        minutes: approximate minutes of one run on one core.
        columns: keys of the table and their headings.
        published: published figures by data set and method, under the keys of the table.
        source: where the figures were published.
        picture: makes a figure from records.
        unused: settings of its config that have no effect.
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


def published(datasets: Sequence[str], **tables: Mapping[str, Sequence[float | None]]) -> dict:
    """Published figures as an ``Experiment`` has them, by data set and method, under the keys of its table.

    Args:
        datasets: names of the data sets, the columns of all tables.
        tables: for each key the figures of every method on these data sets; None where there is none.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for key, table in tables.items():
        for method, figures in table.items():
            for dataset, figure in zip(datasets, figures, strict=True):
                if figure is not None:
                    found.setdefault((dataset, method), {})[key] = figure
    return found


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
    """All requested runs of an experiment: every data set, split, seed and method.

    Args:
        name: one of ``NAMES``.
        methods, datasets: names; None means the experiment's defaults.
        num_splits: splits 0 to ``num_splits - 1`` are run.
        seeds: seeds of the runs, from 0 to 2³² − 1.
        settings: settings of the config to change.
        quick: whether to make tiny runs.
        progress: whether to show progress bars.

    Raises:
        ValueError: the experiment does not have a method, data set, split or setting, does not use a setting, or a
            seed is out of range.
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
    for setting in settings or {}:
        if setting in experiment.unused:
            raise ValueError(f"{name} does not use the setting {setting!r}.")
    config = (experiment.config.quick() if quick else experiment.config).updated(settings or {})
    for dataset in datasets:
        most = config.most_splits(experiment.num_splits.get(dataset, 1))
        if num_splits > most:
            raise ValueError(f"{name} has no splits of {dataset} beyond {most}, and num_splits={num_splits}.")
    return [
        Job(method, dataset, split, seed, config, progress)
        for dataset, split, seed, method in itertools.product(datasets, range(num_splits), seeds, methods)
    ]


def run(name: str, todo: Iterable[Job], done: Iterable[Mapping] = ()) -> Iterator[dict]:
    """Run the jobs of an experiment and yield their records; jobs with a record in ``done`` are skipped."""
    from numpyro_fspace import __version__

    experiment, seen = find(name), {run_of(line) for line in done}
    for job in todo:
        named = {"experiment": name, "dataset": job.dataset, "method": job.method, "split": job.split, "seed": job.seed}
        config = json.loads(json.dumps(asdict(job.config)))
        asked = run_of(named | {"config": config, "version": __version__})
        if asked not in seen:
            seen.add(asked)
            yield record(**named, **experiment.run(job), config=config)
