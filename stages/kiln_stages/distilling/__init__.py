"""Distillation from scored rows: who scored them, how they are scored, admitted and read."""
