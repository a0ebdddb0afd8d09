"""Translation of other engines' configuration keys."""
