"""How frames and buckets travel between the two ends of a refit."""
