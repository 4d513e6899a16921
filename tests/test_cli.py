"""The command line: records hold what they promise, mistakes are named."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from support.tiers import some

from numpyro_fspace.__main__ import main
from numpyro_fspace.benchmarks import scale
from numpyro_fspace.benchmarks.peers import contenders
from numpyro_fspace.benchmarks.problems import Size, data
from numpyro_fspace.experiments import methods, one_dimension, uci
from numpyro_fspace.experiments.catalog import NAMES, Job, find, jobs
from numpyro_fspace.experiments.records import KEYS, check, distinct, read, record, write
from numpyro_fspace.experiments.tables import table


def run(capsys, *argv):
    status = main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_gp_record_of_the_extrapolation(capsys):
    status, out, _ = run(capsys, "run", "extrapolation", "--method", "gp", "--seeds", "2", "--seed", "3")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [line["seed"] for line in lines] == [3, 4]
    for line in lines:
        assert set(KEYS) <= set(line)
        assert line["rmse"] == line["gp_rmse"] < 1.0
        assert line["w2_gp"] == 0.0
        assert line["rhat_max"] is None
        assert line["sd_unseen"] > line["sd_seen"]  # the GP knows less where there is no data


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # 100 draws of warm-up are few
def test_quick_sampler_record(capsys, tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    status, out, err = run(capsys, "run", "extrapolation", "--method", "fsghmc", "--quick", "--out", str(path))
    assert status == 0
    assert out == ""
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert line["method"] == "fsghmc"
    assert line["num_diverging"] == 0
    assert line["num_gradients"] == 20 * 200
    assert line["config"]["num_samples"] == 100
    assert line["finite"]
    assert 0.0 < line["acceptance"] <= 1.0
    assert line["noise_heat"] > line["noise_share"] > 0.0  # the points are drawn anew at every gradient
    assert line["advice"]  # so few draws cannot have converged
    assert all(text in err for text in line["advice"])
    assert line["version"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gfsvi", "tfsvi", "gwi", "fbnn", "fvi", "ifbnn", "bbb", "laplace", "vip"])
def test_quick_variational_record(capsys, method):
    status, out, _ = run(capsys, "run", "extrapolation", "--method", method, "--quick")
    assert status == 0
    line = json.loads(out)
    assert line["method"] == method
    assert line["num_gradients"] == 200
    assert line["finite"]
    assert line["rhat_max"] is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # M-stages of a few draws
@pytest.mark.parametrize("method", ["fvimc", "ensemble", "svgp"])
def test_quick_records_of_other_methods(capsys, monkeypatch, method):
    monkeypatch.setattr(methods, "NUM_STAGES", 3)  # five are run in test_fvimc.py
    status, out, _ = run(capsys, "run", "extrapolation", "--method", method, "--quick")
    line = json.loads(out)
    assert status == 0
    assert line["method"] == method
    assert line["finite"] and line["rmse"] < 2.0
    assert method != "fvimc" or line["num_gradients"] == 200, "stages share the gradients of a variational method"


@pytest.mark.slow
@pytest.mark.usefixtures("data_dir")
def test_uci_says_when_the_noise_has_left_its_prior():
    job = Job("gp", "boston", 0, 0, uci.CONFIG.quick())
    problem, exact = uci.fit_split(job)
    sigma = math.sqrt(problem.gp.noise_variance)

    def advice(factor, **settings):
        posterior = exact._replace(sigma=np.full((1, 5), factor * sigma), f=np.tile(exact.f_mean, (1, 5, 1)))
        return uci.results(job._replace(config=replace(job.config, **settings)), problem, posterior)["advice"]

    assert "advice" not in uci.results(job, problem, exact._replace(sigma=9.0 * sigma)), (
        "a GP has no prior of its noise"
    )
    assert advice(1.5) == []
    assert "sd of its prior below" in advice(0.2)[0] and "interpolates" in advice(0.2)[0]
    assert "above" in advice(3.0)[0] and "badly" in advice(3.0)[0]
    assert advice(3.0, noise_factor=3.0) == []


@pytest.mark.slow
@pytest.mark.usefixtures("data_dir")
def test_points_of_variational_methods(monkeypatch):
    """A distance that adds up over the points sees fewer of them."""
    job, seen = Job("gp", "boston", 0, 0, uci.CONFIG.quick()), {}
    uci.fit_split(job)  # the problem is remembered

    def fit(method, *rest, points, **settings):
        seen[method] = points.num_points

    monkeypatch.setattr(uci, "fit", fit)
    for method in ("gfsvi", "fvimc_kl", "gwi", "fvi", "fvimc"):
        uci.fit_split(job._replace(method=method))
    assert seen == {"gfsvi": 500, "fvimc_kl": 500, "gwi": 500, "fvi": 40, "fvimc": 40}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # 100 draws of warm-up are few
@pytest.mark.parametrize("method", ["gp", "fsghmc", "gfsvi", "laplace"])
def test_two_moons(capsys, method):
    status, out, _ = run(capsys, "run", "two_moons", "--method", method, "--quick")
    line = json.loads(out)
    assert status == 0
    assert line["accuracy"] > 0.8
    assert 0.0 < line["entropy"] < math.log(2.0)
    # Far from the data the process is undecided.
    assert method in ("laplace", "gfsvi") or line["entropy_far"] > line["entropy"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["two_moons", "--method", "svgp"], "no method 'svgp'; choose from sgld"),
        (["uci", "--method", "nonesuch"], "fsghmc"),
        (["uci", "--dataset", "iris"], "no dataset 'iris'; choose from yacht"),
        (["extrapolation", "--splits", "2"], "no splits of extrapolation beyond 1"),
        (["uci", "--dataset", "yacht", "protein", "--splits", "10"], "no splits of protein beyond 5"),
        (["uci", "--dataset", "yacht", "--dataset", "iris"], "no dataset 'iris'"),
        (["langevin", "--set", "activation=foo"], "activation='foo' is unknown"),
        (["bandit", "--set", "activation=foo"], "activation='foo' is unknown"),
    ],
)
def test_what_an_experiment_does_not_have(capsys, argv, text):
    status, _, err = run(capsys, "run", *argv)
    assert status == 2
    assert text in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["extrapolation", "two_moons"])
def test_records_to_table_and_figure(capsys, tmp_path, name):
    records, picture = str(tmp_path / "records.jsonl"), tmp_path / "picture.png"
    run(capsys, "run", name, "--method", "gp", "bbb", "--quick", "--out", records)
    _, text, _ = run(capsys, "table", name, records)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| " + name)]
    assert [row[1] for row in rows] == ["gp", "bbb"]
    status, text, _ = run(capsys, "figure", name, records, "--out", str(picture))
    assert status == 0
    assert str(picture) in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_reader_that_stops_is_no_error():
    command = [sys.executable, "-m", "numpyro_fspace", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141
    assert errors == ""


@pytest.mark.slow
def test_kernels_of_a_sine(capsys, tmp_path):
    """Each kernel's own exact posterior, and a picture with its name; a rough kernel knows least beside the data."""
    path, picture = str(tmp_path / "kernels.jsonl"), tmp_path / "kernels.png"
    names = ["rbf", "rbf_short", "rbf_long", "matern12", "periodic"]
    run(capsys, "run", "kernels", "--dataset", *names, "--method", "gp", "--out", path)
    run(capsys, "run", "kernels", "--dataset", "rbf", "--method", "gfsvi", "--quick", "--out", path)
    records = {(line["dataset"], line["method"]): line for line in read(path)}
    unseen = {name: records[name, "gp"]["sd_unseen"] for name in names}
    assert unseen["rbf_short"] > unseen["rbf"] > unseen["rbf_long"] > unseen["periodic"]
    assert unseen["matern12"] > unseen["rbf"]
    assert all(records[name, "gp"]["w2_gp"] == 0.0 for name in names)
    assert records["rbf", "gfsvi"]["finite"] and records["rbf", "gfsvi"]["w2_gp"] > 0.0
    status, _, _ = run(capsys, "figure", "kernels", path, "--out", str(picture))
    assert status == 0 and picture.read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_goes_on(capsys, tmp_path):
    """Records that are there already are left out; those of another config are not."""
    path = str(tmp_path / "records.jsonl")
    argv = ["run", "extrapolation", "--method", "gp", "--out", path, "--seeds"]
    run(capsys, *argv, "2")
    first = read(path)
    run(capsys, *argv, "3")
    assert read(path)[:2] == first
    assert [line["seed"] for line in read(path)] == [0, 1, 2]
    run(capsys, *argv, "1", "--set", "noise_factor=2.0")
    assert len(read(path)) == 4
    run(capsys, "run", "extrapolation", "--method", "gp", "gp", "--out", path, "--seeds", "4")  # named twice, run once
    assert len(read(path)) == 5
    for factor in ("3", "3.0"):  # the same number
        run(capsys, *argv, "1", "--set", f"noise_factor={factor}", "--set", "noise_sd=0.02")
    assert len(read(path)) == 6 and read(path)[-1]["config"]["noise_factor"] == 3.0


