"""One file an algorithm, behind one interface on masked offsets."""
