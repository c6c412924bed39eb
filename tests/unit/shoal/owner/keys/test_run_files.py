"""Names and numbers of run files."""

from shoal.owner.keys.vault import RUNS, highest_run, run_file


def test_highest_run_is_that_of_a_file(tmp_path):
    """The highest run is the highest number of a run file."""
    assert highest_run(tmp_path) == 0
    (tmp_path / RUNS).mkdir()
    for run in (2, 11):
        run_file(tmp_path, run).touch()
    for name in ("000099.run.tmp", "12.run", "000100.txt"):
        (tmp_path / RUNS / name).touch()
    assert highest_run(tmp_path) == 11