def test_a_file_that_cannot_be_written_is_an_error_before_any_run(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(one_dimension, "fit", lambda *args, **settings: pytest.fail("ran"))
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "records.jsonl")
    status, _, err = run(capsys, "run", "extrapolation", "--method", "fsghmc", "--out", path)
    assert status == 2 and str(tmp_path / "file") in err


@pytest.fixture
def runs_nothing(monkeypatch):
    monkeypatch.setattr(one_dimension, "fit", lambda *args, **settings: pytest.fail("ran"))


@pytest.mark.usefixtures("runs_nothing")
@pytest.mark.parametrize("command", [["run", "extrapolation", "--method", "gp"], ["bench", "svi", "--quick"]])
@pytest.mark.parametrize("kind", ["/dev/full", "/dev/null", "pipe", "folder", "", " "])
def test_what_keeps_no_records_is_refused_before_any_run(capsys, monkeypatch, tmp_path, command, kind):
    monkeypatch.setattr("numpyro_fspace.benchmarks.svi.bench_svi", lambda *args, **settings: pytest.fail("ran"))
    path = {"pipe": str(tmp_path / "pipe"), "folder": str(tmp_path)}.get(kind, kind)
    if kind == "pipe":
        os.mkfifo(path)
    try:
        status = main([*command, "--out", path])
    except SystemExit as exit_info:  # of the parser
        status = exit_info.code
    err = capsys.readouterr().err
    assert status == 2 and (
        "is not the name of a file" in err if not kind.strip() else "regular file" in err and path in err
    )


