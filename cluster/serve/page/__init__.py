"""The page at `/`: self-contained files of a playground for speculation and a live view."""
