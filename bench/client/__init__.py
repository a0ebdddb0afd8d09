"""`outrider bench serve`: any OpenAI-compatible server under load, over HTTP."""
