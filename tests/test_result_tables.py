"""The tables of the results pages are what the records give."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from numpyro_fspace.experiments.records import read, record

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "results"


@pytest.fixture(scope="module")
def program():
    """The script, which finds its modules beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        spec = importlib.util.spec_from_file_location("result_tables_program", DOCS / "result_tables.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def cells(program):
    """What a cell can show."""
    from result_tables import cells

    return cells


@pytest.fixture
def folder(program, tmp_path, monkeypatch):
    """A copy of the pages and records, in place of those of the repository."""
    for path in (*RESULTS.glob("*.md"), *RESULTS.glob("*.jsonl")):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(program, "PAGES", tmp_path)
    return tmp_path


def change(path, method, **figures):
    """Change figures of the first record of a method; without figures, remove its records."""
    lines = read(path)
    if figures:
        next(line for line in lines if line["method"] == method).update(figures)
    else:
        lines = [line for line in lines if line["method"] != method]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def runs_of(cells, *figures):
    """Runs of Langevin dynamics with these figures, one for each seed."""
    named = {"experiment": "langevin", "dataset": "n3_depth2", "method": "function", "split": 0}
    lines = [record(**named, seed=seed, rmse=figure, config={}) for seed, figure in enumerate(figures)]
    return cells.Runs(lines, {"experiment": "langevin", "dataset": "n3_depth2", "method": "function"})


def test_pages_have_the_tables_of_the_records(program, capsys):
    """On all pages; every page of a file of records has a table."""
    assert program.main(["--check"]) == 0, capsys.readouterr().out
    named = {path.stem for path in RESULTS.glob("*.jsonl")} & {path.stem for path in RESULTS.glob("*.md")}
    assert named | {"calibration"} == set(program.TABLES)


@pytest.mark.parametrize(
    ("page", "records", "method", "figures", "row"),
    [
        ("co2", "co2", "gp", {"rmse_raw": 1.5}, "| exact GP | 1.50 | 0.386 |"),
        ("two_moons", "two_moons", "gfsvi", {"lpd": -0.25}, "| GFSVI | 0.986 | −0.250 |"),
        ("calibration", "coverage", "gp", {"coverage90": 0.75}, "| exact GP | 0.750 ± 0.016 |"),
        ("bandit", "bandit", "uniform", {"regret": 12345.0}, "| uniform | 12 345 | 49 440 |"),
    ],
)
def test_a_changed_figure_is_found_and_written(program, folder, capsys, page, records, method, figures, row):
    """In its cell; nothing else on the page changes, and the page is then as the records give it."""
    change(folder / f"{records}.jsonl", method, **figures)
    before = (folder / f"{page}.md").read_text()
    assert program.main(["--check", page]) == 1
    difference = capsys.readouterr().out
    assert f"+{row}" in difference and difference.count("\n+|") == difference.count("\n-|") == 1
    assert (folder / f"{page}.md").read_text() == before
    assert program.main([page]) == 0
    after = (folder / f"{page}.md").read_text()
    changed = [(old, new) for old, new in zip(before.split("\n"), after.split("\n"), strict=True) if old != new]
    assert len(changed) == 1 and changed[0][1].startswith(row)
    assert program.main(["--check", page]) == 0


def test_records_of_another_folder(program, tmp_path, capsys):
    shutil.copy(RESULTS / "co2.jsonl", tmp_path)
    assert program.main(["co2", "--check", "--records", str(tmp_path)]) == 0
    change(tmp_path / "co2.jsonl", "gp", lpd_raw=2.0)
    assert program.main(["co2", "--check", "--records", str(tmp_path)]) == 1
    assert "+| exact GP | 0.811 | 0.386 | 2.00 |" in capsys.readouterr().out


def test_missing_records_leave_empty_cells(program, folder, capsys):
    """Of a method, and of a whole page, which keeps its published figures."""
    change(folder / "co2.jsonl", "sghmc")
    (folder / "protocols.jsonl").unlink()
    (folder / "ocean.jsonl").write_text("")
    assert program.main([]) == 0
    lines = {name: (folder / f"{name}.md").read_text().split("\n") for name in ("co2", "protocols", "ocean")}
    assert "| SGHMC |" + "  |" * 8 in lines["co2"]
    assert "| airfoil | fSGHMC | varying |" + "  |" * 5 in lines["protocols"]
    assert "| airfoil | bde, published | varying |  | 0.1215 | −0.91 |  |  |" in lines["protocols"]
    assert "| exact GP |  | 0.013 |  | −0.507 |  |  | 0 |  |  |" in lines["ocean"]


def test_an_unknown_page_is_an_error(program, capsys):
    with pytest.raises(SystemExit, match="2"):
        program.main(["co2", "co3"])
    assert "unknown page co3; choose from ablations, bandit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- table: methods -->", "<!-- table: method -->", "'method' is not described"),
        ("<!-- end of table -->", "", "does not follow it"),
        ("<!-- table: methods -->", "", r"has the tables \[\]"),
    ],
)
def test_pages_without_their_tables_are_refused(program, folder, old, new, message):
    """So that no prose is ever taken for a table."""
    page = folder / "co2.md"
    text = page.read_text().replace(old, new)
    page.write_text(text)
    with pytest.raises(ValueError, match=message):
        program.main(["co2"])
    assert page.read_text() == text


