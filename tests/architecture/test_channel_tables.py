"""The two tables of channels: a row each, whole cells, and a page changed between its marks alone."""

import dataclasses

import pytest

from docs import channel_tables
from shoal.protocol import channels
from shoal.protocol.channels import CHANNELS, EVERYONE, Party


def tables():
    """Return both tables as lists of rows of cells, the headings first."""
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in channel_tables.block().split("\n\n")
    ]


def row(table, channel):
    """Return a channel's row as a mapping from headings."""
    (found,) = [cells for cells in table[2:] if cells[0] == channel.name]
    return dict(zip(table[0], found, strict=True))


def test_each_table_has_a_row_a_channel():
    """A bar inside a cell would shift the columns after it."""
    for table in tables():
        assert [cells[0] for cells in table[2:]] == [c.name for c in CHANNELS]
        assert {len(cells) for cells in table} == {len(table[0])}
        assert all(cells[i] for cells in table for i in range(len(cells)))


def test_first_table_says_how_it_travels():
    """The first table says how a channel travels."""
    travel, _ = tables()
    found = row(travel, channels.UPLOAD)
    assert found["topic"] == f"`{channels.UPLOAD.topic.base}`"
    assert (found["chunk kind"], found["retained"], found["QoS"]) == ("upload", "no", "0 or 1")
    assert (found["sender"], found["receivers"]) == ("device", "aggregator")
    assert row(travel, channels.ROSTER)["retained"] == "yes"
    assert row(travel, channels.ROSTER)["QoS"] == "1"
    assert row(travel, channels.KEYS)["receivers"] == "aggregator, worker, device"


def test_clearing_receiver_is_named():
    """A receiver that clears its message is named."""
    travel, _ = tables()
    clearing = [c.name for c in CHANNELS if "which clears it" in row(travel, c)["receivers"]]
    assert clearing == [c.name for c in CHANNELS if c.cleared_by]
    assert clearing


def test_second_table_says_what_it_has():
    """The second table says what a channel contains."""
    _, content = tables()
    found = row(content, channels.KEYS)
    assert (found["message"], found["envelope"]) == ("GrantFile", "member")
    assert found["purpose"] == "`grant/{role}/{keys_since}/{receiving}`"
    assert found["recipient"] == "aggregator or worker or device"
    assert found["largest size"] == f"{channels.KEYS.largest:,}", "a number, as there is no formula"
    assert row(content, channels.ROSTER)["recipient"] == f"`{EVERYONE}`"
    assert row(content, channels.ROSTER)["largest size"] == channels.ROSTER.formula


def test_the_tables_follow_the_channels(monkeypatch):
    changed = dataclasses.replace(channels.ROSTER, name="news", receivers=(Party.NEWCOMER, Party.OWNER), retained=False)
    monkeypatch.setattr(channel_tables, "CHANNELS", (changed,))
    travel, content = tables()
    assert len(travel) == len(content) == 3
    assert (travel[2][0], travel[2][3], travel[2][6]) == ("news", "no", "new device, owner")


@pytest.mark.parametrize("old", ["", "old tables\n| a | b |\n"])
def test_writing_replaces_text_between_marks(tmp_path, old):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{channel_tables.BEGIN}\n{old}{channel_tables.END}\n\nThe end.\n")
    channel_tables.write(page)
    expected = f"# Page\n\n{channel_tables.BEGIN}\n{channel_tables.block()}\n{channel_tables.END}\n\nThe end.\n"
    assert page.read_text() == expected
    channel_tables.write(page)
    assert page.read_text() == expected