@pytest.mark.usefixtures("runs_nothing")
@pytest.mark.parametrize(
    "content",
    [
        b"my thesis",
        b"my thesis\n",
        b"{",
        b'{"a": 1}',
        b'{"a": 1}\n',
        b'{"experiment": "uci", "method": "gp"}\nmy notes',
        b'{"experiment": "uci", "method": "gp"}\nmy notes\n{"experiment": "uci", "method": "gp"}\n',
        b"\n",
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(capsys, tmp_path, content):
    path = tmp_path / "mine"
    path.write_bytes(content)
    status, _, err = run(capsys, "run", "extrapolation", "--method", "gp", "--out", str(path))
    assert status == 2 and "is no record of fspace" in err
    with pytest.raises(ValueError, match="is no record of fspace"):
        write({"method": "gp"}, path)
    assert path.read_bytes() == content


WRITER = """
import sys
from numpyro_fspace.experiments.records import write
for number in range(60):
    write({"experiment": "uci", "method": sys.argv[2], "seed": number, "text": sys.argv[2] * 3000}, sys.argv[1])
"""


@pytest.mark.slow
def test_six_writers_at_once_lose_nothing(tmp_path):
    """The first finds a line that was cut short; every record is whole, and those of a writer are in order."""
    path = tmp_path / "records.jsonl"
    write({"experiment": "uci", "method": "first"}, path)
    with path.open("ab") as file:
        file.write(b'{"experiment": "uci", "meth')
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in "abcdef"]
    assert [writer.wait(timeout=300) for writer in writers] == [0] * 6
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert lines == read(path) and len(lines) == 1 + 6 * 60
    for name in "abcdef":
        mine = [line for line in lines if line["method"] == name]
        assert [line["seed"] for line in mine] == list(range(60)) and {line["text"] for line in mine} == {name * 3000}


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_whole_records(tmp_path):
    """Or one that was cut short, which the next one takes away."""
    path = tmp_path / "records.jsonl"
    with subprocess.Popen([sys.executable, "-c", WRITER.replace("60", "10**9"), str(path), "a"]) as writer:
        while not path.exists() or path.stat().st_size < 100_000:
            assert writer.poll() is None
            time.sleep(0.001)
        writer.kill()
    write({"experiment": "uci", "method": "last"}, path)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line.get("seed") for line in lines] == [*range(len(lines) - 1), None]


@pytest.mark.parametrize(
    "first", [b"", b'{"experiment": "uci", "method": "gp"}\n', b'{"experiment": "uci", "method": "gp"}']
)
def test_a_record_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, first):
    path = tmp_path / "records.jsonl"
    path.write_bytes(first)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        write({"method": "two"}, path)
    assert path.read_bytes() == first


