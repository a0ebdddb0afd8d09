"""Small real checkpoints, held-out prompts, and the scripts that made them."""
