"""The metrics: names, values, labels, and Prometheus' own parser."""

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aggregator.page import feed as feed_module
from aggregator.page.metrics import MOST_CLUSTERS
from shoal.protocol.messages import Vitals
from tests.helpers.pages import NOW_S, PagePlace, names
from tests.helpers.trees import ROOT


def families(place):
    return {f.name: f for f in text_string_to_metric_families(place.metrics.text().decode())}


def values(place):
    """Return (name, labels) -> value of every sample."""
    samples = [s for f in families(place).values() for s in f.samples]
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


def test_names_begin_with_shoal(place):
    """All names begin with shoal and no label names a device."""
    place.publish(closed=3)
    for (name, labels), _ in values(place).items():
        assert name.startswith("shoal_")
        assert {key for key, _ in labels} <= {"cluster", "phase", "version", "what"}
    text = place.metrics.text().decode()
    assert not any(device in text for device in place.devices)


def test_labels_have_their_devices(place):
    """The shown name is no such label, since it names a device."""
    labels = {"dev-000": "name=Gate 7,site=berlin", "dev-001": "site=berlin", "dev-002": "site=bonn"}
    place.publish(labels=labels, changes={"dev-001": {"online": False}})
    found = values(place)
    assert {k[1][0][1] for k in found if k[0] == "shoal_devices_with_label"} == {"site=berlin", "site=bonn"}
    assert found["shoal_devices_with_label", (("label", "site=berlin"),)] == 2
    assert found["shoal_devices_with_label_online", (("label", "site=berlin"),)] == 1


def test_the_values_are_those_of_the_fleet(place):
    place.close_rounds(2)
    place.close_rounds(1, missing=["dev-003"], refused_norm={"dev-001": 9.0}, contributed=3)
    place.publish(received=3, changes={"dev-002": {"online": False}})
    found = {name: value for (name, labels), value in values(place).items() if not labels}
    expected = {
        "shoal_devices": 4,
        "shoal_devices_online": 3,
        "shoal_devices_impaired": 1,
        "shoal_aggregator_connected": 1,
        "shoal_run": 1,
        "shoal_run_round": 4,
        "shoal_run_rounds": 60,
        "shoal_round_uploads": 3,
        "shoal_round_uploads_needed": 4,
        "shoal_round_devices_missing": 1,
        "shoal_rounds_closed_total": 3,
        "shoal_uploads_total": 11,
        "shoal_uploads_missing_total": 1,
        "shoal_uploads_left_out_total": 1,
        "shoal_upload_bytes_total": 31_400 * 11,
        "shoal_clusters": 1,
        "shoal_round_deadline_passed": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["shoal_round_loss"] == pytest.approx(0.2 + 1.5 / 4)
    assert found["shoal_process_resident_memory_bytes"] > 1e6


def test_the_least_accuracy_of_a_device(place):
    place.publish()
    assert "shoal_device_accuracy_min" not in families(place), "no device has been tested"
    place.close_rounds(1, device_accuracy={"dev-000": [9, 10], "dev-001": [1, 4], "dev-002": [0, 0]})
    place.close_rounds(1, device_accuracy={})
    place.publish()
    assert values(place)["shoal_device_accuracy_min", ()] == 0.25


def test_worst_condition_is_shown(place):
    """The worst condition of the devices that report it."""
    place.publish()
    assert values(place)["shoal_devices_reporting", ()] == 0
    assert "shoal_devices_disk_free_bytes_min" not in families(place)
    reports = {
        "dev-000": Vitals(disk_free_bytes=9, load=1.0, cores=4, temperature_c=40.0, battery_percent=90),
        "dev-001": Vitals(disk_free_bytes=7, load=1.0, cores=1, temperature_c=71.5),
        "dev-002": Vitals(),
    }
    place.publish(changes={d: {"vitals": v, "vitals_at_s": NOW_S} for d, v in reports.items()})
    found = {name: value for (name, labels), value in values(place).items() if not labels}
    expected = {
        "shoal_devices_reporting": 3,
        "shoal_devices_disk_free_bytes_min": 7,
        "shoal_devices_load_ratio_max": 1,
        "shoal_devices_temperature_celsius_max": 71.5,
        "shoal_devices_battery_ratio_min": 0.9,
    }
    assert {name: found[name] for name in expected} == expected
    assert "shoal_devices_memory_free_bytes_min" not in found


@pytest.mark.parametrize("computing", [False, True])
def test_closing_round_is_counted(place, computing):
    """A round that is being closed is counted as one."""
    place.publish(computing=computing)
    assert values(place)["shoal_round_computing", ()] == computing


def test_one_phase_is_1_and_the_others_are_0(place):
    place.publish()
    phases = {dict(labels)["phase"]: v for (name, labels), v in values(place).items() if name == "shoal_run_phase"}
    assert values(place)["shoal_expiry_days", (("what", "broker"),)] == pytest.approx(10, abs=0.01)
    assert {phase for phase, value in phases.items() if value} == {"round"}
    assert {"gathering", "final_round", "finished", "not_served"} < set(phases)


def test_clusters_are_limited(tmp_path, monkeypatch):
    """In a run of ``local`` each device is a cluster of its own."""
    monkeypatch.setattr(feed_module, "UPDATE_S", 0.0)
    devices = names(3 * MOST_CLUSTERS)
    with PagePlace(tmp_path, devices) as place:
        place.close_rounds(1, clusters={d: i for i, d in enumerate(devices)})
        place.publish()
        found = values(place)
    assert sum(name == "shoal_cluster_devices" for name, _ in found) == MOST_CLUSTERS
    assert found["shoal_clusters", ()] == len(devices)


def test_no_figures_before_a_round(place):
    """Before the first round and without a run there are no figures of rounds."""
    place.publish(plan=None)
    assert "shoal_run" not in families(place)
    place.publish()
    assert "shoal_run" in families(place)
    assert "shoal_round_seconds" not in families(place)


def test_dashboard_asks_for_real_metrics(place):
    """The grafana dashboard asks for metrics that exist."""
    place.publish(closed=3)
    there = {name for name, _ in values(place)}
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "shoal.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    used = {name for expression in asked for name in re.findall(r"shoal_\w+", expression)}
    assert len(used) > 10
    assert used - there == set()
