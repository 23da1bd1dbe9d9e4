"""What the case simulate takes from outside: models, measured all-reduces, and what others have reported."""
