"""The demo, and measurements of the real code."""
