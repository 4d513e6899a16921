"""The command ``fspace``: ``fspace demo``, ``fspace run``, ``fspace figure``, ``fspace bench``."""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import sys

__all__ = ["main"]

EXPERIMENTS = ("extrapolation", "calibration", "coverage", "uci", "two_moons")


def main(argv: list[str] | None = None) -> int:
    """Run ``fspace`` with ``argv`` (the command line's if None); the exit status."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"fspace: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fspace: interrupted; records written so far are kept", file=sys.stderr)
        return 130


def _parser():
    from numpyro_fspace import __version__
    from numpyro_fspace.datasets import UCI_NAMES
    from numpyro_fspace.experiments.bench import ESS_METHODS
    from numpyro_fspace.experiments.figures import FIGURES
    from numpyro_fspace.experiments.methods import METHODS
    from numpyro_fspace.experiments.steps import SIZES

    parser = argparse.ArgumentParser(prog="fspace", description="Bayesian neural networks with priors over functions.")
    parser.add_argument("--version", action="version", version=f"fspace {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="a real regression end to end, in about two minutes")
    demo.add_argument("--out", default="fspace-demo", help="folder of the picture and the netCDF file")
    demo.add_argument("--quick", action="store_true", help="a tiny run, to see that everything works")
    demo.set_defaults(run=_demo)

    run = commands.add_parser("run", help="an experiment of the papers; one JSON record per run")
    run.add_argument("experiment", choices=EXPERIMENTS)
    run.add_argument("--dataset", nargs="+", choices=UCI_NAMES, default=["yacht"], help="of uci")
    run.add_argument("--method", nargs="+", choices=METHODS, default=["fsghmc"])
    run.add_argument("--splits", type=_positive, default=1, metavar="K", help="splits 0 to K-1 (uci)")
    run.add_argument("--sets", type=_positive, default=200, metavar="K", help="data sets of a record (coverage)")
    run.add_argument("--seed", type=int, default=0, metavar="S", help="of the run; of the data (but uci)")
    run.add_argument("--seeds", type=_positive, default=1, metavar="K", help="seeds S to S+K-1")
    run.add_argument(
        "--set", nargs="+", type=_setting, default=[], metavar="NAME=VALUE", help="change the run's config"
    )
    run.add_argument("--quick", action="store_true", help="a tiny run, to see that everything works")
    run.add_argument("--out", metavar="FILE", help="append records to FILE instead of printing them")
    run.set_defaults(run=_run)

    figure = commands.add_parser("figure", help="what methods make of a toy problem, a panel for each")
    figure.add_argument("figure", choices=tuple(FIGURES))
    figure.add_argument("--method", nargs="+", choices=METHODS, default=["gp", "fsghmc", "gfsvi"])
    figure.add_argument("--seed", type=int, default=0, metavar="S")
    figure.add_argument("--set", nargs="+", type=_setting, default=[], metavar="NAME=VALUE", help="change the config")
    figure.add_argument("--quick", action="store_true", help="tiny runs, to see that everything works")
    figure.add_argument("--out", metavar="FILE", help="the picture; NAME.png if not given")
    figure.set_defaults(run=_figure)

    bench = commands.add_parser("bench", help="effective draws of f per second; the time of a step beside others'")
    bench.add_argument("benchmark", choices=("ess", "steps", "svi"))
    bench.add_argument("--method", nargs="+", choices=ESS_METHODS, default=list(ESS_METHODS), help="of ess")
    bench.add_argument("--size", nargs="+", choices=tuple(SIZES), default=list(SIZES), help="of steps")
    bench.add_argument("--repeats", type=_positive, default=1, metavar="R")
    bench.add_argument("--quick", action="store_true", help="a tiny run, to see that everything works")
    bench.add_argument("--out", metavar="FILE", help="append records to FILE instead of printing them")
    bench.set_defaults(run=_bench)
    return parser


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _setting(text):
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a word


def _demo(args):
    from numpyro_fspace.experiments.demo import run_demo

    run_demo(args.out, quick=args.quick)
    return 0


def _figure(args):
    from numpyro_fspace.experiments.figures import FIGURES, draw_figure

    config = FIGURES[args.figure][0].CONFIG.updated(dict(args.set))
    out = args.out or f"{args.figure}.png"
    draw_figure(args.figure, args.method, args.seed, out, config=config, quick=args.quick)
    print(f"wrote {out}")
    return 0


def _bench(args):
    from numpyro_fspace.experiments.bench import bench_ess, bench_svi
    from numpyro_fspace.experiments.records import write
    from numpyro_fspace.experiments.steps import bench_steps

    runs = {
        "ess": [functools.partial(bench_ess, method) for method in args.method],
        "steps": [functools.partial(bench_steps, size) for size in args.size],
        "svi": [bench_svi],
    }
    for repeat, bench in itertools.product(range(args.repeats), runs[args.benchmark]):
        write(bench(repeat, quick=args.quick), args.out)
    return 0


def _run(args):
    from numpyro_fspace.experiments import calibration, coverage, extrapolation, two_moons, uci
    from numpyro_fspace.experiments.records import write

    module = dict(zip(EXPERIMENTS, (extrapolation, calibration, coverage, uci, two_moons), strict=True))[
        args.experiment
    ]
    config = module.CONFIG.updated(dict(args.set))
    options = {"config": config, "quick": args.quick, "progress": sys.stderr.isatty()}
    if module is coverage:
        options["num_sets"] = args.sets

    def finish(record):
        write(record, args.out)
        name = f"{record['method']} on {record['dataset']}, split {record['split']}, seed {record['seed']}"
        for line in record.get("advice") or []:
            print(f"fspace: {name}: {line}", file=sys.stderr)

    for seed in range(args.seed, args.seed + args.seeds):
        if module is not uci:
            for method in args.method:
                finish(module.run_seed(method, seed, **options))
            continue
        for dataset, split, method in itertools.product(args.dataset, range(args.splits), args.method):
            finish(uci.run_split(dataset, method, split, seed, **options))
    return 0
