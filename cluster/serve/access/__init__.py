"""Access control: API keys, limits, CORS."""
