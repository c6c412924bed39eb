"""A compiled kernel for Shoal's masks. `crypto.mask.kernel` loads it, and says what it must do."""

from pathlib import Path

LIBRARY = next(Path(__file__).parent.glob("_kernel.*so"))
