"""Topics: what is built is read back, and nothing else is read."""

import pytest

from shoal.errors import ConfigError, WireError
from shoal.protocol.topics import MAX_CHUNK_INDEX, ParsedTopic, TopicKind, Topics, chunk_topic, matches, parse

TOPICS = Topics("farm-7")


@pytest.mark.parametrize(
    ("topic", "text", "parsed"),
    [
        (TOPICS.round, "shoal/v1/farm-7/s/round", ParsedTopic(TopicKind.ROUND, "farm-7")),
        (TOPICS.plan, "shoal/v1/farm-7/s/plan", ParsedTopic(TopicKind.PLAN, "farm-7")),
        (TOPICS.roster, "shoal/v1/farm-7/s/roster", ParsedTopic(TopicKind.ROSTER, "farm-7")),
        (chunk_topic(TOPICS.plan, 0), "shoal/v1/farm-7/s/plan/0", ParsedTopic(TopicKind.PLAN, "farm-7", index=0)),
        (TOPICS.roster_change, "shoal/v1/farm-7/s/roster-change", ParsedTopic(TopicKind.ROSTER_CHANGE, "farm-7")),
        (
            chunk_topic(TOPICS.roster, 12),
            "shoal/v1/farm-7/s/roster/12",
            ParsedTopic(TopicKind.ROSTER, "farm-7", index=12),
        ),
        (chunk_topic(TOPICS.round, 1), "shoal/v1/farm-7/s/round/1", ParsedTopic(TopicKind.ROUND, "farm-7", index=1)),
        (TOPICS.model("4f2a"), "shoal/v1/farm-7/s/model/4f2a", ParsedTopic(TopicKind.MODEL, "farm-7", label="4f2a")),
        (
            chunk_topic(TOPICS.model("4f2a"), MAX_CHUNK_INDEX),
            f"shoal/v1/farm-7/s/model/4f2a/{MAX_CHUNK_INDEX}",
            ParsedTopic(TopicKind.MODEL, "farm-7", label="4f2a", index=MAX_CHUNK_INDEX),
        ),
        (TOPICS.keys("pi-1"), "shoal/v1/farm-7/s/keys/pi-1", ParsedTopic(TopicKind.KEYS, "farm-7", device="pi-1")),
        (TOPICS.up("pi-1"), "shoal/v1/farm-7/d/pi-1/up", ParsedTopic(TopicKind.UP, "farm-7", device="pi-1")),
        (TOPICS.ctl("pi-1"), "shoal/v1/farm-7/d/pi-1/ctl", ParsedTopic(TopicKind.CTL, "farm-7", device="pi-1")),
        (TOPICS.state("pi-1"), "shoal/v1/farm-7/d/pi-1/state", ParsedTopic(TopicKind.STATE, "farm-7", device="pi-1")),
        (TOPICS.enrol("9c"), "shoal/v1/farm-7/e/9c", ParsedTopic(TopicKind.ENROL, "farm-7", label="9c")),
        (TOPICS.grant("9c"), "shoal/v1/farm-7/e/9c/grant", ParsedTopic(TopicKind.GRANT, "farm-7", label="9c")),
        (
            chunk_topic(TOPICS.grant("9c"), 2),
            "shoal/v1/farm-7/e/9c/grant/2",
            ParsedTopic(TopicKind.GRANT, "farm-7", label="9c", index=2),
        ),
        (
            chunk_topic(TOPICS.keys("pi-1"), 1),
            "shoal/v1/farm-7/s/keys/pi-1/1",
            ParsedTopic(TopicKind.KEYS, "farm-7", device="pi-1", index=1),
        ),
        (TOPICS.at(TopicKind.OWNER_ROSTER), "shoal/v1/farm-7/o/roster", ParsedTopic(TopicKind.OWNER_ROSTER, "farm-7")),
    ],
)
def test_every_topic_has_its_text(topic: str, text: str, parsed: ParsedTopic) -> None:
    """Every topic has its documented text and is read back."""
    assert topic == text
    assert parse(topic) == parsed
    assert topic.count("/") <= 6


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "/",
        "shoal",
        "shoal/v1/farm",
        "shoal/v2/farm/s/round",
        "Shoal/v1/farm/s/round",
        "shoal/v1//s/round",
        "shoal/v1/Farm/s/round",
        "shoal/v1/farm/s/rounds",
        "shoal/v1/farm/s/up",
        "shoal/v1/farm/d/pi/round",
        "shoal/v1/farm/d/pi/up/0",
        "shoal/v1/farm/d/pi",
        "shoal/v1/farm/d/+/up",
        "shoal/v1/farm/d/../up",
        "shoal/v1/farm/s/model",
        "shoal/v1/farm/s/model/",
        "shoal/v1/farm/s/model/#",
        "shoal/v1/farm/s/model/a/0/0",
        "shoal/v1/farm/s/model/a/00",
        "shoal/v1/farm/s/model/a/-1",
        "shoal/v1/farm/s/model/a/+1",
        "shoal/v1/farm/s/model/a/1 ",
        "shoal/v1/farm/s/model/a/\u0661",
        f"shoal/v1/farm/s/model/a/{MAX_CHUNK_INDEX + 1}",
        "shoal/v1/farm/s/keys/pi/x",
        "shoal/v1/farm/s/keys/pi/0/0",
        "shoal/v1/farm/e/9c/grants",
        "shoal/v1/farm/o/plan",
        "shoal/v1/farm/s/round/",
        "shoal/v1/farm/e/a/b",
        "shoal/v1/" + "a" * 65 + "/s/round",
        "shoal/v1/farm/e/" + "a" * 300,
        "\0",
    ],
)
def test_any_other_topic_is_refused(topic: str) -> None:
    with pytest.raises(WireError):
        parse(topic)


