"""The fleet owner: keys, roster, tasks and run plans."""
