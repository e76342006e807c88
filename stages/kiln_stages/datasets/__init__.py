"""Named data sets: which rows they hold, who is whose relative, and which split each row is in."""
