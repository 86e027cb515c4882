"""Who owns memory: lanes (one pool, one stream, one lock) and what their outputs cost."""