def test_a_record_that_is_there_twice_counts_once(capsys, tmp_path):
    """In one file or in two, in a table and in a picture."""
    common = {"experiment": "extrapolation", "dataset": "extrapolation", "method": "gp", "split": 0, "config": {}}
    lines = [record(**common, seed=seed, rmse=rmse) for seed, rmse in ((0, 0.1), (1, 0.3), (0, 0.9), (0, 0.1))]
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        for line in lines:
            write(line, path)
    _, text, _ = run(capsys, "table", "extrapolation", *map(str, paths))
    row = text.splitlines()[2]
    assert "| 2 |" in row and "0.20 ± 0.10" in row
    assert row in table(find("extrapolation"), lines)
    other = [line | {"version": "0"} for line in lines]
    assert len(distinct([*lines, *other])) == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # a dozen draws
@pytest.mark.parametrize(("method", "settings"), [("nuts", []), ("fsghmc", ["exact=True"])])
def test_nuts_and_exact_priors_have_fixed_points(capsys, method, settings):
    sizes = ["widths=(3,)", "num_warmup=10", "num_samples=10", "num_chains=2", *settings]
    status, out, _ = run(capsys, "run", "extrapolation", "--method", method, "--quick", "--set", *sizes)
    assert status == 0 and json.loads(out)["finite"]


class Started(Exception):
    """The chains of a run have started."""


@pytest.mark.parametrize("method", some(methods.SAMPLERS, 2))
def test_every_sampler_gets_a_model_that_it_can_sample(monkeypatch, method):
    """A functional one needs a functional prior, a microcanonical one fixed measurement points."""

    def start(mcmc, config, data, x_new, key):
        mcmc.sampler.init(key, config.num_warmup, None, data, {})
        raise Started

    monkeypatch.setattr(methods, "run_chains", start)
    (job,) = jobs("extrapolation", methods=[method], quick=True)
    with pytest.raises(Started):
        find("extrapolation").run(job)


@pytest.mark.slow
@pytest.mark.usefixtures("data_dir")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # a few draws
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("extrapolation", []),
        ("coverage", ["num_sets=1"]),
        ("two_moons", []),
        ("two_moons", ["calibrated=False"]),
        ("uci", ["exact=True"]),
    ],
)
def test_quick_records_of_microcanonical_dynamics(capsys, name, settings):
    sizes = ["widths=(3,)", "num_warmup=10", "num_samples=10", "num_chains=2", *settings]
    status, out, _ = run(capsys, "run", name, "--method", "fmclmc", "--quick", "--set", *sizes)
    assert status == 0 and json.loads(out)["num_gradients"] == 20 * 20


def test_a_table_has_means_errors_and_the_published(capsys):
    common = {"experiment": "uci", "dataset": "yacht", "method": "gfsvi", "seed": 0}
    lines = [
        record(**common, split=split, rmse=rmse, config={"widths": widths})
        for widths in ([10], [50, 50])
        for split, rmse in enumerate((0.1, 0.2, 0.3))
    ]
    text = table(find("uci"), lines)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[0] == ["data set", "method", "runs", "RMSE", "published"]
    assert rows[2] == ["yacht", "gfsvi, widths=[10]", "3", "0.200 ± 0.058", "0.055"]
    assert rows[3][1] == "gfsvi"  # 50 is the default
    assert "Cinquin" in text


def test_a_table_says_how_many_runs_a_figure_is_of():
    lines = [
        record(
            experiment="uci", dataset="yacht", method="fsghmc", split=split, seed=0, rmse=0.1, rhat_max=rhat, config={}
        )
        for split, rhat in enumerate((1.0, 1.02, math.nan))
    ]
    assert table(find("uci"), lines).splitlines()[2] == "| yacht | fsghmc | 3 | 0.1 | 0.25 | 1.010 ± 0.010 (2 of 3) |"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"experiment": "uci", "method": "gp"}', "no dataset"),
        ('{"experiment": "uci", "method": "gp", "dataset": null}', "no dataset"),
        ('{"experiment": "uci", "method": "gp", "dataset": "yacht", "rmse": "0.1"}', "rmse of a record is '0.1'"),
        ('{"method": "gp", "config": 3}', "is no record of fspace"),
        ('{"method": ["gp"]}', "is no record of fspace"),
        ('{"method": null}', "is no record of fspace"),
    ],
)
def test_a_table_of_incomplete_records_is_an_error(capsys, tmp_path, text, message):
    (tmp_path / "records.jsonl").write_text(text + "\n")
    status, _, err = run(capsys, "table", "uci", str(tmp_path / "records.jsonl"))
    assert status == 2 and message in err


def test_a_table_keeps_versions_apart():
    common = {"experiment": "uci", "dataset": "yacht", "method": "gp", "split": 0, "seed": 0, "config": {}}
    lines = [common | {"version": version, "rmse": rmse} for version, rmse in (("0.1", 0.3), ("0.2", 0.1))]
    rows = table(find("uci"), lines).splitlines()[2:4]
    assert "gp, version=0.1 | 1 | 0.3" in rows[0] and "gp, version=0.2 | 1 | 0.1" in rows[1]


