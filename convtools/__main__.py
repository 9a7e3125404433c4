"""`python -m convtools`."""

from convtools.cli.main import main

main()
