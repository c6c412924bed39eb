"""The tables of the poison page."""

from shoal_lab.bench.poison import page


def row(attack, rule, accuracy, **changes):
    fields = {"attack": attack, "rule": rule, "accuracy": accuracy, "data": "digits", "strategy": "fedavg"}
    return {**fields, "mode": "rotation", "error": 1e-7, **changes}


ROWS = [
    row("absent", "off", 90.0),
    row("none", "off", 91.0),
    row("none", "filter", 91.25),
    row("sign-flip", "off", 60.0, error=3e-7),
    row("false-losses", "filter", 88.0, strategy="ifca"),
]


def test_seeds_have_mean_and_lowest():
    assert "| none | 90.5 (90.0) |" in page.lines([row("none", "off", 90.0), row("none", "off", 91.0)])


def test_a_backdoor_has_a_table_of_its_own():
    seeds = [row("backdoor-1", "filter", 90.0, success=10.0), row("backdoor-1", "filter", 92.0, success=30.0)]
    lines = page.lines([*ROWS, *seeds])
    at = lines.index("**digits, fedavg**: success of a backdoor / accuracy")
    assert lines[at + 4 : at + 6] == ["| backdoor-1 | 20.0 (30.0) / 91.0 (90.0) |", ""]


def test_attack_a_line_and_a_rule_a_column():
    lines = page.lines(ROWS)
    assert lines[0] == "**digits, fedavg**: 90.0 without the three"
    assert lines[2:7] == [
        "| attack | off | filter |",
        "|---|---|---|",
        "| none | 91.0 | 91.2 |",
        "| sign-flip | 60.0 | - |",
        "| false-losses | - | 88.0 |",
    ]
    assert lines[-1] == "Largest error of a mean under the mask (rotation): 3e-07."