@pytest.mark.parametrize(
    "text",
    [
        '{"experiment": "mine", "value": 3}',
        '{"experiment": "mine", "method": 3}',
        '{"benchmark": 1}\n{"x',
        '{"method": "GET"}\n{"method": "POST"}\n{"note": "three lines"}',
        '{"experiment": "uci", "method": "gp"}\n{"note": "mine"}',
        '{"experiment": "uci", "method": "gp"}\n{"x": 1, "y',
        '{"experiment": "mine", "val',
    ],
)
def test_files_that_resemble_records_are_not_changed(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    for append in (check, partial(write, {"experiment": "uci", "method": "gp"})):
        with pytest.raises(ValueError, match="is no record of fspace"):
            append(path)
    assert path.read_text() == text


def test_every_beginning_of_a_record_is_incomplete(tmp_path):
    first, line = (json.dumps(record(experiment='a "b"', method=m, curves={"c": [1.0]})) for m in ("gp", "mc"))
    path = tmp_path / "records.jsonl"
    for num in range(1, len(line)):
        path.write_text(f"{first}\n{line[:num]}")
        check(path)
        assert [one["method"] for one in read(path)] == ["gp"]
    for line in ('{"experiment": null, "dataset": "x"}', '{"benchmark": "steps", "size": "1d"}'):
        for num in range(line.index(" ") + 1, len(line)):
            path.write_text(line[:num])
            check(path)
            assert read(path) == []


def test_records_of_a_benchmark_are_no_experiment_s(capsys, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"benchmark": "ess", "method": "nuts"}\n')
    status, _, err = run(capsys, "table", "uci", str(path))
    assert status == 2 and "no records" in err


def test_files_that_hold_no_records(capsys, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("not json\n")
    status, _, err = run(capsys, "table", "uci", str(path))
    assert status == 2 and "line 1 is no record" in err
    path.write_text("")
    for command in ("table", "figure"):
        status, _, err = run(capsys, command, "extrapolation", str(path))
        assert status == 2 and "fspace run" in err


def test_a_record_that_was_cut_short_is_none(tmp_path):
    """Left by a writer that was killed; the next one begins where the last whole line ends."""
    path = tmp_path / "records.jsonl"
    write(record(experiment="uci", method="one"), path)
    with path.open("a") as file:
        file.write('{"experiment": "uci", "data')
    assert [line["method"] for line in read(path)] == ["one"]
    write(record(experiment="uci", method="two"), path)
    path.write_text(path.read_text().rstrip("\n"))  # an editor's
    write(record(experiment="uci", method="three"), path)
    assert [line["method"] for line in read(path)] == ["one", "two", "three"]


def test_the_list_tells_of_every_experiment(capsys):
    _, out, _ = run(capsys, "list")
    assert [line.split(":")[0] for line in out.splitlines() if not line.startswith(" ")] == list(NAMES)
    for name in NAMES:
        experiment = find(name)
        assert set(experiment.defaults) <= set(experiment.methods)
        assert {method for _, method in experiment.published} <= set(experiment.methods)
        assert {dataset for dataset, _ in experiment.published} <= set(experiment.datasets)
        assert {key for figures in experiment.published.values() for key in figures} <= set(experiment.columns)


@pytest.mark.slow
def test_uci_record_beside_the_gp(capsys, data_dir):
    status, out, _ = run(capsys, "run", "uci", "--dataset", "yacht", "--method", "gp", "--quick", "--splits", "2")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [line["split"] for line in lines] == [0, 1]
    assert all(line["rmse"] == line["gp_rmse"] < 0.2 for line in lines)
    assert all(abs(line["rmse_raw"] / line["rmse"] - 15.1) < 0.5 for line in lines)  # yacht's target has sd 15.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # 100 draws of warm-up are few
@pytest.mark.parametrize(
    "method",
    ["nuts", "blackjax_mclmc", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("fsghmc", "fmclmc"))],
)
def test_benchmark_of_effective_draws(capsys, data_dir, method):
    status, out, _ = run(capsys, "bench", "ess", "--quick", "--method", method)
    (line,) = [json.loads(text) for text in out.splitlines()]
    assert status == 0
    assert line["method"] == method
    assert line["num_gradients"] > 0
    assert line["ess_per_second"] == pytest.approx(line["ess_bulk_median"] / line["seconds"])


@pytest.mark.slow
def test_benchmark_of_variational_steps(capsys):
    status, out, _ = run(capsys, "bench", "svi", "--quick")
    line = json.loads(out)
    assert status == 0
    assert line["ratio"] == pytest.approx(line["gfsvi_ms"] / line["mean_field_ms"])


@pytest.mark.slow
def test_benchmark_of_steps(capsys):
    status, out, _ = run(capsys, "bench", "steps", "--size", "boston", "--quick")
    line = json.loads(out)
    assert status == 0
    assert line["num_parameters"] == 14 * 10 + 11 * 10 + 11
    assert {"sgld", "sghmc", "fsgld", "fsghmc", "blackjax_sgld", "blackjax_sghmc", "sgd"} <= set(line["us"])
    fastest = min(us for name, us in line["us"].items() if name.startswith(("blackjax", "posteriors")))
    assert line["faster_than_peers"]["sgld"] == pytest.approx(fastest / line["us"]["sgld"])


@pytest.mark.slow
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_other_libraries_run_on_values_and_classes(num_outputs):
    """Including those that are not installed everywhere."""
    problem = Size(4, (3,), num_outputs, 50, 5, 2)
    runs = contenders(problem, *data(problem))
    assert {"blackjax_sgld", "blackjax_sghmc", "sgd"} <= runs.keys()
    for name, run_once in runs.items():
        if name.startswith(("blackjax", "posteriors", "sgd")):
            run_once(jax.random.key(0))


@pytest.mark.slow
def test_benchmarks_compile_afresh(tmp_path):
    """No program of a benchmark comes from the persistent cache, or is left there; what comes after it is."""
    code = """if True:
        import jax, os
        from numpyro_fspace.benchmarks.problems import turns
        folder = os.environ["JAX_COMPILATION_CACHE_DIR"]
        fn = jax.jit(lambda k: jax.random.normal(k, (3,)) + 1.5)
        turns({"a": lambda key: jax.block_until_ready(fn(key))}, 0, quick=True)
        during = [f for f in os.listdir(folder) if "lambda" in f]
        jax.block_until_ready(jax.jit(lambda x: x * 2.5)(1.0))
        print(len(during), len([f for f in os.listdir(folder) if "lambda" in f]) > 0)
    """
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | cache, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "True"], done.stderr


