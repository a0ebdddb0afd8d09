"""The engine: takes requests and delivers deltas. It does not import Ray."""
