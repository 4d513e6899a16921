"""``fspace reproduce``: its plan, its files, and that it goes on where it stopped."""

from __future__ import annotations

import json
import subprocess

import pytest

from numpyro_fspace import __version__
from numpyro_fspace.__main__ import main
from numpyro_fspace.experiments import reproduce
from numpyro_fspace.experiments.catalog import NAMES, find
from numpyro_fspace.experiments.records import run_of
from numpyro_fspace.experiments.reproduce import EXPERIMENTS, PLAN, planned


def test_the_plan_has_all_experiments_and_fits_into_half_a_day():
    assert tuple(name for name in PLAN if name not in EXPERIMENTS) == NAMES
    minutes = {name: len(planned(name)) * find(EXPERIMENTS.get(name, name)).minutes for name in PLAN}
    assert sum(minutes.values()) < 12 * 60, minutes
    assert all(len(planned(name, quick=True)) == len(PLAN[name]) for name in PLAN)


def test_a_page_of_runs_of_another_experiment():
    """The protocols are runs of the UCI experiment, whose commands the page had before."""
    job = planned("protocols")[-1]
    assert (job.dataset, job.method, job.config.train_share, job.config.widths) == (
        "bikesharing", "fsghmc", 0.7, (16, 16, 16),
    )  # fmt: skip
    assert {job.config.train_share for job in planned("protocols")} == {0.7, 0.8}


def test_no_run_is_planned_twice():
    for name in PLAN:
        runs = [(job.method, job.dataset, job.split, job.seed, job.config) for job in planned(name)]
        assert len(set(runs)) == len(runs), name


@pytest.mark.slow
def test_files_and_a_second_call(capsys, tmp_path):
    command = ["reproduce", "calibration", "--quick", "--out", str(tmp_path)]
    assert main(command) == 0
    said = capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "calibration.jsonl").read_text().splitlines()]
    assert len({run_of(line) for line in lines}) == len(PLAN["calibration"])
    for line in lines:
        assert line["version"] == __version__ and line["seconds"] > 0 and "cores" in line["machine"]
    assert (tmp_path / "calibration.md").read_text().strip() in said and "| data set | method |" in said
    assert main(command) == 0  # every run has a record
    assert "calibration: " not in capsys.readouterr().out
    assert len((tmp_path / "calibration.jsonl").read_text().splitlines()) == len(lines)


def test_what_cannot_be_run_is_said_and_the_rest_is_run(capsys, monkeypatch, tmp_path):
    """An experiment without its data is named at the end."""
    from numpyro_fspace.experiments import reproduce

    monkeypatch.setattr(reproduce, "run", failing)
    assert main(["reproduce", "ocean", "coverage", "--quick", "--out", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert "coverage: gp on" in out and "some experiments are not complete: ocean (no data)" in error
    assert main(["reproduce", "nothing", "--out", str(tmp_path)]) == 2
    assert "'nothing'" in capsys.readouterr().err


def failing(name, todo, done):
    if name == "ocean":
        raise OSError("no data")
    yield {"experiment": name, "method": "gp", "dataset": "prior", "split": 0, "seed": 0, "rmse": 1.0}


def test_the_commit_is_that_of_the_package_s_own_repository(tmp_path, monkeypatch):
    """And not that of a project in which it is installed."""
    package = tmp_path / "lib" / "package"
    package.mkdir(parents=True)
    (package / "reproduce.py").write_text("")

    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", "-C", tmp_path, *arguments], check=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "another project")
    monkeypatch.setattr(reproduce, "__file__", str(package / "reproduce.py"))
    assert reproduce.provenance.__wrapped__()["commit"] is None
    git("add", ".")
    git("commit", "-q", "-m", "the package")
    assert reproduce.provenance.__wrapped__()["commit"]
