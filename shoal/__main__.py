"""``python -m shoal`` is the program `shoal`; torchrun starts it so."""

from shoal.cli import main

if __name__ == "__main__":
    main()
