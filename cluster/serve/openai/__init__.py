"""The OpenAI-compatible HTTP API; it uses an `EngineClient` and does not import Ray."""
