"""Linear attention whose memory fades. Read `interface.py` first, `README.md` for the derivation."""