def test_two_records_of_a_run_are_refused(program, folder):
    """Of two versions or settings it is not clear which one the page means; equal ones count once."""
    path = folder / "co2.jsonl"
    last = path.read_text().splitlines()[-1]
    path.write_text(path.read_text() + last + "\n")
    assert program.main(["--check", "co2"]) == 0
    path.write_text(path.read_text() + json.dumps(json.loads(last) | {"version": "9.9"}) + "\n")
    with pytest.raises(ValueError, match="several records"):
        program.main(["co2"])


def test_runs_are_told_apart_by_settings(cells):
    """A setting that no condition names has its default; so does one that a record lacks."""
    line = {"experiment": "uci", "dataset": "yacht", "method": "fsghmc", "split": 0, "seed": 0}
    lines = [line | {"config": config} for config in ({}, {"exact": True}, {"kernel": "matern"}, {"train_share": 0.8})]
    where = {"experiment": "uci", "dataset": "yacht", "method": "fsghmc"}
    for settings in ({}, {"exact": True}, {"kernel": "matern"}, {"train_share": 0.8}):
        assert [found["config"] for found in cells.Runs(lines, where | settings).lines()] == [settings]
    assert cells.Runs(lines, where | {"exact": True, "kernel": "matern"}).lines() == []


def test_what_cells_show(cells):
    runs = runs_of(cells, 1.0, 2.0, 6.0)  # a standard error of sqrt(7 / 3) = 1.5275
    assert cells.mean("rmse", 2)(runs) == "3.00 ± 1.53" and cells.mean("rmse", None)(runs) == "3 ± 2"
    assert cells.one("rmse", 1)(runs) == "3.0" and cells.one("rmse", 1, max)(runs) == "6.0"
    assert cells.mean(cells.less(None, "rmse"), 1)(runs) == "−3.0 ± 1.5"
    assert cells.one(cells.less("rmse", "split"), 0)(runs) == "3" and cells.count(runs) == "3"
    assert cells.joined(", ", cells.one("rmse", 0), cells.count)(runs) == "3, 3"
    assert cells.joined(", ", cells.one("lpd", 0), cells.count)(runs) == ""
    assert cells.of(cells.one("rmse", 0), seed=2)(runs) == "6"
    partly = runs_of(cells, 0.5, None, 0.504)  # a standard error of 0.002
    assert cells.mean("rmse", None)(partly) == "0.502 ± 0.002" and cells.count(partly) == "3"
    assert cells.mean("rmse", None)(runs_of(cells, 0.5, 0.5)) == "0.500"
    assert cells.mean("rmse", 2)(runs_of(cells, 0.5)) == "0.50"


def test_numbers(cells):
    assert cells.number(-0.004, 2) == "0.00" and cells.number(-0.72, 2) == "−0.72"
    assert cells.number(9999.0, 0) == "9999" and cells.number(10_000.0, 0) == "10 000"
    assert cells.number(7.5 - 1e-13, 0) == "8"  # as 7.5, and not as 7.4999
    assert cells.number(1234.5, ".3g") == "1.23e+03" and cells.number(0.7, "#.3g") == "0.700"
