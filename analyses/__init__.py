"""One file for each figure and table: `compute` gives its numbers, `plot` draws them; run by `python -m analyses`."""
