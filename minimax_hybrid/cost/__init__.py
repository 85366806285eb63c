"""What the model costs: exact counts, rooflines, the report's published figures, and the printed report."""
