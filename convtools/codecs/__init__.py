"""What is not a rearrangement: casts. Explicit, at the edge of a plan, and reported."""