@pytest.mark.slow
def test_benchmark_of_the_driver(capsys):
    status, out, _ = run(capsys, "bench", "loop", "--size", "boston", "--quick")
    line = json.loads(out)
    assert status == 0
    assert line["over_scan"].keys() == {"sgld", "sghmc", "fsgld", "fsghmc"}
    seconds = line["seconds"]["fsghmc"]
    assert line["over_scan"]["fsghmc"] == pytest.approx(seconds["mcmc"] / seconds["scan"])


@pytest.mark.slow
def test_benchmark_of_memory(capsys, monkeypatch):
    """Of two methods, as each takes a process of its own."""
    every, names = scale.contenders, ("fsghmc", "blackjax_sgld")
    monkeypatch.setattr(scale, "contenders", lambda *args: {name: every(*args)[name] for name in names})
    status, out, _ = run(capsys, "bench", "memory", "--size", "boston", "--quick")
    record = json.loads(out)
    assert status == 0 and tuple(record["mib"]) == names
    if Path("/proc/self/status").exists():
        assert all(mib > 0.0 for mib in record["mib"].values())
    assert record["mib_draws"] == 2 * 261 * 4 / 2**20


@pytest.mark.slow
def test_benchmark_of_rows_on_disk(capsys):
    status, out, _ = run(capsys, "bench", "rows", "--quick")
    line = json.loads(out)
    assert status == 0
    assert (line["num_rows"], line["batch_size"]) == (1000, 500)
    assert line["on_disk_over_in_memory"] == pytest.approx(line["us"]["on_disk"] / line["us"]["in_memory"])


@pytest.mark.slow
def test_benchmark_of_chains(capsys):
    status, out, _ = run(capsys, "bench", "chains", "--quick")
    line = json.loads(out)
    assert status == 0
    seconds = line["seconds_per_draw"]["1d"]
    assert line["over_one"]["1d"]["64"] == pytest.approx(seconds["64"] / seconds["1"])


@pytest.mark.slow
def test_benchmark_of_first_runs(capsys):
    status, out, _ = run(capsys, "bench", "start", "--quick")
    line = json.loads(out)
    assert status == 0
    assert all(line[f"{name}_seconds"] > 0.0 for name in ("cold", "warm", "import"))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["card", "cnn", "predict"])
