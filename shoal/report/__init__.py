"""Stored results: JSON with its origin, the papers' figures, and tables generated into documents.

- A saved result names the command, the commit and the machine that it comes from (`record`).
- Paths and plots are checked before the work whose result goes there (`record.check_place`, `plot.check`).
- A generated table stands between two marks of its page (`pages`); a test compares page and results.

Example: ``shoal simulate ID --save FILE --plot FILE`` saves the result with `record.save` and draws it with `plot.plot`.
"""
