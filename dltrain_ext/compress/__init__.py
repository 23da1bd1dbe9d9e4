"""What a rank loses where it sends less than it has, and what it keeps of that: common to all that send gradients."""
