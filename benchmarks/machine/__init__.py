"""What the benchmarks run on: processes and ranks, emulated hosts, and what the line and the memory carry."""
