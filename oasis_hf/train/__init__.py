"""Training of EAGLE-3 heads: `oasis-hf train-drafter`."""