def test_benchmark_of_an_accelerator(capsys, part):
    status, out, _ = run(capsys, "bench", "device", "--quick", "--part", part)
    line = json.loads(out)
    assert status == 0
    assert (line["part"], line["device"]) == (part, jax.devices()[0].device_kind)
    if part == "card":
        assert set(line["tflops"]) == {"float32", "float32_highest", "bfloat16"}
    if part == "cnn":
        ms = line["ms"]["float32"]
        assert line["throughput_of_sgd"]["float32"]["fsghmc"] == pytest.approx(ms["sgd"] / ms["fsghmc"])
    if part == "predict":
        seconds = line["predict_seconds"]
        assert line["over_passes"] == pytest.approx(seconds["predict"] / seconds["passes"])


@pytest.mark.slow
def test_benchmark_of_chains_divides_them_among_devices():
    """Two devices in the place of one: 64 chains are 32 on each."""
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    code = "from numpyro_fspace.__main__ import main; main(['bench', 'device', '--quick', '--part', 'chains'])"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | two, capture_output=True, text=True)
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["num_devices"] == 2
    assert line["ms_per_step"]["fsghmc"].keys() == {"1", "64"}


@pytest.mark.slow
def test_settings_change_the_config(capsys):
    argv = ["run", "extrapolation", "--method", "bbb", "--quick", "--set", "noise_factor=10", "activation=relu"]
    status, out, _ = run(capsys, *argv)
    assert status == 0
    config = json.loads(out)["config"]
    assert (config["noise_factor"], config["activation"]) == (10, "relu")


def test_a_prior_of_fixed_points_cannot_be_calibrated(capsys):
    status, _, err = run(capsys, "run", "extrapolation", "--set", "calibrated=True")
    assert status == 2 and "fixed measurement points" in err


@pytest.mark.parametrize("seed", ["-1", str(2**32), str(2**32 - 1), str(10**30)])
@pytest.mark.usefixtures("runs_nothing")
def test_seeds_have_a_key_of_their_own(capsys, seed):
    """JAX would give the key of another seed."""
    status, _, err = run(capsys, "run", "extrapolation", "--seed", seed, "--seeds", "2")
    assert status == 2 and "must lie between 0 and 4294967295" in err


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("nonesuch=1", "noise_factor"),
        ("activation=none", "relu"),
        ("widths=3", "widths=3 must be"),
        ("num_chains=2.5", "num_chains=2.5 must be"),
        ("num_steps=2.5", "num_steps=2.5 must be of type int"),
        ("noise_sd=None", "noise_sd=None must be of type float"),
        ("num_chains=0", "num_chains=0 must be positive"),
        ("num_chains=-3", "num_chains=-3 must be positive"),
        ("num_samples=0", "num_samples=0 must be positive"),
        ("num_warmup=-1", "num_warmup=-1 must be 0 or more"),
        ("num_steps=0", "num_steps=0 must be positive"),
        ("num_chains=True", "num_chains=True must be of type int"),
        ("num_chains=1" + 30 * "0", "at most 1e+09"),
        ("noise_sd=1e999", "noise_sd=inf must be positive and at most"),
        ("noise_sd=-1e999", "noise_sd=-inf must be positive"),
        ("noise_sd=nan", "noise_sd='nan' must be of type float"),
        ("noise_sd=0", "noise_sd=0 must be positive"),
        ("noise_sd", "noise_sd='' must be of type float"),
        ("learning_rate=1e-999", "learning_rate=0.0 must be positive"),
        ("warm_start=1.5", "warm_start=1.5 must be a fraction"),
        ("weight_scale_sd=-0.1", "weight_scale_sd=-0.1 must be 0 or more"),
        ("widths=(3,0)", "widths=0 must be positive"),
        ("widths=(3,2.5)", "widths=2.5 must be of type int"),
        ("widths=" + 1000 * "(", "must be of type tuple"),
        ("num_gp_steps=3", "extrapolation does not use the setting 'num_gp_steps'"),
    ],
)
@pytest.mark.usefixtures("runs_nothing")
def test_bad_settings_are_explained_before_any_run(capsys, setting, text):
    status, _, err = run(capsys, "run", "extrapolation", "--set", setting)
    assert status == 2
    assert text in err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # 100 draws of warm-up are few
def test_quick_records_of_coverage(capsys):
    status, out, _ = run(capsys, "run", "coverage", "--method", "gp", "fsghmc", "--quick")
    gp, ours = [json.loads(text) for text in out.splitlines()]
    assert status == 0
    assert gp["coverage90"] == gp["gp_coverage90"] == ours["gp_coverage90"]  # on the same data
    assert gp["config"]["num_sets"] == ours["config"]["num_sets"] == 3
    assert gp["rhat_max"] is None and gp["difference_se"] == 0.0
    assert ours["ess_min"] > 0.0 and ours["num_diverging"] == 0
    assert 0.5 < ours["width"] / ours["gp_width"] < 1.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.slow
