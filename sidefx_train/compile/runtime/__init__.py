"""Called by the user: dispatch to cache entries, recapture, eager fallback, background compilation."""
