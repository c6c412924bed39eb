"""The figures of one run of the load bench."""

import pytest
from shoal_lab.bench.load.driver import DriverReport
from shoal_lab.bench.load.fleet_load import Sample
from shoal_lab.bench.load.measurement import figures


class Fleet:
    """The sizes of a fleet; no process."""

    devices, model_bytes, algorithm, rounds = 10, 400, "fedavg", 3
    churn = 0.0
    shards, core_each = 1, False


def record(number, contributed=10, *, final=False):
    facts = {"round": number, "ordered": 10, "contributed": contributed, "seconds": float(number), "final": final}
    return {**facts, "out_of_step": {}}


def test_figures_leave_out_the_warm_up_and_the_final_round():
    samples = [
        Sample(
            at_s=float(n),
            closed=n,
            aggregator_cpu_s=0.1 * n,
            broker_cpu_s=0.01 * n,
            rss_mb=50.0,
            rss_mb_max=50.0 + n,
            open_files=10 + n,
        )
        for n in range(5)
    ]
    records = [record(n) for n in (1, 2, 3)] + [record(4, 9, final=True)]
    data = figures(Fleet(), records, samples, [DriverReport(20, 1, 2, 0.5), DriverReport(19, 0, 3, 0.5)]).data()
    assert data["seconds_per_round_median"] == 2.5
    assert data["aggregator_cpu_ms_per_upload"] == pytest.approx(1e3 * 0.2 / 20)
    assert data["broker_cpu_s_per_round"] == pytest.approx(0.01)
    assert (data["aggregator_rss_mb_max"], data["open_files_max"]) == (54.0, 14)
    assert (data["uploads_expected"], data["uploads_counted"]) == (40, 39)
    assert (data["nacks"], data["reminders"]) == (1, 5)
