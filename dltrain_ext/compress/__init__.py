"""Error feedback: what a rank loses by encoding, and how that is stored. All modules that send gradients use it."""
