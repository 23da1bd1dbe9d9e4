"""The inputs of the case simulate: workloads, measured all-reduces, and published figures."""
