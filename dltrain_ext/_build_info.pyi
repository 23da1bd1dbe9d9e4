"""The types of _build_info.py, which setup.py writes, so that a checkout can be type-checked before it is built."""

VERSION: str
COMMIT: str
TORCH: str
PYTHON: str
FLAGS: str
CUDA: str
