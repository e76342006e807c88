"""Rows that must not stand in two places: what makes two rows the same for that, whose rows they are, and who meets."""
