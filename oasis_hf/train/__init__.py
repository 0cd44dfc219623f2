"""Training of EAGLE-3 heads."""
