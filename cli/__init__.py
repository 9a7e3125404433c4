"""The command line: thin commands, one file each. Parse, call convtools, render."""
