"""What an optimizer keeps of each parameter: where it is in memory, and in which form."""
