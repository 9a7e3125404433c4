"""Where a push goes."""
