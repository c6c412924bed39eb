"""What only a machine with an NVIDIA card can tell: `make gpu`."""
