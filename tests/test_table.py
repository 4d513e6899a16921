"""Tables of one's own: what a CSV file's columns are, what is said of them, and errors before anything is computed."""

import importlib.util
import re

import numpy as np
import pytest

from numpyro_fspace.__main__ import main
from numpyro_fspace.estimators.csv_file import read_csv
from numpyro_fspace.estimators.table import Design, read_design

ROWS = 30


def labels(design):
    """The names of the inputs."""
    return [label for column in design.columns for label in column.labels]


def written(tmp_path, columns, name="data.csv", separator=","):
    """A file with these columns, lists of text or numbers."""
    lines = [separator.join(columns)]
    lines += [separator.join(str(v) for v in row) for row in zip(*columns.values(), strict=True)]
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def table(**more):
    """A number, and further columns."""
    return {"a": list(range(ROWS)), **more, "y": [0.5 * i for i in range(ROWS)]}


def design_of(path, **options):
    return read_design(read_csv(path), "y", **options)[:3]


def test_numbers_levels_and_dates(tmp_path):
    columns = table(
        color=["red", "blue", "green"] * 10,
        flag=["True", "False"] * 15,
        day=[f"2020-01-{i + 1:02d}" for i in range(ROWS)],
        same=[7] * ROWS,
        empty=[""] * ROWS,
    )
    design, x, y = design_of(written(tmp_path, columns))
    assert [label for column in design.columns for label in column.labels] == [
        "a",
        "color=blue",
        "color=green",
        "color=red",
        "flag=True",
        "day",
    ]
    assert not design.is_classes
    np.testing.assert_array_equal(x[1], [1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    np.testing.assert_array_equal(x[:, -1], np.arange(ROWS))
    np.testing.assert_array_equal(y, 0.5 * np.arange(ROWS))
    said = " ".join(design.said)
    for words in ("'color' is categorical: 3 levels", "'day' holds dates", "days since 2020-01-01", "'empty' is empty"):
        assert words in said
    assert "'same' is the same in all rows" in said
    assert Design.from_dict(design.to_dict()) == design


def test_days_before_months_and_tabs(tmp_path):
    days = [f"{i + 1:02d}/03/2020" for i in range(ROWS)]
    design, x, _ = design_of(written(tmp_path, table(day=days), separator="\t"))
    assert design.columns[1].date_format == "%d/%m/%Y" and np.diff(x[:, 1]).tolist() == [1.0] * (ROWS - 1)


def predicted_inputs(design, text, tmp_path, decimal="."):
    """The inputs of new rows, of the text of a file."""
    path = tmp_path / "new.csv"
    path.write_text(text)
    return design.inputs(read_csv(path, decimal))


def test_the_order_of_day_and_month_is_that_of_the_training_rows(tmp_path):
    """A new row's date must not depend on the other rows of its file."""
    first = np.datetime64("2020-01-13")
    days = [str(first + 3 * i) for i in range(ROWS)]
    turned = ["/".join(reversed(day.split("-"))) for day in days]
    design, x, _ = design_of(written(tmp_path, table(when=turned)))
    np.testing.assert_array_equal(x[:, 1], 3.0 * np.arange(ROWS))
    for rows in (["05/02/2020", "06/02/2020"], ["06/02/2020", "25/02/2020"], ["25/02/2020", "06/02/2020"]):
        found = predicted_inputs(design, "a,when\n" + "".join(f"1,{row}\n" for row in rows), tmp_path)[:, 1]
        right = [np.datetime64("-".join(reversed(row.split("/")))) - first for row in rows]
        np.testing.assert_array_equal(found, np.array(right).astype(float))
    assert np.isnan(predicted_inputs(design, "a,when\n1,2020-02-05\n", tmp_path)[0, 1])  # another format


def test_dates_that_could_be_read_in_either_order(tmp_path):
    days = [f"{i % 12 + 1:02d}/{i % 9 + 1:02d}/2020" for i in range(ROWS)]
    design, *_ = design_of(written(tmp_path, table(when=days)))
    assert any("(%m/%d/%Y, month first, where all could be read day first too)" in said for said in design.said)


@pytest.mark.parametrize("cell", ["1-3", "10-20", "1 234", "5 kg", "1.2.3", "1/2", "2020 Q1", "Room 12"])
def test_text_with_digits_is_no_date(cell, tmp_path):
    design, *_ = design_of(written(tmp_path, table(what=[cell, "other 1.2", "third 3-4"] * 10)))
    assert design.columns[1].kind == "levels"


def test_points_between_thousands_and_decimal_commas(tmp_path):
    prices = ["950", "1.234", "2.500,75", "870", "12.000"] * 6
    path = written(tmp_path, {"price": prices, "y": list(range(ROWS))}, separator=";")
    design, x, _, _ = read_design(read_csv(path, ","), "y")
    np.testing.assert_array_equal(x[:5, 0], [950.0, 1234.0, 2500.75, 870.0, 12000.0])
    assert predicted_inputs(design, "price;b\n1.500;1\n", tmp_path, ",")[0, 0] == 1500.0
    path = written(tmp_path, {"price": ["1,5", "2.25", "3,5"] * 10, "b": [1] * ROWS}, separator=";")
    with pytest.raises(ValueError, match=r"column 'price' holds '2.25' in line 3 .*, with a decimal point"):
        read_csv(path, ",")
    with pytest.raises(ValueError, match=r"decimal commas \('1.234,56'\): say --decimal ','"):
        design_of(written(tmp_path, table(price=["1.234,56", "2.345,67"] * 15), separator=";"))
    with pytest.raises(ValueError, match=r"holds '1,234': remove commas between thousands, or, .* --decimal ','"):
        design_of(written(tmp_path, table(price=["1,234", "950", "12,000"] * 10), separator=";"))


@pytest.mark.parametrize("cells", [["0.5", "0.25", "0.123"], ["0.037", "0.038"], ["1.143e+00", "2,5"]])
def test_a_decimal_point_beside_decimal_commas_is_refused(cells, tmp_path):
    """None of these points stands between thousands."""
    path = written(tmp_path, {"c": [cells[i % len(cells)] for i in range(ROWS)], "b": [1] * ROWS}, separator=";")
    with pytest.raises(ValueError, match=r"column 'c' holds '.*' in line \d+ .*, with a decimal point: correct it"):
        read_csv(path, ",")


def test_decimal_commas_of_new_rows_are_those_of_the_training_rows(tmp_path):
    """Levels stay text and numbers are numbers, whatever most cells of the new file are."""
    sizes = ["S", "M", "L", "38,5"] * 10
    path = written(tmp_path, {"size": sizes, "c": ["1,5", "2,5"] * 20, "y": list(range(40))}, separator=";")
    design, *_ = read_design(read_csv(path, ","), "y")
    assert design.columns[0].levels == ("38,5", "L", "M", "S") and design.numbers == ["c", "y"]
    new = tmp_path / "new.csv"
    new.write_text("size;c\n38,5;2,5\n38,5;7\n")
    x = design.inputs(read_csv(new, ",", numbers=design.numbers))
    np.testing.assert_array_equal(x, [[1.0, 0.0, 0.0, 0.0, 2.5], [1.0, 0.0, 0.0, 0.0, 7.0]])


def test_levels_with_decimal_commas_are_the_same_in_new_rows(tmp_path):
    path = written(tmp_path, {"size": ["38,5", "40", "41,5"] * 10, "y": list(range(30))}, separator=";")
    design, *_ = read_design(read_csv(path, ",", text=["size"]), "y", categorical=["size"])
    new = tmp_path / "new.csv"
    new.write_text("size;other\n38,5;a\n40;a\n")
    x = design.inputs(read_csv(new, ",", numbers=design.numbers))
    assert [design.columns[0].levels[i] for i in x.argmax(1)] == ["38,5", "40"] and x.sum() == 2.0


def test_a_table_of_one_column_with_decimal_commas(tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("a\n3,5\n7\n")
    assert read_csv(path, ",")["a"].tolist() == ["3.5", "7"]


def test_text_with_points_stays_beside_decimal_commas(tmp_path):
    path = written(tmp_path, {"c": ["192.168.100.100", "host", "1.5.2"] * 10, "b": [1] * 30}, separator=";")
    assert read_csv(path, ",")["c"][:3].tolist() == ["192.168.100.100", "host", "1.5.2"]


@pytest.mark.parametrize(
    ("first", "second", "days"),
    [
        ("2000-01", "2000-02", 31.0),
        pytest.param("01/31/2000 03:00 PM", "02/01/2000 03:00 PM", 1.0, marks=pytest.mark.slow),
        pytest.param("2020-01-01 00:00:00+00:00", "2020-01-02 00:00:00+00:00", 1.0, marks=pytest.mark.slow),
        ("2020-01-01T00:00:00.000000000", "2020-01-01T12:00:00.000000000", 0.5),
        pytest.param("31.01.20", "01.02.20", 1.0, marks=pytest.mark.slow),
        pytest.param("31 Jan 2020", "01 Feb 2020", 1.0, marks=pytest.mark.slow),
        ("2020-01-01 06:00:00", "2020-01-02", 0.75),
    ],
)
def test_formats_of_dates(first, second, days, tmp_path):
    design, x, _ = design_of(written(tmp_path, table(when=[first, second] * 15)))
    assert design.columns[1].kind == "date"
    np.testing.assert_allclose(np.diff(x[:2, 1]), days)


def test_truth_values_have_one_spelling(tmp_path):
    design, *_ = design_of(written(tmp_path, table(flag=["True", "False"] * 15)))
    new = predicted_inputs(design, "a,flag\n1,TRUE\n1,false\n", tmp_path)
    np.testing.assert_array_equal(new[:, 1], [1.0, 0.0])


def test_numbers_of_rows_beside_an_empty_line(tmp_path):
    path = tmp_path / "data.csv"
    rows = [f"{i},{i % 7},{i % 5}\n" for i in range(40)]
    path.write_text("id,a,y\n" + "".join(rows[:20]) + "\n" + "".join(rows[20:]))
    design, _, _, numbers = read_design(read_csv(path), "y")
    assert [column.name for column in design.columns] == ["a"]
    assert numbers[19:21].tolist() == [20, 22]


@pytest.mark.parametrize(
    ("cells", "new", "right"),
    [
        (["TRUE", "FALSE", "unknown"], ["TRUE", "FALSE"], [[0, 1, 0], [1, 0, 0]]),
        (["0.5", "1", "2"], ["1", "2.0"], [[0, 1, 0], [0, 0, 1]]),
        (["01", "1", "A"], ["01", "1"], [[1, 0, 0], [0, 1, 0]]),
    ],
)
def test_a_level_does_not_depend_on_the_other_rows_of_its_file(cells, new, right, tmp_path):
    design, *_ = design_of(written(tmp_path, table(level=cells * 10)), categorical=("level",))
    rows = "a,level\n" + "".join(f"1,{cell}\n" for cell in new)
    np.testing.assert_array_equal(predicted_inputs(design, rows, tmp_path)[:, 1:], right)


@pytest.mark.slow
def test_levels_of_a_long_file_are_those_of_a_short_one(tmp_path):
    """Readers that guess types part by part take '1' for a number in one part and for text in the next."""
    num = 300_000
    cells = [("1", "2", "3" if i < 280_000 else "A")[i % 3] for i in range(num)]
    cells[5] = ""
    columns = {"level": cells, "y": [i % 97 for i in range(num)]}
    design, *_ = design_of(written(tmp_path, columns), categorical=("level",))
    assert design.columns[0].levels == ("1", "2", "3", "A")


def test_empty_lines_are_rows_but_for_the_last(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("x\n1\n\n3\n4\n\n\n")
    assert read_csv(path)["x"].fillna("missing").tolist() == ["1", "missing", "3", "4"]
    path.write_text("x,y\n" + "1,2\n" * 15 + "\n\n" + "3,4\n" * 5 + "5,oops\n" + "6,7\n" * 9)
    with pytest.raises(ValueError, match="line 24 says 'oops'"):
        design_of(path)
    path.write_text('a, "b c" , y\n1, "2, 3", 4\n')
    assert list(read_csv(path).columns) == ["a", "b c", "y"] and read_csv(path).iloc[0].tolist() == ["1", "2, 3", "4"]


def test_missing_text_counts_as_one_column(tmp_path):
    place = ["east", "north", "south"] * 10
    place[3] = place[4] = ""
    design, *_ = design_of(written(tmp_path, table(place=place)))
    assert any(
        "2 rows with missing inputs are left out; most are missing in place (2)." in said for said in design.said
    )


def test_months_are_no_dates(tmp_path):
    design, *_ = design_of(written(tmp_path, table(month=["May", "June", "March"] * 10)))
    assert design.columns[1].kind == "levels"


def test_missing_rows_are_left_out_and_said(tmp_path):
    columns = table(b=[""] * 3 + list(range(ROWS - 3)))
    columns["y"][5] = ""
    columns["a"][7] = ""
    design, x, y = design_of(written(tmp_path, columns))
    assert len(x) == len(y) == ROWS - 5 and np.isfinite(x).all()
    said = " ".join(design.said)
    assert (
        "1 rows lack the target" in said
        and "4 rows with missing inputs are left out; most are missing in b (3)" in said
    )


@pytest.mark.parametrize("column", ["a", "y"])
def test_infinite_numbers_are_refused(column, tmp_path):
    columns = table()
    columns[column][7] = "-inf"
    with pytest.raises(ValueError, match=f"column '{column}' holds -inf in line 9 .*leave it empty"):
        design_of(written(tmp_path, columns))


@pytest.mark.parametrize(("line", "num"), [("1,2", 2), ("1", 1), ("1,2,3,4", 4), ('1,"2,3"', 2)])
def test_lines_of_other_lengths_are_refused(line, num, tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,b,y\n" + "1,2,3\n" * 4 + "\n" + line + "\n" + "1,2,3\n" * 40)
    with pytest.raises(ValueError, match=f"line 7 has {num} fields between ',', and the first line names 3 columns"):
        read_csv(path)
    path.write_text("a,b,y\n" + "1,2,3,,\n" * 4 + "\n")  # trailing separators are harmless
    assert read_csv(path).shape == (4, 3)


@pytest.mark.parametrize(
    ("name", "start", "is_left_out"), [("", 0, True), ("id", 1, True), ("t", 0, False), ("id", 7, True)]
)
def test_a_first_column_that_numbers_the_rows_is_left_out(name, start, is_left_out, tmp_path):
    columns = {name: list(range(start, start + ROWS))} | table()
    design, *_ = design_of(written(tmp_path, columns))
    assert (len(design.columns) == 1) == is_left_out
    assert any("numbers the rows and is left out" in text for text in design.said) == is_left_out
    shuffled = {name: [*range(start, start + ROWS)][::-1]} | table()
    assert len(design_of(written(tmp_path, shuffled))[0].columns) == 2


def test_targets_that_are_classes(tmp_path):
    for target, options, is_classes in (
        (["no", "yes"] * 15, {}, True),
        ([0, 1] * 15, {}, True),
        ([1, 2, 3] * 10, {}, False),
        ([1, 2, 3] * 10, {"classes": True}, True),
    ):
        design, _, y = design_of(written(tmp_path, table() | {"y": target}), **options)
        assert design.is_classes == is_classes
        assert y[0] == (str(target[0]) if is_classes else target[0])


def test_numbers_as_levels(tmp_path):
    design, *_ = design_of(written(tmp_path, table(region=[10, 2, 3] * 10)), categorical=("region",))
    assert labels(design) == ["a", "region=2", "region=3", "region=10"]


@pytest.mark.parametrize("values", [["p", "q", ""], ["true", "false", ""]])
def test_missing_levels_are_missing(values, tmp_path):
    """An empty field in a column of text or truth values, also with pandas 3, whose text has missing values."""
    path = tmp_path / "data.csv"
    path.write_text("g,y\n" + "".join(f"{values[i % 3]},{i}\n" for i in range(60)))
    design, x, y, rows = read_design(read_csv(path), "y")
    assert x.shape == (40, 1) and set(np.ravel(x)) == {0.0, 1.0}
    assert rows[:3].tolist() == [1, 2, 4]
    assert any("20 rows with missing inputs" in text for text in design.said) and len(y) == 40


def test_new_rows_with_unknown_levels_are_missing(tmp_path):
    design, *_ = design_of(written(tmp_path, table(color=["red", "blue", "green"] * 10)))
    new = read_csv(written(tmp_path, {"a": [1, 2], "color": ["red", "pink"]}, "new.csv"))
    assert np.isnan(design.inputs(new)).any(1).tolist() == [False, True]
    with pytest.raises(ValueError, match=r"lacks the columns \['color'\]"):
        design.inputs(new[["a"]])


BROKEN = {
    "decimal commas": (
        "a;y\n" + "".join(f"{i},5;{i}\n" for i in range(30)),
        ["--target", "y"],
        r"column 'a' looks like numbers with decimal commas \('0,5'\): say --decimal ','",
    ),
    "decimal commas in the target": (
        "a;y\n" + "".join(f"{i};{i},5\n" for i in range(30)),
        ["--target", "y"],
        "column 'y' looks like numbers with decimal commas",
    ),
    "target dropped": ("a,y\n" + "1,2\n" * 30, ["--target", "y", "--drop", "y"], "--drop: 'y' is the target"),
    "no file": (None, ["--target", "y"], "is not a file"),
    "empty": ("", ["--target", "y"], "is empty"),
    "names alone": ("a,y\n", ["--target", "y"], "and no rows"),
    "twice": ("a,a,y\n" + "1,2,3\n" * 30, ["--target", "y"], r"names the columns \['a'\] twice"),
    "more fields": ("a,y\n" + "1,2\n" * 30 + "1,2,3\n", ["--target", "y"], "line 32"),
    "no target": ("a,b\n" + "1,2\n" * 30, ["--target", "y"], r"no column \['y'\]; it has \['a', 'b'\]"),
    "text in numbers": (
        "a,y\n" + "".join(f"{i},2.{i}\n" for i in range(30)) + "oops,3\n",
        ["--target", "y"],
        "column 'a' holds numbers, but line 32 says 'oops'",
    ),
    "names": (
        "a,y\n" + "".join(f"name{i},2.{i}\n" for i in range(30)),
        ["--target", "y"],
        "text with 30 different values",
    ),
    "few rows": ("a,y\n" + "".join(f"{i},{i}\n" for i in range(9)), ["--target", "y"], "9 complete rows"),
    "no inputs": ("a,y\n" + "".join(f"1,{i}\n" for i in range(30)), ["--target", "y"], "no inputs beside the target"),
    "fraction": (
        "a,y\n" + "".join(f"{i},{i}\n" for i in range(30)),
        ["--target", "y", "--test-fraction", "1"],
        "less than 1",
    ),
    "constant target": (
        "a,y\n" + "".join(f"{i},5\n" for i in range(30)),
        ["--target", "y"],
        "the target 'y' is 5.0 in all training rows",
    ),
    "text in the target": (
        "a,y\n" + "".join(f"{i},{i % 5}\n" for i in range(30)) + "30,unknown\n",
        ["--target", "y"],
        "line 32 says 'unknown' .* or say --classes",
    ),
    "seed": (
        "a,y\n" + "".join(f"{i},{i}\n" for i in range(30)),
        ["--target", "y", "--seed", "-1"],
        "--seed -1 must be between 0",
    ),
    "too few left": (
        "a,y\n" + "".join(f"{i},{i}\n" for i in range(30)),
        ["--target", "y", "--test-fraction", "0.9"],
        "leaves 3 rows",
    ),
    "rare class": (
        "a,y\n" + "".join(f"{i},{'r' if i == 28 else 'pq'[i % 2]}\n" for i in range(30)),
        ["--target", "y"],
        r"the classes \['r'\] are so rare",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_end_with_a_clear_error(name, tmp_path, capsys):
    text, options, words = BROKEN[name]
    path = tmp_path / "data.csv"
    if text is not None:
        path.write_text(text)
    seed = next(
        seed for seed in range(99) if _is_held_out(28, ROWS, seed)
    )  # so that the rare class is left to the test
    assert main(["fit", str(path), "--out", str(tmp_path / "out"), "--seed", str(seed), *options]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("package", ["arviz", "matplotlib"])
def test_a_package_of_the_end_is_missed_at_the_start(package, tmp_path, capsys, monkeypatch):
    """A run of minutes must not end in an ImportError."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    path = tmp_path / "data.csv"
    path.write_text("x,y\n1,2\n")
    assert main(["fit", str(path), "--target", "y"]) == 2
    assert f"fspace fit needs {package}: pip install" in capsys.readouterr().err


def _is_held_out(row, num, seed):
    return row in np.random.default_rng(seed).permutation(num)[: round(0.2 * num)]


def test_a_table_in_another_encoding(tmp_path, capsys):
    path = tmp_path / "data.csv"
    path.write_bytes("größe,y\n1,2\n".encode("latin-1"))
    assert main(["fit", str(path), "--target", "y"]) == 2
    assert "not text in UTF-8" in capsys.readouterr().err


def test_a_folder_of_other_files_is_left_alone(tmp_path, capsys):
    path = written(tmp_path, table())
    assert main(["fit", str(path), "--target", "y", "--out", str(tmp_path)]) == 2
    assert "other files in it" in capsys.readouterr().err
    assert main(["predict", str(tmp_path), str(path)]) == 2
    assert "holds no model" in capsys.readouterr().err


def test_numbers_spelled_in_two_ways_are_no_classes(tmp_path):
    """1.5 and 1.50 are one number, so that these are two, which are classes."""
    design, *_ = design_of(written(tmp_path, table() | {"y": ["1.5", "1.50", "2"] * 10}))
    assert design.is_classes
    design, *_ = design_of(written(tmp_path, table() | {"y": ["1.5", "1.50", "2", "3"] * 7 + ["1.5", "2"]}))
    assert not design.is_classes


def test_new_rows_may_have_another_decimal_sign(tmp_path):
    new = tmp_path / "new.csv"
    new.write_text("c;y\n1.234;1\n")
    assert read_csv(new, ",", numbers=["c"])["c"].tolist() == ["1234"]  # points between thousands
    assert read_csv(new, ".", numbers=["c"])["c"].tolist() == ["1.234"]
    design = Design("y", design_of(written(tmp_path, table()))[0].columns, False)
    bad = tmp_path / "bad.csv"
    bad.write_text("a,y\n?,1\n")
    with pytest.raises(ValueError, match=r"line 2 says '\?' \(1 such rows\): correct it, or leave it empty\. For"):
        design.inputs(read_csv(bad))
