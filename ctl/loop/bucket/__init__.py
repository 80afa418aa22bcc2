"""Keeps a run in an object store: it trains in a local folder, which a thread copies to the store."""
