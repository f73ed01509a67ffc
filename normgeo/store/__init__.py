"""Hidden states kept: a zarr store written by one process or many, read and checked, and the angles from it."""
