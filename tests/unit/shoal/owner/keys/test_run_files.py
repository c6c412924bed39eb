"""Names and numbers of run files."""

from shoal.owner.keys.run_files import RUNS, highest_run, run_file


def test_the_highest_run_is_the_highest_number_of_a_run_file(tmp_path):
    assert highest_run(tmp_path) == 0
    (tmp_path / RUNS).mkdir()
    for run in (2, 11):
        run_file(tmp_path, run).touch()
    for name in ("000099.run.tmp", "12.run", "000100.txt"):
        (tmp_path / RUNS / name).touch()
    assert highest_run(tmp_path) == 11