@pytest.mark.parametrize("name", ["", "A", "a/b", "+", "#", "-a", "a" * 65, "é"])
def test_impossible_names_are_refused(name: str) -> None:
    """Names that can't stand in a topic are refused."""
    for build in (Topics, TOPICS.up, TOPICS.ctl, TOPICS.state, TOPICS.model, TOPICS.keys, TOPICS.enrol):
        with pytest.raises(ConfigError):
            build(name)
    if name:
        with pytest.raises(ConfigError):
            TOPICS.filter(TopicKind.KEYS, name)


def test_other_fleets_numbers_are_refused() -> None:
    assert TOPICS.parse(TOPICS.up("a")).device == "a"
    with pytest.raises(WireError, match="belongs to"):
        TOPICS.parse(Topics("other").up("a"))
    for index in (-1, MAX_CHUNK_INDEX + 1):
        with pytest.raises(WireError):
            chunk_topic(TOPICS.plan, index)


@pytest.mark.parametrize("kind", TopicKind)
def test_filter_selects_its_kind_only(kind: TopicKind) -> None:
    """A filter selects the topics of its kind and their chunks only."""
    topics = {other: TOPICS.at(other, "a") for other in TopicKind}
    for chosen in (TOPICS.filter(kind), TOPICS.filter(kind, "a")):
        assert [other for other, topic in topics.items() if matches(chosen, topic)] == [kind]
        assert matches(chosen, chunk_topic(topics[kind], 9)) is kind.has_chunks
        assert not matches(chosen, Topics("other").at(kind, "a"))
    assert matches(TOPICS.filter(kind), TOPICS.at(kind, "b"))
    assert matches(TOPICS.filter(kind, "a"), TOPICS.at(kind, "b")) is (not kind.variable)


@pytest.mark.parametrize(
    ("topic_filter", "topic", "expected"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", False),
        ("a/b/c", "a/b", False),
        ("a/+", "a/", True),
        ("a/+", "a", False),
        ("a/#", "a", True),
        ("a/#", "a/b/c", True),
        ("#", "a/b", True),
        ("+/+", "/b", True),
        ("+", "/b", False),
        ("#", "$SYS/x", False),
        ("+/x", "$SYS/x", False),
        ("$SYS/#", "$SYS/x", True),
        ("a/#/c", "a/b/c", False),
    ],
)
def test_matching_follows_the_mqtt_standard(topic_filter: str, topic: str, expected: bool) -> None:
    """Examples of MQTT 5.0, section 4.7."""
    assert matches(topic_filter, topic) is expected
