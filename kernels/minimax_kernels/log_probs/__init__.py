"""Log-probabilities of given tokens without the full logits, and full logits in float32. Read `interface.py` first."""