def test_the_exact_prior_is_the_gps(capsys):
    """With ``exact=True`` the posterior is that of the Gaussian process, to what 400 draws tell."""
    status, out, _ = run(capsys, "run", "calibration", "--method", "fsghmc", "--quick", "--set", "exact=True")
    record = json.loads(out)
    assert status == 0
    assert record["w2_gp"] < 0.1 and abs(record["sd"] / record["gp_sd"] - 1) < 0.1


@pytest.mark.slow
def test_quick_records_of_calibration(capsys):
    status, out, _ = run(capsys, "run", "calibration", "--method", "gp", "fsghmc", "--quick")
    gp, ours = [json.loads(text) for text in out.splitlines()]
    assert status == 0
    assert gp["w2_gp"] == gp["mean_error"] == 0.0 and gp["sd"] == gp["gp_sd"] == ours["gp_sd"]
    assert 0.0 < ours["w2_gp"] < 2.0 * ours["gp_sd"]
    assert 0.5 < ours["sd"] / ours["gp_sd"] < 1.5 and ours["num_diverging"] == 0


@pytest.mark.nightly
def test_the_exact_posterior_covers(capsys):
    """Standard error .8 %; a band that is a tenth too narrow covers 86 %."""
    _, out, _ = run(capsys, "run", "coverage", "--method", "gp")
    assert 0.88 < json.loads(out)["coverage90"] < 0.92


def test_missing_data_is_explained(capsys, monkeypatch, tmp_path):
    from numpyro_fspace.experiments.uci import prepare

    prepare.cache_clear()  # another test may have loaded the same split
    monkeypatch.setenv("NUMPYRO_FSPACE_DATA", str(tmp_path / "absent"))
    status, _, err = run(capsys, "run", "uci", "--dataset", "boston", "--method", "gp", "--quick")
    assert status == 2
    assert "NUMPYRO_FSPACE_DATA" in err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["run", "nonesuch"], "extrapolation"),
        (["run", "uci", "--splits", "0"], "at least 1"),
        (["run", "uci", "--splits", "1e999"], "at least 1"),
        (["run", "uci", "--seeds", "-1"], "at least 1"),
        (["run", "uci", "--seeds", str(10**12)], "at most 1000000"),
        (["run", "uci", "--seed", "nan"], "invalid int"),
        (["bench", "svi", "--repeats", "2.5"], "at least 1"),
        ([], "COMMAND"),
    ],
)
def test_unknown_words_list_the_known(capsys, argv, text):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_records_keep_their_keys_in_order_and_nan_is_null(tmp_path):
    line = record(method="gp", rmse=math.nan, extra=1)
    assert tuple(line)[: len(KEYS)] == KEYS
    assert line["rmse"] is None
    assert line["extra"] == 1
    for _ in range(2):
        write(line, tmp_path / "records.jsonl")
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2


def test_published_figures_are_those_of_the_published_splits():
    common = {"experiment": "uci", "dataset": "yacht", "method": "gfsvi", "seed": 0, "rmse": 0.1}
    random, whole = (
        [record(**common, split=split, config=config) for split in range(2)]
        for config in ({"train_share": 0.7, "widths": [10]}, {"widths": [10]})
    )
    text = table(find("uci"), random)
    assert "0.055" not in text and text.endswith("All runs: train_share=0.7, widths=[10].")
    assert "0.055" in table(find("uci"), whole)


def test_random_splits_are_more_than_those_published():
    shares = {"settings": {"train_share": 0.8}}
    assert len(jobs("uci", methods=["gp"], datasets=["protein"], num_splits=10, **shares)) == 10
    with pytest.raises(ValueError, match="no splits of protein beyond 5"):
        jobs("uci", methods=["gp"], datasets=["protein"], num_splits=10)


def test_only_commands_that_continue_say_so(capsys, monkeypatch, tmp_path):
    from numpyro_fspace.estimators import commands

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "fit_table", interrupted)
    monkeypatch.setattr(one_dimension, "fit", interrupted)
    status, _, err = run(capsys, "fit", str(tmp_path / "data.csv"), "--target", "y")
    assert status == 130 and err == "fspace: interrupted\n"
    status, _, err = run(capsys, "run", "extrapolation", "--method", "fsghmc", "--out", str(tmp_path / "records.jsonl"))
    assert status == 130 and "the same command continues after the last record" in err
