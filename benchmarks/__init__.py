"""Benchmarks that compare dltrain_ext with its peers; `python -m benchmarks --help` lists them."""
