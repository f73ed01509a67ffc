"""`python -m normgeo` is the command `normgeo`."""

from normgeo.cli.main import main

main()
