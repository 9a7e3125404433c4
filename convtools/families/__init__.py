"""What each architecture looks like: blocks as tables, families as lists of blocks."""
