"""`shoal new`: small runnable starts for a strategy, a task or an experiment of one's own.

Files
    cli.py        the command: names, and filling in the templates
    templates/    a folder for each kind; ``$name``, ``$module`` and ``$Class`` stand for the names

- A strategy and a task become packages whose entry points make them known by name once they are installed: see
  `shoal.util.extensions`. An experiment is a script.
- Every start runs as it is written, and so do its own tests.
- A folder with files in it is left alone.

Example:
    shoal new strategy geometric-median && pip install -e geometric-median && pytest geometric-median
"""
