"""The command ``fspace``, also as ``python -m numpyro_fspace``: ``fit``, ``predict``, ``demo``, ``list``, ``run``, …"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import sys

#: Largest number of splits, seeds or repeats.
MOST = 10**6


def main(argv: list[str] | None = None) -> int:
    """Run ``fspace`` with ``argv`` (None for the command line's arguments), and return the exit status."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter prints an error at exit
        return 141  # the status of a shell after a broken pipe
    except (ValueError, OSError, ImportError, RuntimeError, ArithmeticError) as error:
        print(f"fspace: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        continues = "; with --out the same command continues after the last record"
        print(f"fspace: interrupted{continues if args.run in (_run, _reproduce) else ''}", file=sys.stderr)
        return 130


def _parser():
    from numpyro_fspace import __version__
    from numpyro_fspace.benchmarks.device import DEVICE_PARTS
    from numpyro_fspace.benchmarks.ess import ESS_DATASETS, ESS_METHODS
    from numpyro_fspace.benchmarks.problems import SIZES
    from numpyro_fspace.experiments.catalog import NAMES, parse_setting

    parser = argparse.ArgumentParser(prog="fspace", description="Bayesian neural networks with priors over functions.")
    parser.add_argument("--version", action="version", version=f"fspace {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="a real series with and without a functional prior, in a minute or two")
    demo.add_argument("--out", type=_file, default="fspace-demo", help="folder of the picture and the netCDF file")
    demo.add_argument("--quick", action="store_true", help="a tiny run, to see that everything works")
    demo.set_defaults(run=_demo)

    fit = commands.add_parser("fit", help="fit the table of a CSV file: model, predictions, scores and pictures")
    fit.add_argument("data", type=_file, metavar="DATA.csv", help="fields between commas, semicolons or tabs")
    fit.add_argument("--target", required=True, metavar="COLUMN", help="the column to predict")
    fit.add_argument("--method", choices=("fsghmc", "fsgld"), default="fsghmc")
    fit.add_argument(
        "--noise",
        choices=("auto", "constant", "varying"),
        default="constant",
        help="of numbers: the same everywhere, or a function of the inputs (auto compares their evidence)",
    )
    fit.add_argument("--test-fraction", type=float, default=0.2, metavar="SHARE", help="held out at random (0.2)")
    fit.add_argument(
        "--categorical", nargs="+", action="extend", default=[], metavar="COLUMN", help="numbers as levels"
    )
    fit.add_argument("--drop", nargs="+", action="extend", default=[], metavar="COLUMN", help="columns to leave out")
    kind = fit.add_mutually_exclusive_group()
    kind.add_argument("--classes", action="store_true", default=None, help="the target is a class")
    kind.add_argument("--numbers", action="store_false", dest="classes", help="the target is a number")
    fit.add_argument("--decimal", choices=(".", ","), default=".", help="the decimal point")
    fit.add_argument("--draws", type=_count, default=200, help="of each chain, after as many of warm-up (200)")
    fit.add_argument("--chains", type=_count, default=2)
    fit.add_argument("--seed", type=int, default=0)
    fit.add_argument("--out", type=_file, default="fspace-fit", metavar="FOLDER", help="fspace-fit if not given")
    fit.set_defaults(run=_fit)

    predict = commands.add_parser("predict", help="predict the rows of a CSV file with the model of fspace fit")
    predict.add_argument("folder", type=_file, metavar="FOLDER", help="what fspace fit wrote")
    predict.add_argument("data", type=_file, metavar="NEW.csv")
    predict.add_argument("--decimal", choices=(".", ","), help="the decimal point (that of fspace fit)")
    predict.add_argument("--out", type=_file, default="predictions.csv", metavar="FILE")
    predict.set_defaults(run=_predict)

    listing = commands.add_parser("list", help="the experiments: what each asks, its data, methods and time")
    listing.set_defaults(run=_list)

    run = commands.add_parser("run", help="an experiment of the papers; one JSON record per run")
    run.add_argument("experiment", choices=NAMES)
    run.add_argument("--dataset", nargs="+", action="extend", help="data sets (default: the first)")
    run.add_argument("--method", nargs="+", action="extend", help="methods (default: some of them)")
    run.add_argument("--splits", type=_count, default=1, metavar="K", help="splits 0 to K-1 (uci)")
    run.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the run, and of the data (except uci)")
    run.add_argument("--seeds", type=_count, default=1, metavar="K", help="seeds S to S+K-1")
    run.add_argument(
        "--set",
        nargs="+",
        action="extend",
        type=parse_setting,
        default=[],
        metavar="NAME=VALUE",
        help="change the run's config",
    )
    run.add_argument("--quick", action="store_true", help="a tiny run, to see that everything works")
    run.add_argument(
        "--out", type=_file, metavar="FILE", help="append records to FILE; runs that it already has are skipped"
    )
    run.set_defaults(run=_run)

    reproduce = commands.add_parser("reproduce", help="the runs behind all tables of the documentation, resumable")
    reproduce.add_argument("names", nargs="*", metavar="NAME", help="experiments (default: all)")
    reproduce.add_argument("--quick", action="store_true", help="a few tiny runs, to see that everything works")
    reproduce.add_argument("--out", type=_file, default="fspace-results", metavar="FOLDER", help="of the files")
    reproduce.set_defaults(run=_reproduce)

    table = commands.add_parser("table", help="records as a table in Markdown, beside the published figures")
    table.add_argument("experiment", choices=NAMES)
    table.add_argument("records", nargs="+", metavar="FILE", help="what fspace run wrote with --out")
    table.set_defaults(run=_table)

    figure = commands.add_parser("figure", help="records as a picture")
    figure.add_argument("experiment", choices=NAMES)
    figure.add_argument("records", nargs="+", metavar="FILE", help="what fspace run wrote with --out")
    figure.add_argument("--out", type=_file, metavar="PICTURE", help="NAME.png if not given")
    figure.set_defaults(run=_figure)

    bench = commands.add_parser(
        "bench",
        help="speed: effective draws per second; times of a step (beside other libraries), a start, chains; a GPU",
    )
    bench.add_argument(
        "benchmark", choices=("chains", "device", "ess", "loop", "memory", "rows", "start", "steps", "svi")
    )
    bench.add_argument("--method", nargs="+", choices=ESS_METHODS, default=list(ESS_METHODS), help="methods of ess")
    bench.add_argument(
        "--size", nargs="+", choices=tuple(SIZES), default=list(SIZES), help="problem sizes of loop, memory and steps"
    )
    bench.add_argument("--dataset", nargs="+", choices=ESS_DATASETS, default=["boston"], help="data sets of ess")
    bench.add_argument("--exact", action="store_true", help="the functional prior of ess as a gp_network")
    bench.add_argument("--part", nargs="+", choices=tuple(DEVICE_PARTS), default=list(DEVICE_PARTS), help="of device")
    bench.add_argument("--repeats", type=_count, default=1, metavar="R")
    bench.add_argument("--quick", action="store_true", help="a tiny run, to see that everything works")
    bench.add_argument("--out", type=_file, metavar="FILE", help="append records to FILE instead of printing them")
    bench.set_defaults(run=_bench)
    return parser


def _count(text):
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, at least 1 and at most {MOST}")
    return int(text)


def _file(text):
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file")
    return os.path.expanduser(text)


def _demo(args):
    from numpyro_fspace.experiments.demo import run_demo

    _use_cores(2)
    run_demo(args.out, quick=args.quick)


def _fit(args):
    from numpyro_fspace.estimators.commands import fit_table

    _use_cores(args.chains)
    settings = {name: value for name, value in vars(args).items() if name not in ("run", "data", "out")}
    fit_table(args.data, args.out, **settings, progress=sys.stderr.isatty())


def _use_cores(chains):
    """One device of JAX's for each chain where there are cores for them, so that the chains run side by side."""
    import jax

    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has already started
            jax.config.update("jax_num_cpu_devices", max(1, min(chains, os.cpu_count() or 1)))


def _predict(args):
    from numpyro_fspace.estimators.commands import predict_table

    predict_table(args.folder, args.data, args.out, decimal=args.decimal)


def _list(args):
    from numpyro_fspace.experiments.catalog import NAMES, find

    for name in NAMES:
        experiment = find(name)
        print(f"{name}: {experiment.summary}")
        if len(experiment.datasets) > 1:
            print(f"    data sets: {', '.join(experiment.datasets)}")
        print(f"    data: {', '.join(experiment.files) or 'none (drawn at random)'}")
        print(f"    methods: {', '.join(experiment.methods)}")
        print(f"    time: about {experiment.minutes:g} min a run on one core")


def _table(args):
    from numpyro_fspace.experiments.catalog import find
    from numpyro_fspace.experiments.tables import table

    print(table(find(args.experiment), _records(args)))


def _figure(args):
    from numpyro_fspace.experiments.catalog import find

    picture = find(args.experiment).picture
    if picture is None:
        raise ValueError(f"{args.experiment} has no picture; see fspace table {args.experiment}.")
    path = args.out or f"{args.experiment}.png"
    picture(_records(args)).savefig(path, dpi=150, bbox_inches="tight")
    print(f"wrote {path}")


def _records(args):
    """The records of an experiment that the files hold."""
    from numpyro_fspace.experiments.records import distinct, read

    lines = [line for path in args.records for line in read(path)]
    return distinct(line for line in lines if line.get("experiment") == args.experiment)


def _bench(args):
    from numpyro_fspace.benchmarks.device import bench_device
    from numpyro_fspace.benchmarks.ess import bench_ess
    from numpyro_fspace.benchmarks.scale import NUM_ROWS, bench_chains, bench_memory, bench_rows, bench_start
    from numpyro_fspace.benchmarks.steps import bench_loop, bench_steps
    from numpyro_fspace.benchmarks.svi import bench_svi
    from numpyro_fspace.experiments.records import check, write

    if args.out is not None:
        check(args.out)  # raises an error before the first benchmark
    runs = {
        "chains": [bench_chains],
        "device": [functools.partial(bench_device, part) for part in args.part],
        "ess": [
            functools.partial(bench_ess, method, dataset=dataset, exact=args.exact)
            for dataset, method in itertools.product(args.dataset, args.method)
        ],
        "loop": [functools.partial(bench_loop, size) for size in args.size],
        "memory": [functools.partial(bench_memory, size) for size in args.size],
        "rows": [functools.partial(bench_rows, num_rows) for num_rows in (NUM_ROWS[:1] if args.quick else NUM_ROWS)],
        "start": [bench_start],
        "steps": [functools.partial(bench_steps, size) for size in args.size],
        "svi": [bench_svi],
    }
    for repeat, bench in itertools.product(range(args.repeats), runs[args.benchmark]):
        write(bench(repeat, quick=args.quick), args.out)


def _run(args):
    from numpyro_fspace.experiments.catalog import jobs, run
    from numpyro_fspace.experiments.records import check, read, write

    todo = jobs(
        args.experiment,
        methods=args.method,
        datasets=args.dataset,
        num_splits=args.splits,
        seeds=range(args.seed, args.seed + args.seeds),
        settings=dict(args.set),
        quick=args.quick,
        progress=sys.stderr.isatty(),
    )
    done = ()
    if args.out is not None:
        check(args.out)  # raises an error before the first run
        done = read(args.out)
    for record in run(args.experiment, todo, done):
        write(record, args.out)
        name = f"{record['method']} on {record['dataset']}, split {record['split']}, seed {record['seed']}"
        for line in record.get("advice") or []:
            print(f"fspace: {name}: {line}", file=sys.stderr)


def _reproduce(args):
    from numpyro_fspace.experiments.reproduce import PLAN, reproduce

    for line in reproduce(args.names or list(PLAN), args.out, quick=args.quick, progress=sys.stderr.isatty()):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
