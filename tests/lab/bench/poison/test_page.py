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


def test_a_table_has_an_attack_a_line_and_a_rule_a_column():
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


def test_several_seeds_have_their_mean_and_the_lowest():
    assert "| none | 90.5 (90.0) |" in page.lines([row("none", "off", 90.0), row("none", "off", 91.0)])


def test_a_backdoor_has_a_table_with_its_success_and_the_highest_of_the_seeds():
    seeds = [row("backdoor-1", "filter", 90.0, success=10.0), row("backdoor-1", "filter", 92.0, success=30.0)]
    lines = page.lines([*ROWS, *seeds])
    at = lines.index("**digits, fedavg**: success of a backdoor / accuracy")
    assert lines[at + 4 : at + 6] == ["| backdoor-1 | 20.0 (30.0) / 91.0 (90.0) |", ""]


def test_the_tables_are_put_between_the_marks(tmp_path, monkeypatch):
    file = tmp_path / "page.md"
    file.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    monkeypatch.setattr(page, "load", lambda: ROWS)
    page.write(file)
    text = file.read_text()
    assert page.block(ROWS) in text
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
