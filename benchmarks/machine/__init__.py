"""Processes, ranks and emulated hosts for the benchmarks, and the limits of the link and of the memory."""
