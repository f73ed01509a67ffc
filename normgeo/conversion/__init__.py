"""The mean gauge: Pre-LN models become Pre-RMSNorm and Pre-CRMSNorm ones, certified, saved and fast."""
