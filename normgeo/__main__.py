"""`python -m normgeo` is the command `normgeo`."""

from normgeo.cli import main

main()
