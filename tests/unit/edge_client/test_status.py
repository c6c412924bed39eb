"""A device's status, finished models and figures as text."""

import numpy as np
import pytest

from edge_client import status
from edge_client.learning.evaluation import of_numbers


@pytest.mark.parametrize(
    ("figures", "lines"),
    [
        ({"rounds": 3, "round": 7}, ["rounds taken part in: 3", "last round taken part in: 7"]),
        ({"disk_free_bytes": 5}, ["disk free bytes: 5"]),
        ({"loss": 0.123456, "path": [0, 2]}, ["loss: 0.1235", "path: 0 2"]),
        (
            {"ended": {"1": {"run": 1, "rounds": 2, "accuracy": 0.75, "finished": True}, "2": {"loss": 1.0}}},
            ["ended run 1: rounds taken part in 2, accuracy 0.75", "ended run 2: loss 1"],
        ),
        ({"ended": {"1": None}}, ["ended run 1: "]),
        ({"ended": 7}, ["ended: 7"]),
        ({"ended": {}}, []),
        ({"warnings": ["a; b", "c; d"]}, ["warning: a; b", "warning: c; d"]),
    ],
)
def test_each_figure_is_a_line(figures, lines):
    """Each figure of a status is a line with its label."""
    assert status.status_lines(figures) == lines


def test_unusable_loss_has_no_figures():
    """A regression model without a usable loss is listed without figures."""
    document = {
        "run": 1,
        "round": 9,
        "finished_at": "then",
        "algorithm": "cfl",
        "cluster": 3,
        "validation_accuracy": None,
        "validation_loss": None,
        "validation_samples": 1,
        "answers": False,
        "pinned": False,
    }
    assert status.model_line(document) == "run 1; finished then; cfl, cluster 3; validation 1 sample"


def test_a_choice_says_what_was_compared():
    personal = {
        "choice": "alone",
        "run": 3,
        "by_hand": False,
        "losses": {"alone": 0.25},
        "samples": 48,
        "folds": 5,
        "took_s": 2.0,
    }
    line = "trained alone of run 3; losses on 48 samples, cross-validated in 5 parts: trained alone 0.25; took 2 s"
    assert status.personal_line(personal) == line


def test_errors_of_numbers_are_two_lines():
    document = of_numbers(np.array([1.0, 2.0]), np.array([1.0, 4.0])).document()
    assert status.evaluation_lines(document) == [
        "mean squared error 2 on 2 samples; of the mean label 2.25",
        "mean absolute error 1; of the mean label 1.5",
    ]
