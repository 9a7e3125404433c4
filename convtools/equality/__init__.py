"""Are two sets of weights equal: compare, fingerprints, the report."""
