"""The card that a party's `init` makes: what the program prints of it."""

from __future__ import annotations

from pathlib import Path

from crypto.seal.identity import fingerprint
from shoal.membership.grants import open_card
from shoal.util.console import note, say_result


def say_card(role: str, name: str, card: Path, *, as_json: bool) -> None:
    """Print a card's path and its fingerprint, and how the owner adds the party.

    Args:
        role: of the party: device, aggregator or worker.
        name: its name.
        card: the file.
        as_json: for a program that reads the output.
    """
    mine = fingerprint(open_card(card.read_bytes()).member)
    note(f"fingerprint {mine}")
    note(f"next: shoal-fleet add-{role} FLEET_DIR CARD on the owner's machine")
    say_result({role: name, "fingerprint": mine, "card": str(card)}, str(card), as_json=as_json)
