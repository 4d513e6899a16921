"""The tables of the pages; ``cells.py`` says what a table is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from result_tables.cells import Column, Row, Table, count, joined, less, mean, of, one, published
from result_tables.rows import LABELS, WAYS, across, columns, grouped, rows, sets

W2 = "W2 to the GP"
GP_IS_EXACT = {W2: "0"}
KERNEL_LABELS = {
    "rbf": "rbf (0.25)",
    "matern12": "matern12 (0.25)",
    "periodic": "periodic",
    "rbf_short": "rbf_short (0.1)",
    "rbf_long": "rbf_long (0.5)",
}
CHANGES = (
    *("num_samples=8", "num_samples=75", "num_points=10", "num_points=40", "kernel=matern", "kernel=linear"),
    *("num_gp_steps=10", "warm_start=0.0", "anchored=False"),
)


def few(distance: float) -> int:
    """Three decimals of small distances, two of large ones."""
    return 3 if distance < 0.5 else 2


def uci(key: str, digits: int, *others: Column) -> Table:
    """A table of the UCI page."""
    methods = across(mean(key, digits), "gp_network calibrated sghmc fsgld gfsvi")
    process = Column(LABELS["gp"], mean(f"gp_{key}", digits), WAYS["calibrated"])
    return Table(
        "uci", ("data set",), [*methods, process, *others], sets("yacht boston energy concrete wine_red kin8nm")
    )


def protocol(train_share: float, *described: Row | str) -> Table:
    """A table of the page on protocols: rows "data set, method, noise" of runs, and rows of figures of others."""
    headings = [
        Column("splits", count),
        Column("RMSE", mean("rmse", 3)),
        Column("NLL", mean(less(None, "lpd"), 2)),
        Column("R-hat", one("rhat_max", 2, np.median)),
        Column("seconds", one("seconds", 0)),
    ]
    found = []
    for row in described:
        if isinstance(row, str):
            dataset, method, noise = row.split(", ")
            where = {"dataset": dataset, "method": method, "varying_noise": noise == "varying"}
            row = Row((dataset, LABELS[method], noise), where, {"seconds": ""} if method == "gp" else {})
        found.append(row._replace(where={**row.where, "train_share": train_share}))
    return Table("uci", ("data set", "method", "noise"), headings, found)


def others(dataset: str, method: str, noise: str, rmse: str, nll: str) -> Row:
    """Published figures of a method that the package does not have."""
    cells = {"splits": "", "RMSE": rmse, "NLL": nll, "R-hat": "", "seconds": ""}
    return Row((dataset, f"{method}, published", noise), {}, cells)


ABLATIONS = Table(
    "ablations",
    ("",),
    [
        Column("RMSE", mean("rmse")),
        Column("published", published("rmse")),
        Column("lpd", mean("lpd", 2)),
        Column("exact GP's lpd", mean("gp_lpd", 2)),
        Column("90 % interval covers", one("coverage90", 2)),
        Column(W2, mean("w2_gp")),
        Column("R-hat", one("rhat_max", 2)),
    ],
    [
        Row(("`fsghmc`",), {"dataset": "boston", "method": "fsghmc"}),
        *(Row((f"`{change}`",), {"dataset": "boston", "method": f"fsghmc:{change}"}) for change in CHANGES),
    ],
)
BANDIT = Table(
    "bandit",
    ("method",),
    [
        *(Column(f"p = {p}", mean("regret", 0), {"dataset": f"p{p}"}) for p in (0.4, 0.5, 0.6)),
        Column("poisonous eaten, p = 0.4", mean("eaten", 0), {"dataset": "p0.4"}),
        Column("edible rejected, p = 0.4", mean("rejected", 0), {"dataset": "p0.4"}),
        Column("seconds", one("seconds", 0, np.median)),
    ],
    [Row(("GP (500 features)",), {"method": "gp"}), *rows("sghmc fsghmc bbb greedy uniform")],
)
COVERAGE = Table(
    "coverage",
    ("method",),
    [
        Column("covers", joined(" ± ", one("coverage90"), one("coverage90_se"))),
        Column("difference from the GP", joined(" ± ", one(less("coverage90", "gp_coverage90")), one("difference_se"))),
        Column("near data, elsewhere", joined(", ", one("coverage90_seen"), one("coverage90_unseen"))),
        Column("mean width", one("width", 2)),
        Column("largest R-hat", one("rhat_max", 2)),
    ],
    [*rows("gp", cells={"difference from the GP": ""}), *rows("gp_network calibrated")],
    records="coverage",
)
CO2 = Table(
    "co2",
    ("method",),
    [
        Column("RMSE, ppm", one("rmse_raw", "#.3g")),
        Column("RMSE until 1985", one("rmse_seen", 3)),
        Column("lpd", one("lpd_raw", 2)),
        Column("coverage", one("coverage90", 3)),
        Column("sd of f, 2001", one("sd_end", 2)),
        Column(W2, one("w2_gp", 3)),
        Column("R-hat", one("rhat_max", 2)),
        Column("seconds", one("seconds", lambda seconds: 1 if seconds < 1 else 0)),
    ],
    [*rows("gp", cells=GP_IS_EXACT), *rows("gp_network calibrated sghmc")],
)
SAMPLERS = Table(
    "extrapolation",
    ("method",),
    [
        Column("RMSE", mean("rmse", 2)),
        Column("largest R-hat", one("rhat_max", 3, np.max)),
        Column("sd of f, data", one("sd_seen", 2)),
        Column("sd of f, no data", mean("sd_unseen", 2)),
        Column(W2, mean("w2_gp", few)),
    ],
    [
        *rows("gp_network"),
        Row(("fSGHMC, product of priors",), {"method": "fsghmc"}),
        Row(("fSGHMC, product, N(0, 1) weights",), {"method": "fsghmc", "weight_sd": 1.0}),
        Row(
            ("fSGHMC, product, N(0, 3²/fan-in) weights",), {"method": "fsghmc", "weight_sd": None, "weight_scale": 3.0}
        ),
        Row(("fSGLD, product of priors",), {"method": "fsgld"}),
        *rows("sghmc sgld"),
        Row(("SGHMC, N(0, 1) weights",), {"method": "sghmc", "weight_sd": 1.0}),
        Row(("SGHMC, N(0, 3²/fan-in) weights",), {"method": "sghmc", "weight_sd": None, "weight_scale": 3.0}),
        Row(
            ("exact GP",),
            {"method": "fsghmc"},
            GP_IS_EXACT
            | {"RMSE": mean("gp_rmse", 2), "largest R-hat": "", "sd of f, data": "", "sd of f, no data": ""},
        ),
    ],
)
OTHERS = Table(
    "extrapolation",
    ("method",),
    [
        *columns(one, 3, {"RMSE": "rmse"}),
        *columns(one, 2, {"sd of f, data": "sd_seen", "sd of f, no data": "sd_unseen"}),
        *columns(one, 3, {W2: "w2_gp"}),
    ],
    rows("gp gfsvi fvimc_kl svgp gwi fvimc fvi fbnn laplace ensemble ifbnn tfsvi bbb vip", seed=0),
)
IMAGES = Table(
    "images",
    ("data", "method"),
    [
        Column("error, %", one("error", 2)),
        Column("published", published("error")),
        *columns(one, 3, {"log probability": "lpd", "ECE": "ece", "OOD AUC": "ood_auc"}),
        Column("published", published("ood_auc")),
        Column("R-hat of the logits", one("rhat_max", 1)),
    ],
    grouped({data: rows("fsghmc sghmc gfsvi", dataset=data) for data in ("mnist", "fashion_mnist")}),
)
#: Methods that do not use the kernel.
OF_WEIGHTS = Row(
    ("TFSVI, BBB, Laplace",),
    {"dataset": "matern12"},
    {
        "RMSE to the truth": "as above",
        **dict.fromkeys(("lpd", "sd, data", "sd, no data"), ""),
        W2: joined(", ", *(of(one("w2_gp", few), method=method) for method in ("tfsvi", "bbb", "laplace"))),
    },
)
KERNELS = Table(
    "kernels",
    ("kernel", "method"),
    [
        Column("RMSE to the truth", one("rmse")),
        *columns(one, 2, {"lpd": "lpd", "sd, data": "sd_seen", "sd, no data": "sd_unseen"}),
        Column(W2, one("w2_gp", few)),
    ],
    grouped(
        {
            label: [
                *rows("gp", cells=GP_IS_EXACT, dataset=dataset),
                *rows("gp_network gfsvi", dataset=dataset),
                *(rows("tfsvi fbnn fvi bbb laplace", dataset=dataset) if dataset == "rbf" else []),
                *([OF_WEIGHTS] if dataset == "matern12" else []),
            ]
            for dataset, label in KERNEL_LABELS.items()
        }
    ),
)
LANGEVIN = Table(
    "langevin",
    ("data set", "method"),
    [
        *columns(one, 0, {"coordinates": "num_weights"}),
        *columns(one, "#.3g", {"acceptance": "acceptance", "to a tenth": "tenth"}),
        *columns(one, "#.3g", {"√KSD²": "ksd", "exact draws": "ksd_floor", "sd of f": "sd", "of the GP": "gp_sd"}),
        *columns(one, "#.3g", {W2: "w2_gp"}),
    ],
    grouped(
        {
            "n3_depth2": rows("function weight20 weight50 weight100 weight200 weight500", dataset="n3_depth2"),
            "n3_depth3": rows("function weight20 weight50 weight100", dataset="n3_depth3"),
        }
    ),
)
OCEAN = Table(
    "ocean",
    ("method",),
    [
        Column("MSE", mean("mse", None)),
        Column("published", published("mse")),
        Column("expected log-likelihood", mean("gibbs", None)),
        Column("published", published("gibbs")),
        Column("lpd", mean("lpd", None)),
        Column("coverage", one("coverage90")),
        Column(W2, mean("w2_gp", None)),
        Column("R-hat", one("rhat_max", 2)),
        Column("seconds", one("seconds", 0)),
    ],
    [*rows("gp", cells=GP_IS_EXACT, dataset="gulf"), *rows("fsghmc sghmc", dataset="gulf")],
)
OF_ROUGH = {"dataset": "airfoil", "exact": True, "kernel": "matern"}
EIGHTY = protocol(
    0.8,
    "airfoil, fsghmc, constant",
    "airfoil, fsghmc, varying",
    Row(("airfoil", "fSGHMC, `gp_network`, Matérn 5/2", "constant"), {"method": "fsghmc"} | OF_ROUGH),
    "airfoil, gp, ",
    Row(("airfoil", "exact GP, Matérn 5/2", ""), {"method": "gp"} | OF_ROUGH, {"seconds": ""}),
    others("airfoil", "bde", "varying", "0.1215", "−0.91"),
    others("airfoil", "TabPFN v2", "", "0.1359", "−0.93"),
    "bikesharing, fsghmc, varying",
    others("bikesharing", "bde", "varying", "0.2261", "−0.73"),
    others("bikesharing", "TabPFN v2", "", "0.2103", "−0.69"),
)
SEVENTY = protocol(
    0.7,
    "airfoil, fsghmc, constant",
    "airfoil, gp, ",
    "energy, fsghmc, constant",
    "energy, fsghmc, varying",
    "energy, gp, ",
    "bikesharing, fsghmc, constant",
)
TABULAR_OOD = Table(
    "tabular_ood",
    ("data set",),
    [
        *across(one("ood_accuracy", ".3g"), "gp"),
        Column("GP, published", published("ood_accuracy"), {"method": "gp"}),
        *across(one("ood_accuracy", ".3g"), "gp_network calibrated sghmc bbb"),
        Column("BBB, published", published("ood_accuracy"), {"method": "bbb"}),
    ],
    sets("boston yacht concrete energy wine_red"),
)
TWO_MOONS = Table(
    "two_moons",
    ("method",),
    [
        *columns(one, 3, {"accuracy": "accuracy", "log probability": "lpd", "Brier": "brier", "ECE": "ece"}),
        *columns(one, 3, {"entropy": "entropy", "entropy, far": "entropy_far"}),
        *columns(one, 2, {"R-hat": "rhat_max"}),
        *columns(one, 0, {"seconds": "seconds"}),
    ],
    [
        *rows("gp_network"),
        Row(("GP, Laplace approximation",), {"method": "gp"}),
        *rows("calibrated sghmc laplace bbb gfsvi tfsvi fvi fvimc"),
    ],
)
RMSE = uci("rmse", 3, Column("fSGHMC, published", published("rmse"), {"method": "fsghmc"}))
LPD = uci(
    "lpd",
    2,
    Column("R-hat, `gp_network`", one("rhat_max", 2, np.median), WAYS["gp_network"]),
    Column("R-hat, calibrated", one("rhat_max", 2, np.median), WAYS["calibrated"]),
)

#: The tables by page, and by their names there.
TABLES: Mapping[str, Mapping[str, Table]] = {
    "ablations": {"settings": ABLATIONS},
    "bandit": {"regret": BANDIT},
    "calibration": {"coverage": COVERAGE},
    "co2": {"methods": CO2},
    "extrapolation": {"samplers": SAMPLERS, "other methods": OTHERS},
    "images": {"methods": IMAGES},
    "kernels": {"kernels": KERNELS},
    "langevin": {"dynamics": LANGEVIN},
    "ocean": {"methods": OCEAN},
    "protocols": {"80 %": EIGHTY, "70 %": SEVENTY},
    "tabular_ood": {"accuracy": TABULAR_OOD},
    "two_moons": {"methods": TWO_MOONS},
    "uci": {"RMSE": RMSE, "lpd": LPD},
}
