"""Recipes: how one is read, where its steps run, what of it is done, and how the rest is carried out."""
