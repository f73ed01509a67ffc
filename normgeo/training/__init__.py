"""Twins trained with LayerNorm and RMSNorm, and the angles of every checkpoint."""
