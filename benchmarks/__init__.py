"""Benchmarks of dltrain_ext against its peers: `python -m benchmarks --help`."""
