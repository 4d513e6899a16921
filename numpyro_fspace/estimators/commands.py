"""``fspace fit`` and ``fspace predict``: from a user's table to a model in a folder, and to predictions."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

try:
    import pandas as pd
except ImportError as error:
    raise ImportError('fspace fit and fspace predict need pandas: pip install "numpyro_fspace[examples]".') from error

from numpyro_fspace.estimators.classifier import Classifier
from numpyro_fspace.estimators.csv_file import read_csv
from numpyro_fspace.estimators.figures import partial_dependence_figure, predicted_observed_figure
from numpyro_fspace.estimators.regressor import Regressor
from numpyro_fspace.estimators.saved import SETTINGS, load_estimator, save_estimator
from numpyro_fspace.estimators.scores import classification_scores, regression_scores, text_table
from numpyro_fspace.estimators.table import MIN_ROWS, Design, read_design
from numpyro_fspace.mcmc import report
from numpyro_fspace.posterior import to_arviz

QUANTILES = (0.05, 0.5, 0.95)
#: Packages of the extra ``examples`` that are loaded only after the network has been sampled.
LATER = ("arviz", "h5netcdf", "matplotlib")


def fit_table(
    path: str | Path,
    out: str | Path,
    *,
    target: str,
    method: str,
    noise: str,
    test_fraction: float,
    categorical: Sequence[str],
    drop: Sequence[str],
    classes: bool | None,
    decimal: str,
    draws: int,
    chains: int,
    seed: int,
    progress: bool,
) -> None:
    """Fit the table of a CSV file; print what was found, and write model, predictions, scores and pictures to ``out``.

    Args:
        path: of the CSV file.
        out: a folder, which is made if there is none.
        target: name of the target's column.
        method: ``"fsghmc"`` or ``"fsgld"``.
        noise: of numbers, as for ``fs.Regressor``.
        test_fraction: share of the rows that is held out, at random; 0 holds out none.
        categorical: names of columns of numbers that are levels.
        drop: names of columns to leave out.
        classes: whether the target is a class; None finds out.
        decimal: the decimal point.
        draws: draws of the warm-up, and draws kept, of each chain.
        chains: chains.
        seed: of the split and of the chains.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the file, a column or a setting is wrong; before any long computation.
        ImportError: a package that is needed in the end is missing; at once.
    """
    if not 0 <= test_fraction < 1:
        raise ValueError(f"--test-fraction {test_fraction} must be at least 0 and less than 1.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed {seed} must be between 0 and {2**32 - 1}.")
    for package in LATER:
        if importlib.util.find_spec(package) is None:
            raise ImportError(f'fspace fit needs {package}: pip install "numpyro_fspace[examples]".')
    start, out = time.perf_counter(), Path(out)
    frame = read_csv(path, decimal, text=categorical)
    design, x, y, numbers = read_design(frame, target, categorical=categorical, drop=drop, classes=classes)
    if design.is_classes and noise != "constant":
        raise ValueError(f"--noise {noise} is for numbers, but {target!r} is a class: leave it out.")
    train, test = _split(x, y, numbers, is_classes=design.is_classes, test_fraction=test_fraction, seed=seed)
    if len(set(train[1])) == 1:
        raise ValueError(f"the target {target!r} is {train[1][0]} in all training rows: there is nothing to learn.")
    if out.exists() and any(out.iterdir()) and not (out / SETTINGS).exists():
        raise ValueError(f"--out {out} is a folder with other files in it: name a new one.")
    out.mkdir(parents=True, exist_ok=True)
    _say_design(path, frame, design, train, test)

    common: dict[str, Any] = {"num_warmup": draws, "num_samples": draws, "num_chains": chains}
    common |= {"method": method, "random_state": seed, "progress": progress}
    estimator = Classifier(**common) if design.is_classes else Regressor(noise=noise, **common)
    print("Training a Gaussian process, and sampling a network with its distribution ...", flush=True)
    begin = time.perf_counter()
    estimator.fit(*train[:2])
    if getattr(estimator, "noise_", None) == "varying":
        print("The noise varies with the inputs.")
    minutes = math.ceil(5 * (time.perf_counter() - begin) / 60)
    judged = report(estimator.mcmc_, *estimator.posterior_.args)
    lines = [str(judged), ""]
    if judged.advice:
        lines.insert(1, f"A longer run: --draws {5 * draws} (up to {minutes} minutes).")
    held_out = "held-out rows" if len(test[0]) else "training rows, as none were held out"
    rows = test if len(test[0]) else train
    scores = (classification_scores if design.is_classes else regression_scores)(estimator, train[:2], rows[:2])
    lines += [f"Scores on {len(rows[0])} {held_out}", text_table(scores)]
    print("\n".join(lines))
    (out / "report.txt").write_text("\n".join(lines) + "\n")

    save_estimator(estimator, out, design=design.to_dict(), decimal=decimal, doubts=list(judged.advice))
    pd.DataFrame.from_dict(scores, orient="index").rename_axis("method").to_csv(out / "scores.csv")
    found = predictions(estimator, rows[0])
    found.insert(0, "row", rows[2])
    found.insert(1, "observed", rows[1])
    found.to_csv(out / "predictions.csv", index=False)
    to_arviz(estimator.mcmc_).to_netcdf(str(out / "posterior.nc"), engine="h5netcdf")
    pictures = {
        "predicted_observed": predicted_observed_figure(estimator, *rows[:2]),
        "partial_dependence": partial_dependence_figure(estimator, design, train[0]),
    }
    for name, figure in pictures.items():
        figure.savefig(out / f"{name}.png", dpi=120, bbox_inches="tight")
    print(f"\nWrote {', '.join(sorted(os.listdir(out)))} to {out} after {time.perf_counter() - start:.0f} s.")
    print(f"New rows: fspace predict {out} NEW.csv")


def predict_table(folder: str | Path, path: str | Path, out: str | Path, *, decimal: str | None = None) -> None:
    """Predict the rows of a CSV file with the model in a folder; rows with missing inputs stay empty.

    Args:
        folder: what ``fit_table`` has written.
        path: of the CSV file.
        out: the CSV file to write.
        decimal: the decimal point of the file; None is that of the fitted table.

    Raises:
        ValueError: the folder holds no model of ``fspace fit``, or the table lacks columns.
    """
    estimator, entries = load_estimator(folder)
    if "design" not in entries:
        raise ValueError(f"{folder} holds an estimator without the columns of its table: it is not from fspace fit.")
    design = Design.from_dict(entries["design"])
    frame = read_csv(path, decimal or entries["decimal"], numbers=design.numbers)
    x = design.inputs(frame)
    complete = ~np.isnan(x).any(1)
    if not complete.any():
        raise ValueError(
            f"{path}: every row lacks an input, or has a level or a format of dates that no training row had."
        )
    found = predictions(estimator, x[complete]).set_index(frame.index[complete]).reindex(frame.index)
    if design.target in frame:
        found.insert(0, "observed", frame[design.target])
    found.to_csv(out, index=False)
    print(f"Wrote {complete.sum()} predictions to {out}.")
    if entries.get("doubts"):
        print(f"The fit has doubts, and so have its predictions (report.txt in {folder}): {entries['doubts'][0]}")
    if not complete.all():
        rows = np.flatnonzero(~complete)
        named = "; ".join(f"row {row + 1}: {', '.join(_gaps(design, frame.iloc[[row]]))}" for row in rows[:5])
        print(
            f"{len(rows)} rows lack an input, or have a level or a format of dates that no training row had, and are "
            f"empty ({named}{'; …' if len(rows) > 5 else ''})."
        )


def _gaps(design: Design, row: pd.DataFrame) -> list[str]:
    """The cells of a table of one row that are missing or unknown."""
    without = [c.name for c in design.columns if np.isnan(c.numbers(row[c.name])).any()]
    cells = {name: row[name].iloc[0] for name in without}
    return [f"{k} is missing" if pd.isna(v) else f"{k} = {v!r}" for k, v in cells.items()]


def predictions(estimator: Regressor | Classifier, x) -> pd.DataFrame:
    """A table of predictions at inputs [N, D].

    For numbers: mean, sd, quantiles, and the epistemic and aleatoric standard deviations, whose squares add up to that
    of sd. For classes: the predicted one, the probability of each, and mutual information (epistemic) and expected
    entropy (aleatoric) in nats.
    """
    columns: dict[str, Any] = {}
    parts = estimator.decompose(x)
    if isinstance(estimator, Classifier):
        columns["predicted"] = estimator.classes_[parts.mean.argmax(-1)]
        columns |= {f"p({name})": parts.mean[:, k] for k, name in enumerate(estimator.classes_)}
        columns |= {"epistemic": parts.epistemic, "aleatoric": parts.aleatoric}
        return pd.DataFrame(columns)
    quantiles = estimator.predict_quantiles(x, QUANTILES)
    columns |= {"mean": parts.mean, "sd": np.sqrt(parts.total)}
    columns |= {f"q{100 * level:02.0f}": quantiles[:, i] for i, level in enumerate(QUANTILES)}
    columns |= {"epistemic_sd": np.sqrt(parts.epistemic), "aleatoric_sd": np.sqrt(parts.aleatoric)}
    return pd.DataFrame(columns)


def _split(x, y, numbers, *, is_classes, test_fraction, seed) -> tuple:
    """Training and test rows: inputs, targets and numbers of rows."""
    order = np.random.default_rng(seed).permutation(len(x))
    num_test = round(test_fraction * len(x))
    test, train = np.sort(order[:num_test]), np.sort(order[num_test:])
    if len(train) < MIN_ROWS:
        raise ValueError(
            f"--test-fraction {test_fraction} leaves {len(train)} rows to learn from, and at least {MIN_ROWS} "
            "are needed."
        )
    if is_classes:
        rare = sorted(set(y.tolist()) - set(y[train].tolist()))
        if rare:
            raise ValueError(
                f"the classes {rare} are so rare that none of their rows is among the training rows: join them with "
                "others, or change --seed or --test-fraction."
            )
        y = y.astype(str)
    return (x[train], y[train], numbers[train]), (x[test], y[test], numbers[test])


def _say_design(path, frame, design: Design, train, test):
    names_of_kinds = {"number": "numeric", "levels": "categorical", "date": "dates"}
    counts = {text: sum(c.kind == kind for c in design.columns) for kind, text in names_of_kinds.items()}
    found = ", ".join(f"{num} {text}" for text, num in counts.items() if num)
    print(f"{path}: {len(frame)} rows, {frame.shape[1]} columns. Inputs: {found}.")
    for line in design.said:
        print(f"  {line}")
    if design.is_classes:
        names, sizes = np.unique(train[1], return_counts=True)
        shares = ", ".join(f"{name} ({size})" for name, size in zip(names[:10], sizes, strict=False))
        print(f"Target {design.target!r}: {len(names)} classes: {shares}. (If these are amounts: --numbers.)")
    else:
        few = len(np.unique(train[1])) <= 10
        hint = " It has few values; if they are classes: --classes." if few else ""
        print(f"Target {design.target!r}: numbers from {train[1].min():.6g} to {train[1].max():.6g}.{hint}")
    print(f"{len(train[0])} rows to learn from, {len(test[0])} held out; {train[0].shape[1]} inputs.", flush=True)
