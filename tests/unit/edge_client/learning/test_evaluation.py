"""Figures of a model beside those of a guess."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.learning import evaluation
from edge_client.learning.evaluation import majority_share, name_of, of_classes, of_numbers


def test_classes_are_counted():
    """Classes are counted and compared with the most common one."""
    found = of_classes(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2]), 3)
    assert (found.samples, found.correct, found.accuracy) == (4, 3, 0.75)
    assert (found.common, found.majority, found.is_no_better) == (2, 0.5, False)
    assert found.confusion == ((1, 0, 0), (0, 1, 0), (0, 1, 1))
    document = found.document(("a", "b", "c"))
    assert document["majority"] == {"label": "c", "accuracy": 0.5}
    assert document["labels"] == ["a", "b", "c"]
    assert document["confusion"] == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize(("answers", "no_better"), [([1, 1, 1], True), ([0, 1, 1], False), ([1, 1, 0], True)])
def test_ignorance_is_no_better(answers, no_better):
    """A model that knows nothing is no better than the majority."""
    assert of_classes(np.array(answers), np.array([0, 1, 1]), 2).is_no_better is no_better


def test_sequence_has_label_at_each_position():
    found = of_classes(np.array([[0, 1], [1, 1]]), np.array([[0, 0], [1, 1]]), 2)
    assert (found.samples, found.accuracy) == (4, 0.75)


def test_many_classes_have_no_table(monkeypatch):
    monkeypatch.setattr(evaluation, "MOST_CONFUSED", 2)
    assert of_classes(np.array([0]), np.array([0]), 3).confusion is None
    assert of_classes(np.array([0]), np.array([0]), 3).document()["confusion"] is None


def test_errors_stand_beside_the_means():
    """Numbers have errors beside those of the mean."""
    found = of_numbers(np.array([1.0, 2.0, 5.0], np.float32), np.array([1.0, 2.0, 3.0], np.float32))
    assert (found.samples, found.squared, found.absolute) == (3, pytest.approx(4 / 3), pytest.approx(2 / 3))
    assert (found.mean_squared, found.mean_absolute) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert found.is_no_better
    assert found.document()["mean_label"] == {
        "mean_squared_error": found.mean_squared,
        "mean_absolute_error": found.mean_absolute,
    }
    assert not of_numbers(np.array([1.0, 2.0]), np.array([1.0, 2.5])).is_no_better


def test_names_and_the_majoritys_share():
    assert (name_of(1, ("a", "b")), name_of(7, ())) == ("b", "7")
    assert majority_share(np.array([[3, 3], [1, 3]])) == 0.75
