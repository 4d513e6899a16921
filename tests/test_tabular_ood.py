"""Rows of another table among the test rows of a regression."""

import json

import numpy as np
import pytest

from numpyro_fspace.__main__ import main
from numpyro_fspace.experiments.tabular_ood import ood_rows


def test_strange_rows_are_standardized_components(data_dir):
    whole = ood_rows(10_000, 13, 0)
    np.testing.assert_allclose(whole.mean(0), 0.0, atol=1e-3)
    np.testing.assert_allclose(np.cov(whole.T), np.eye(13), atol=1e-2)  # components are uncorrelated
    some = ood_rows(50, 6, 1)
    assert some.shape == (50, 6)
    assert not np.array_equal(some, ood_rows(50, 6, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # few draws
def test_a_process_knows_where_it_knows_nothing(capsys, data_dir):
    argv = ["run", "tabular_ood", "--dataset", "boston", "--method", "gp", "bbb", "--quick"]
    assert main(argv) == 0
    gp, bbb = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert gp["ood_accuracy"] > 0.9 and gp["ood_auc"] > 0.95
    assert gp["sd_ood"] > 1.5 * gp["sd"]
    assert gp["rmse"] < 0.4
    assert bbb["rmse"] < 0.5  # and yet it does not know where it has seen no data
    assert bbb["ood_auc"] < 0.8 and bbb["ood_accuracy"] < gp["ood_accuracy"]
    assert bbb["sd_ood"] < 1.5 * bbb["sd"]
