"""fedgroup-synthetic with few devices and short rounds."""

import pytest
from shoal_lab.experiments.common.experiment import Options, Quiet
from shoal_lab.experiments.fedgroup import synthetic as fedgroup_synthetic

from shoal.errors import UsageError

SETTINGS = {"epochs": "1", "cohort": "6", "pretrain_steps": "5"}


def run(algorithm="fg-edc", *, mask="permutation", rounds=3, seed=7, **settings):
    options = Options(
        algorithm=algorithm,
        devices=12,
        samples=None,
        rounds=rounds,
        seed=seed,
        mask=mask,
        data_dir=None,
        settings={**SETTINGS, **settings},
    )
    return fedgroup_synthetic.synthetic(options, Quiet()).data()


@pytest.mark.parametrize("algorithm", list(fedgroup_synthetic.PUBLISHED))
def test_every_column_of_the_table_runs(algorithm):
    data = run(algorithm)
    assert data["published"] == fedgroup_synthetic.PUBLISHED[algorithm]
    assert data["parameters"]["coordinates"] == 610
    assert 0 < data["accuracy"] <= 100


def test_the_group_cold_start_takes_everybody():
    data = run()
    assert data["cold_start"]["devices"] == 12
    assert [row["tested"] for row in data["history"]] == [12, 12, 12]


@pytest.mark.parametrize("algorithm", ["fg-edc", "fg-madc", "fesem"])
def test_masked_and_clear_runs_agree(algorithm):
    clear, masked = (run(algorithm, mask=mask) for mask in ("none", "permutation"))
    assert clear["sizes"] == masked["sizes"]
    assert clear["accuracy"] == pytest.approx(masked["accuracy"], abs=0.1)


def test_the_distribution_is_a_setting():
    one, other = run("fedavg"), run("fedavg", shape_beta="0")
    assert (other["parameters"]["shape_alpha"], other["parameters"]["shape_beta"]) == (1.0, 0.0)
    assert one["history"] != other["history"]


def test_wrong_options_are_refused():
    with pytest.raises(UsageError, match="sizes are drawn"):
        fedgroup_synthetic.synthetic(Options(samples=5), Quiet())
    with pytest.raises(UsageError, match="no algorithm"):
        fedgroup_synthetic.synthetic(Options(algorithm="cfl"), Quiet())
    assert "rac" not in fedgroup_synthetic.EXPERIMENTS[0].algorithms
