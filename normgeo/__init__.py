"""normgeo: geometric analysis of the normalization layers of transformers."""
