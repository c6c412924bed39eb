"""Identities, envelopes, roster and replay protection; used by both sides."""
