"""Log-probabilities of given tokens without the full logits; logits in float32. Read `interface.py` first."""
